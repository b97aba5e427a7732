"""Losses that are ready to use, by name: `train.loss="grpo"` with `train.loss_options={kl=0.01}`.

In: a name, "" for plain nll, or a user's module:function, and options. Out: a Loss: the function,
what a step's sum is divided by, and the fields that the data must have. `make_loss("dpo")` is
divided by sequences and needs pair, sign and ref_logprobs. The functions are pure functions of
tensors, without process groups.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longshore.batch import MicroBatch
from longshore.data.source import (
    ADVANTAGES,
    OLD_LOGPROBS,
    PAIR,
    REF_LOGPROBS,
    SIGN,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
)
from longshore.settings import LossName, names_of
from longshore.train.loss import (
    TEMPERATURE,
    Divisor,
    LogitsHead,
    Loss,
    LossCall,
    Metric,
    SequenceSums,
    checked_temperature,
    count_sequences,
    count_tokens,
    user_count,
)
from longshore.train.loss_fields import needed_fields
from longshore.user_code import load_function

Result = tuple[Tensor, dict[str, Metric]]


def smoothed_cross_entropy(
    nll: Tensor,
    logsumexp: Tensor,
    mean_logit: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """(T): with label_smoothing ε and z_loss z

        (1 − ε)·nll + ε·(logsumexp − mean_logit) + z·logsumexp²

    The second term is the mean over the vocabulary of −log p, as in torch's cross_entropy. Logits 0
    and log 3 with label 1, ε = 0.1 and z = 0: 0.9·0.288 + 0.1·(1.386 − 0.549) = 0.343.
    """
    smooth = logsumexp - mean_logit
    return nll + label_smoothing * (smooth - nll) + z_loss * logsumexp.square()


DISTILL_METRICS = ("kl", "agreement")


def distill(
    head: LogitsHead,
    batch: MicroBatch,
    *,
    temperature: float = 1.0,
    renormalize: bool = False,
    nll_weight: float = 0.0,
) -> Result:
    """(T): distillation from a teacher's stored top-k log-probabilities.

        Σ over the k of p·(log p − log q)

    with the teacher's p (`teacher_ids`, `teacher_logprobs`, (T, k)) and the student's q at this
    temperature, over the whole vocabulary. Two stored tokens with p = ½ and ¼ and a student with
    q = ¼ and ¼ give ½·log 2 = 0.347. renormalize scales the k probabilities to a sum of 1 first,
    and nll_weight adds a multiple of the label's own nll.

    Metrics are kl, the sum above, and agreement, the share of tokens whose likeliest successor is
    the same for both. The temperature divides the student's logits alone: the teacher's values
    must be stored at the same one. Where fewer than k tokens are stored, −inf fills the row, with
    any id. An id past the vocabulary gives NaN, which is reported; run/data.py refuses it before.
    """
    assert batch.targets is not None
    mask_T = batch.targets.loss_mask
    ids_TK = batch.token_fields[TEACHER_IDS].long()
    # Where no loss counts the fields may have anything; a label −100 is no index.
    teacher_TK = batch.token_fields[TEACHER_LOGPROBS].where(mask_T.unsqueeze(1), 0.0)
    ids_TK = ids_TK.where(mask_T.unsqueeze(1) & (teacher_TK > -torch.inf), 0)
    is_unknown_TK = (ids_TK < 0) | (ids_TK >= head.vocab_size)
    ids_TK = ids_TK.where(~is_unknown_TK, 0)
    teacher_TK = teacher_TK.where(~is_unknown_TK, torch.nan)
    labels_T = batch.targets.labels.where(mask_T, 0)

    def divergence(
        logits_nV: Tensor, ids_nK: Tensor, teacher_nK: Tensor, labels_n: Tensor
    ) -> Tensor:
        teacher_nK = teacher_nK.to(logits_nV.dtype)
        if renormalize:
            teacher_nK = teacher_nK.log_softmax(1)
        logits_nV = logits_nV if temperature == 1 else logits_nV / temperature
        lse_n1 = logits_nV.logsumexp(1, keepdim=True)
        student_nK = logits_nV.gather(1, ids_nK) - lse_n1
        p_nK = teacher_nK.exp()
        # A stored −inf has p = 0, and 0 · −inf counts as 0.
        kl_n = torch.where(p_nK == 0, 0.0, p_nK * (teacher_nK - student_nK)).sum(1)
        likeliest_n1 = ids_nK.gather(1, teacher_nK.detach().argmax(1, keepdim=True))
        agrees_n = logits_nV.detach().argmax(1) == likeliest_n1.squeeze(1)
        values_n = kl_n
        if nll_weight:
            own_n = temperature * logits_nV.gather(1, labels_n.unsqueeze(1)).squeeze(1)
            lse_n = (temperature * logits_nV).logsumexp(1)
            values_n = values_n + nll_weight * (lse_n - own_n)
        return torch.stack([values_n, kl_n.detach(), agrees_n.to(kl_n.dtype)], dim=1)

    values_T, kl_T, agrees_T = head.map_logits(divergence, ids_TK, teacher_TK, labels_T).unbind(1)
    return values_T, {"kl": kl_T, "agreement": agrees_T}


def policy_gradient(
    logprobs: Tensor,
    batch: MicroBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl: float = 0.0,
    on_policy: bool = False,
) -> Result:
    """(T): clipped policy gradient, as in PPO and GRPO.

    With the advantage A, r = exp(logprob − old) and d = reference − logprob, a token has the value

        −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) + kl·(exp(d) − d − 1)

    whose last term is Schulman's third estimator of KL(policy ‖ reference), never negative. With
    r = 1.5, A = 1 and clip_high 0.2 a token has the value −1.2 and no gradient. on_policy: the
    tokens were sampled by the model as it is, so every ratio is 1.

    Metrics: advantage A; ratio r; clipped, the share of tokens that the clip leaves without a
    gradient; old_kl, r − log r − 1, which estimates KL(sampling policy ‖ policy); and kl, the
    estimate before it is weighted.
    """
    advantages = field_of_tokens(batch, ADVANTAGES, like=logprobs)
    old = logprobs.detach() if on_policy else field_of_tokens(batch, OLD_LOGPROBS, like=logprobs)
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    values = -(ratio * advantages).minimum(clipped * advantages)
    metrics: dict[str, Metric] = {"advantage": advantages}
    if not on_policy:
        is_clipped = ratio * advantages > clipped * advantages
        old_kl = ratio - (logprobs - old) - 1
        metrics |= {"ratio": ratio, "clipped": is_clipped, "old_kl": old_kl}
    if kl:
        distance = field_of_tokens(batch, REF_LOGPROBS, like=logprobs) - logprobs
        metrics["kl"] = estimate = distance.exp() - distance - 1
        values = values + kl * estimate
    return values, metrics


def metric_names(*, on_policy: bool = False, kl: float = 0.0, **_: object) -> tuple[str, ...]:
    """What policy_gradient returns beside its values, with these options."""
    ratios = () if on_policy else ("ratio", "clipped", "old_kl")
    return ("advantage", *ratios, *(("kl",) if kl else ()))


def field_of_tokens(batch: MicroBatch, name: str, *, like: Tensor) -> Tensor:
    """(T): an extra field of tokens, or of sequences for each of their tokens."""
    if name in batch.token_fields:
        return batch.token_fields[name].to(like.dtype)
    if name in batch.sequence_fields:
        return batch.sequence_fields[name][batch.ctx.sequence_index].to(like.dtype)
    known = ", ".join([*batch.token_fields, *batch.sequence_fields]) or "none"
    raise ValueError(
        f"the loss reads the field {name}, which the data do not have; their fields: {known}; "
        f"declare it in data.fields, as {name}:per_target:float32"
    )


DPO_METRICS = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")


def dpo(
    sequences: SequenceSums,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reference_free: bool = False,
) -> Result:
    """(N): direct preference optimization; each sequence has the loss of its pair.

        −log σ(β·m),    m = (logprob − reference) of the chosen − that of the rejected

    Fields of the data say which pair a sequence is in (`pair`), whether it was chosen (`sign` 1) or
    rejected (−1), and its log-probability under a reference model (`ref_logprobs`). With β = 0.1
    and m = 2 the loss is 0.598. label_smoothing ε assumes that a share ε of the pairs is labelled
    the wrong way round: (1 − ε)·(−log σ(β·m)) + ε·(−log σ(−β·m)).

    Metrics are means over pairs. A sequence's reward is β·(logprob − reference); reward_margin is
    β·m, and reward_accuracy the share of pairs in which it is above 0.
    """
    pair_N, sign_N = sequences.fields[PAIR], sequences.fields[SIGN]
    numbers_P, index_N = pair_N.unique(return_inverse=True)
    _check_pairs(numbers_P, index_N, sign_N)
    gain_N = sequences.logprobs
    if not reference_free:
        gain_N = gain_N - sequences.fields[REF_LOGPROBS]
    margin_P = gain_N.new_zeros(len(numbers_P)).index_add(0, index_N, sign_N * gain_N)
    wrong_P = -logsigmoid(-beta * margin_P)
    loss_P = -logsigmoid(beta * margin_P)
    metrics: dict[str, Metric] = {
        "reward_chosen": (beta * gain_N, sign_N > 0),
        "reward_rejected": (beta * gain_N, sign_N < 0),
        "reward_margin": beta * margin_P[index_N],
        "reward_accuracy": margin_P[index_N] > 0,
    }
    return (loss_P + label_smoothing * (wrong_P - loss_P))[index_N], metrics


def _check_pairs(numbers_P: Tensor, index_N: Tensor, sign_N: Tensor) -> None:
    """Each pair has one chosen and one rejected sequence in the step."""
    zeros_P = torch.zeros_like(numbers_P, dtype=torch.int64)
    chosen_P, rejected_P = (
        zeros_P.index_add(0, index_N, (sign_N == sign).long()) for sign in (1, -1)
    )
    size_P = zeros_P.index_add(0, index_N, torch.ones_like(index_N))
    wrong_P = (chosen_P != 1) | (rejected_P != 1) | (size_P != 2)
    if bool(wrong_P.any()):
        at = int(wrong_P.nonzero()[0])
        raise ValueError(
            f"train.loss=dpo: pair {int(numbers_P[at])} has {int(size_P[at])} sequences in "
            f"this step, {int(chosen_P[at])} of them with sign 1 and {int(rejected_P[at])} "
            "with sign −1; give each pair one of each, and let data.group=pair keep them together"
        )


Options = dict[str, Any]
Average = Literal["tokens", "sequences"]


Ready = tuple[LossCall | None, str]
"""A loss with its options (None for plain nll), and what a step's sum is divided by."""


def _cross_entropy(options: Options) -> Ready:
    _check_options("cross_entropy", options, _defaults(smoothed_cross_entropy) | {TEMPERATURE: 1.0})
    _check_range(options, "label_smoothing", 0, 1)
    _check_range(options, "z_loss", 0, math.inf)
    changes = any(options.get(name) for name in _defaults(smoothed_cross_entropy))
    if not changes and options.get(TEMPERATURE, 1) == 1:
        return None, "tokens"
    return LossCall(smoothed_cross_entropy, "cross_entropy", options), "tokens"


def _policy_gradient(name: str, average: Average, options: Options) -> Ready:
    known = _defaults(policy_gradient)
    own: Options = {"average": average, "entropy_bonus": 0.0, "entropy_average": average}
    _check_options(name, options, known | own | {"log_entropy": True, TEMPERATURE: 1.0})
    for clip in ("clip_low", "clip_high", "kl"):
        _check_range(options, clip, 0, math.inf)
    average = _average(options, "average", average)
    of_entropy = _average(options, "entropy_average", average)
    bonus, temperature = options.pop("entropy_bonus", 0.0), options.pop(TEMPERATURE, 1.0)
    logs = options.pop("log_entropy", True)
    metrics = metric_names(**options)
    call = LossCall(
        _averaged(options, average=average, of_entropy=of_entropy, bonus=bonus, logs=logs),
        name,
        {TEMPERATURE: temperature} if temperature != 1 else {},
        metrics=(*metrics, "entropy") if logs or bonus else metrics,
    )
    return call, average


def _average(options: Options, option: str, default: Average) -> Average:
    average: Average = options.pop(option, default)
    if average not in ("tokens", "sequences"):
        raise ValueError(
            f"train.loss_options: {option} is {average!r}; it must be tokens or sequences"
        )
    return average


def _averaged(
    options: Options, *, average: Average, of_entropy: Average, bonus: float, logs: bool
) -> Callable[..., Result]:
    """The function with as few parameters as its options need: each costs time.

    average: "tokens" adds all tokens up, for a mean over the step's loss tokens; "sequences" first
    divides each by its sequence's loss tokens, for the mean over sequences of their means.
    """

    def plain(logprobs: Tensor, batch: MicroBatch) -> Result:
        return policy_gradient(logprobs, batch, **options)

    def with_entropy(logprobs: Tensor, entropy: Tensor, batch: MicroBatch) -> Result:
        values, metrics = plain(logprobs, batch)
        return values - bonus * entropy, {**metrics, "entropy": entropy}

    def of_sequences(logprobs: Tensor, sequence_tokens: Tensor, batch: MicroBatch) -> Result:
        values, metrics = plain(logprobs, batch)
        return values / sequence_tokens, metrics

    def of_sequences_with_entropy(
        logprobs: Tensor, entropy: Tensor, sequence_tokens: Tensor, batch: MicroBatch
    ) -> Result:
        values, metrics = plain(logprobs, batch)
        values = values / sequence_tokens if average == "sequences" else values
        # The sum is divided by the step's sequences or tokens, as `average` says.
        sequences, tokens = batch.counts.sequences, batch.counts.main
        each = 1 / tokens if of_entropy == "tokens" else 1 / (sequences * sequence_tokens)
        each = each * (sequences if average == "sequences" else tokens)
        return values - bonus * each * entropy, {**metrics, "entropy": entropy}

    if not (logs or bonus):
        return plain if average == "tokens" else of_sequences
    return with_entropy if average == of_entropy == "tokens" else of_sequences_with_entropy


def _dpo(options: Options) -> Ready:
    _check_options("dpo", options, _defaults(dpo) | {TEMPERATURE: 1.0})
    _check_range(options, "beta", 0, math.inf)
    _check_range(options, "label_smoothing", 0, 0.5)
    return LossCall(dpo, "dpo", options, metrics=DPO_METRICS), "sequences"


def _distill(options: Options) -> Ready:
    _check_options("distill", options, _defaults(distill))
    checked_temperature(options.get(TEMPERATURE, 1.0))
    return LossCall(distill, "distill", options, metrics=DISTILL_METRICS), "tokens"


_MAKERS: dict[str, Callable[[Options], Ready]] = {
    "cross_entropy": _cross_entropy,
    "dpo": _dpo,
    "grpo": partial(_policy_gradient, "grpo", "sequences"),
    "ppo": partial(_policy_gradient, "ppo", "tokens"),
    "distill": _distill,
}


def make_loss(
    function: str = "", count: str = "auto", options: Mapping[str, Any] | None = None
) -> Loss:
    """From names. function: "" is nll, or one of losses.py, or a user's module:function.

    count: "tokens", "sequences", a user's function, or "auto", which is tokens unless the loss has
    values of sequences. options: of the function, by the names of its parameters.
    """
    own, fields = dict(options or {}), needed_fields(function, options or {})
    if not function and own:
        raise ValueError("train.loss_options need a train.loss; name one, or leave them out")
    if function in names_of(LossName):
        call, auto = _MAKERS[function](own)
    elif function:
        call = LossCall(load_function(function, "train.loss"), function, own)
        auto = "sequences" if call.of_sequences else "tokens"
    else:
        call, auto = None, "tokens"
    count = auto if count == "auto" else count
    known: dict[str, Divisor] = {"tokens": count_tokens, "sequences": count_sequences}
    divisor = known.get(count) or user_count(load_function(count, "train.loss_count"), count)
    return Loss(call, divisor, function, fields)


def _defaults(function: Callable[..., Any]) -> Options:
    """The options of a function, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _check_options(name: str, options: Options, known: Options) -> None:
    for option, value in options.items():
        if option not in known:
            raise ValueError(
                f"train.loss_options: {name} has no option {option!r}; it has {', '.join(known)}"
            )
        kind = type(known[option])
        fits = isinstance(value, bool) if kind is bool else not isinstance(value, bool)
        if not fits or not isinstance(value, int | float if kind is float else kind):
            wanted = {bool: "true or false", float: "a number", str: "a name"}[kind]
            raise ValueError(f"train.loss_options: {option} is {value!r}; it must be {wanted}")


def _check_range(options: Options, option: str, least: float, most: float) -> None:
    value = options.get(option)
    if value is not None and not (least <= value <= most and math.isfinite(value)):
        limits = f"from {least:g} to {most:g}" if most < math.inf else f"at least {least:g}"
        raise ValueError(f"train.loss_options: {option} is {value}; it must be {limits}")
