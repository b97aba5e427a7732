"""The loss of a run, after a look at its data: what does not fit is refused before the first step.

In: a configuration and its sequences. Out: a Loss, whose fields the data have. Data of rows with
`chosen` and `rejected` have the fields pair and sign; with train.loss empty the answers would be
fine-tuned on, the rejected ones too:

    data.path has pairs of chosen and rejected answers, …; set train.loss=dpo, …

For train.loss=dpo all pairs are looked at once: each has one sequence of either sign in a step.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from longshore.config.data_parts import loss_columns
from longshore.config.schema import RunConfig
from longshore.data.fields import Field
from longshore.data.source import PAIR, REF_LOGPROBS, SIGN, IndexedSource, Ints, sequence_values
from longshore.data.stream import TextStream
from longshore.data.tokenize import Rules
from longshore.run.data import step_groups
from longshore.train.loss import Loss, check_fields, make_loss


def data_loss(config: RunConfig, source: IndexedSource | TextStream | Rules) -> Loss:
    """The run's loss, whose fields the data have, or will have once they are tokenized."""
    train = config.train
    loss = make_loss(train.loss, train.loss_count, train.loss_options)
    fields = source.fields
    if isinstance(source, Rules) and scores_reference(config, fields):
        fields = (*fields, Field(REF_LOGPROBS, "target", "float32"))
    check_fields(loss, fields)
    if {PAIR, SIGN} <= {spec.name for spec in source.fields}:
        _refuse_likelihood(train.loss)
    return loss


def scores_reference(config: RunConfig, fields: Iterable[Field]) -> bool:
    """Whether the run scores its data with its first weights: pairs for DPO, without scores."""
    names = {spec.name for spec in fields}
    is_read = config.train.loss == "dpo" and REF_LOGPROBS in loss_columns(config)
    return is_read and REF_LOGPROBS not in names and {PAIR, SIGN} <= names


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
