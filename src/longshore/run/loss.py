"""The loss of a run, after a look at its data: what does not fit is refused before the first step.

In: a configuration and its sequences. Out: a Loss, whose fields the data have. Data of rows with
`chosen` and `rejected` have the fields pair and sign; with train.loss empty the answers would be
fine-tuned on, the rejected ones too:

    data.path has pairs of chosen and rejected answers, …; set train.loss=dpo, …
"""

from longshore.config.schema import RunConfig
from longshore.data.source import PAIR, IndexedSource
from longshore.data.stream import TextStream
from longshore.train.loss import Loss, check_fields, make_loss
from longshore.train.losses.preference import SIGN


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
        given = f"train.loss={name}" if name else "without a train.loss"
        raise ValueError(
            f"data.path has pairs of chosen and rejected answers, and {given} both would be made "
            "likelier; set train.loss=dpo, or prepare rows that have the chosen answers alone, as "
            "prompt and completion"
        )
