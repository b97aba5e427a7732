"""The copies of the embedding on a pipeline's stages: their gradients are summed, and counted once.

In: a rank's model and its topology. Out: before the gradient norm, the sum of all copies' gradients
in each of them; so every copy takes the same update, and they stay equal without being sent.

"Et|tm|L" with tied weights has three copies: for the tokens, for the tokens ahead of the depth, and
as the head. Lane 1's ranks 0, 1 and 2 of the pipeline have the same rows of it, and sum those.
"""

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from longshore.distributed.collectives import sum_over
from longshore.distributed.topology import Topology, destroy_groups, new_group_if_in
from longshore.parallel.fsdp import local_part
from longshore.parallel.pipeline.stages import EMBEDDING, Model, holders, layout_of, stages_of


class EmbeddingCopies:
    """This rank's copies, and the group of the pipeline ranks that have some.

    All ranks construct and close it together. counted: those parameters of the model that the norm
    counts, and a checkpoint saves, on this rank.
    """

    def __init__(self, model: Model, topology: Topology) -> None:
        layout = layout_of(model)
        self.stages = holders(model.config, layout)
        ranks = sorted({layout.rank_of(stage) for stage in self.stages})
        self.mine = [
            _copy(part) for number, part in stages_of(model).items() if number in self.stages
        ]
        first = self.mine[:1] if topology.pp_rank == ranks[0] else []
        copies = {id(parameter) for parameter in self.mine}
        kept = {id(parameter) for parameter in first}
        self.counted = [
            parameter
            for parameter in model.parameters()
            if id(parameter) not in copies or id(parameter) in kept
        ]
        self.group: ProcessGroup | None = None
        if len(ranks) > 1:
            blocks = [
                [topology.rank_at(lane=lane, tp_rank=tp, pp_rank=rank) for rank in ranks]
                for lane in range(topology.lanes)
                for tp in range(topology.tp)
            ]
            self.group = new_group_if_in(blocks, backend=topology.backends[topology.device.type])

    def sum_gradients(self) -> None:
        """Gives every copy the sum of all their gradients. The ranks that have one call it."""
        if len(self.stages) == 1 or not self.mine or not self.mine[0].requires_grad:
            return
        gradients = [_gradient(parameter) for parameter in self.mine]
        total = gradients[0]
        for other in gradients[1:]:
            total += other
        if self.group is not None:
            sum_over(total, self.group)
        for other in gradients[1:]:
            other.copy_(total)

    def close(self) -> None:
        if self.group is not None:
            destroy_groups([self.group])


def _copy(part: nn.Module) -> nn.Parameter:
    named = dict(part.named_parameters())
    return named[EMBEDDING] if EMBEDDING in named else named["head.weight"]


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local_part(parameter.grad)
