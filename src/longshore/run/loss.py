"""The loss of a run, after a look at its data: what does not fit is refused before the first step.

In: a configuration and its sequences. Out: a Loss, whose fields the data have. Data of rows with
`chosen` and `rejected` have the fields pair and sign; with train.loss empty the answers would be
fine-tuned on, the rejected ones too:

    data.path has pairs of chosen and rejected answers, …; set train.loss=dpo, …

For train.loss=dpo all pairs are looked at once: each has one sequence of either sign in a step.
"""

import numpy as np
from numpy.typing import NDArray

from longshore.config.schema import RunConfig
from longshore.data.source import PAIR, SIGN, IndexedSource, Ints, sequence_values
from longshore.data.stream import TextStream
from longshore.run.data import step_groups
from longshore.train.loss import Loss, check_fields, make_loss

MOST_EXACT = 2**53
"""Whole numbers up to this are exact in float64, in which sums of a step are."""


def data_loss(config: RunConfig, source: IndexedSource | TextStream) -> Loss:
    """The run's loss, whose fields the data have."""
    train = config.train
    loss = make_loss(train.loss, train.loss_count, train.loss_options)
    check_fields(loss, source.fields)
    if {PAIR, SIGN} <= {spec.name for spec in source.fields}:
        _refuse_likelihood(train.loss)
    return loss


def _refuse_likelihood(name: str) -> None:
    """Cross entropy on pairs makes the rejected answers likelier too."""
    if name in ("", "cross_entropy"):
        given = f"with train.loss={name}" if name else "without a train.loss"
        raise ValueError(
            f"data.path has pairs of chosen and rejected answers, and {given} both would be made "
            "likelier; set train.loss=dpo, or prepare rows that have the chosen answers alone, as "
            "prompt and completion"
        )


def check_pairs(config: RunConfig, source: IndexedSource) -> None:
    """Refuses data of DPO that some step would fail on; nothing for other losses."""
    if config.train.loss != "dpo":
        return
    if not source.loss_tokens.all():
        place = int(np.argmin(source.loss_tokens))
        raise _refused(f"sequence {place} has no loss token", "leave its pair out")
    pairs, signs = (sequence_values(source, name) for name in (PAIR, SIGN))
    if np.abs(pairs).max() > MOST_EXACT:
        largest = int(pairs[np.abs(pairs).argmax()])
        raise _refused(f"pair {largest} is beyond ±2^53", "number pairs from 0")
    order = np.lexsort((signs, pairs))
    _check_signs(pairs[order], signs[order])
    groups = step_groups(config, source)
    if groups is not None:
        first, second = groups[order].reshape(-1, 2).T
        if (torn := first != second).any():
            pair = int(pairs[order][::2][torn.argmax()])
            raise _refused(
                f"the two sequences of pair {pair} have different values of data.group",
                "set data.group=pair",
            )


def _check_signs(pairs: Ints, signs: Ints) -> None:
    """Sorted by pair, then by sign: −1 and 1 of the same pair in turn."""
    numbers, sizes = np.unique(pairs, return_counts=True)
    is_wrong: NDArray[np.bool_] = sizes != 2
    if not is_wrong.any():
        is_wrong = (signs.reshape(-1, 2) != (-1, 1)).any(1)
    if is_wrong.any():
        pair = int(numbers[is_wrong.argmax()])
        theirs = signs[pairs == pair].tolist()
        shown = ", ".join(map(str, theirs[:4])) + (", …" if len(theirs) > 4 else "")
        raise _refused(
            f"pair {pair} has {len(theirs)} sequence{'s' if len(theirs) > 1 else ''}, of sign "
            f"{shown}",
            "give each pair one of sign 1 and one of sign -1, and its number to no other row; a "
            "file that is named twice has all its pairs twice",
        )


def _refused(problem: str, way_out: str) -> ValueError:
    return ValueError(f"data.path: train.loss=dpo compares two answers, but {problem}; {way_out}")
