"""For a controller that owns all sequences of a step: a lane's micro-batches, without any ranks.

In: a plan and all its sequences, in the plan's order. Out: the MicroBatches of one lane, with the
counts of the whole step. An RL controller calls it once for each lane and sends the results to the
workers; `unpack` and `merge` (data/pack.py) bring their outputs back to the rows.

Two sequences of 3 and 5 tokens in one pack of lane 0: one micro-batch of 8 tokens, whose counts are
6 labels, 8 tokens and 2 sequences; other lanes have counts of the same step, and other tokens.
"""

from collections.abc import Sequence as Seq

from longshore.batch import Counts, MicroBatch
from longshore.data.fields import Field
from longshore.data.pack import pack_step
from longshore.data.shard import count_targets, cut_shards, lane_cuts
from longshore.data.source import TokenizedSample
from longshore.plan.types import Plan


def pack_lane(
    plan: Plan,
    lane: int,
    samples: Seq[TokenizedSample],
    *,
    fields: Seq[Field] = (),
    depths: int = 0,
    pad_id: int = 0,
) -> list[MicroBatch]:
    """A lane's micro-batches, one for each round. samples: of the whole plan, in its order.

    fields: what the samples carry besides tokens. depths: of multi-token prediction.
    """
    if len(samples) != len(plan.sequences):
        raise ValueError(
            f"{len(samples)} samples were given for a plan of {len(plan.sequences)} sequences; "
            "give all of them, in the order in which they were planned"
        )
    labels = [count_targets(sample.loss_mask, depths) for sample in samples]
    totals = [sum(column) for column in zip(*labels, strict=True)]
    counts = Counts.of(totals, [sample.length for sample in samples])
    owned = dict(enumerate(samples))
    shards = cut_shards(plan, owned, lane_cuts(plan, lane), depths=depths, fields=fields)
    return pack_step(plan, lane, shards, counts=counts, pad_id=pad_id)
