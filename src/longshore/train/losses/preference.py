"""Direct preference optimization (DPO): a loss of pairs of sequences.

In: the log-probability of each sequence's completion, and as fields of the data which pair it is in
(`pair`), whether it was chosen (`sign` 1) or rejected (−1), and its log-probability under a
reference model (`ref_logprobs`, per target or per sequence; `longshore score` writes it). Out: for
each sequence the loss of its pair, so that the mean over sequences is that over pairs:

    −log σ(β·m),    m = (logprob − reference) of the chosen − that of the rejected

With β = 0.1 and m = 2 that is 0.598. label_smoothing ε assumes that a share ε of the pairs is
labelled the wrong way round: (1 − ε)·(−log σ(β·m)) + ε·(−log σ(−β·m)).

Its metrics are means over pairs. A sequence's reward is β·(logprob − reference); reward_margin is
that of the chosen less that of the rejected, β·m, and reward_accuracy the share of pairs in which
it is above 0.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longshore.data.source import PAIR, REF_LOGPROBS, SIGN
from longshore.train.loss_inputs import Metric, SequenceSums

METRICS = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")


def dpo(
    sequences: SequenceSums,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reference_free: bool = False,
) -> tuple[Tensor, dict[str, Metric]]:
    """(N): of each sequence the loss of its pair; and its METRICS."""
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
        place = int(wrong_P.nonzero()[0])
        raise ValueError(
            f"train.loss=dpo: pair {int(numbers_P[place])} has {int(size_P[place])} sequences in "
            f"this step, {int(chosen_P[place])} of them with sign 1 and {int(rejected_P[place])} "
            "with sign −1; give each pair one of each, and let data.group=pair keep them together"
        )
