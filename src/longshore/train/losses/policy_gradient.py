"""Clipped policy gradient, as in PPO and GRPO, with a KL term and an entropy bonus.

In: the log-probability of each token, and as fields of the data its advantage A, its
log-probability when it was sampled and, for the KL term, that of a reference model. Out: a value
for each token. With r = exp(logprob − old)

    −min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A) + kl·(exp(d) − d − 1) − entropy_bonus·entropy

and d = reference − logprob, Schulman's third estimator of KL(policy ‖ reference), which is never
negative. With r = 1.5, A = 1 and clip_high 0.2 a token has the value −1.2 and no gradient.

Its metrics are means over loss tokens: advantage A; ratio r, clipped, the share of tokens that the
clip leaves without a gradient, and old_kl, r − log r − 1, which estimates KL(sampling policy ‖
policy); with the KL term kl, its estimate before it is weighted; and entropy.

average="tokens" adds all tokens up, for a mean over the step's loss tokens; "sequences" divides
each by its sequence's loss tokens first, for the mean over sequences of their means.
"""

from torch import Tensor

from longshore.batch import MicroBatch
from longshore.data.source import ADVANTAGES, OLD_LOGPROBS, REF_LOGPROBS
from longshore.train.loss_inputs import Metric


def policy_gradient(
    logprobs: Tensor,
    batch: MicroBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl: float = 0.0,
    on_policy: bool = False,
) -> tuple[Tensor, dict[str, Metric]]:
    """(T): without the entropy bonus, each token with weight 1; and the metrics.

    on_policy: the tokens were sampled by the model as it is, so that every ratio is 1.
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
