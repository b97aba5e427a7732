"""What the stages of a pipeline rank read of a whole micro-batch."""

from dataclasses import replace

from longshore.batch import Depth, MicroBatch
from longshore.plan.layout import StageInputs


def only(batch: MicroBatch, inputs: StageInputs) -> MicroBatch:
    """The micro-batch with the tensors that `inputs` names, and always with the context."""
    depths = tuple(
        Depth(
            depth.token_ids if inputs.depth_ids else None,
            depth.targets if inputs.depth_targets else None,
        )
        for depth in batch.mtp
    )
    return replace(
        batch,
        token_ids=batch.token_ids if inputs.token_ids else None,
        targets=batch.targets if inputs.targets else None,
        mtp=depths if inputs.depth_ids or inputs.depth_targets else (),
        token_fields=batch.token_fields if inputs.token_fields else {},
        sequence_fields=batch.sequence_fields if inputs.sequence_fields else {},
    )
