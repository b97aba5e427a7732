"""The stages of a model that one pipeline rank has, and what their tensors are called.

In: a config and a layout. Out: Stages, a module with one Decoder for each of the rank's stages. A
whole model is the case of one stage, and every function here takes it too.

Names are those of the whole decoder, on every layout, so a checkpoint written under one is read
under another. With "Et|tL" and tied weights, rank 1 has layers.1 and a copy of embed.weight, which
its own module calls head.weight.

The copies' gradients are summed (EmbeddingCopies), so every copy takes the same update, and they
stay equal without being sent. "Et|tm|L" with tied weights has three: for the tokens, for the tokens
ahead of the depth, and as the head. Lane 1's ranks 0, 1 and 2 of the pipeline have the same rows of
it, and sum those.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from longshore.arch.cuts import TensorCut
from longshore.arch.decoder import DecoderConfig
from longshore.distributed.collectives import sum_over
from longshore.distributed.topology import Topology, destroy_groups, new_group_if_in
from longshore.model.decoder import Decoder
from longshore.model.interface import LanguageModel
from longshore.parallel.fsdp import local_part
from longshore.parallel.shards import cuts_by_name
from longshore.plan.layout import Layout, Stage, one_stage

EMBEDDING = "embed.weight"


class Stages(nn.Module):
    """One Decoder for each stage of a pipeline rank, by the stage's number as text."""

    def __init__(self, config: DecoderConfig, layout: Layout, *, pp_rank: int) -> None:
        super().__init__()
        self.config = config
        self.layout = layout
        self.parts = nn.ModuleDict(
            {
                str(number): Decoder(config, layout.stages[number])
                for number in layout.of_rank(pp_rank)
            }
        )


Model = LanguageModel | Stages


def stages_of(model: Model) -> dict[int, LanguageModel]:
    """The rank's stages by their number."""
    if isinstance(model, LanguageModel):
        return {0: model}
    parts = {int(name): part for name, part in model.parts.items()}
    assert all(isinstance(part, Decoder) for part in parts.values())
    return parts  # type: ignore[return-value]


def layout_of(model: Model) -> Layout:
    if isinstance(model, LanguageModel):
        return one_stage(layers=len(model.config.layers), depths=len(model.config.mtp))
    return model.layout


def cut_tensors_by_name(model: Model) -> Iterator[tuple[str, Tensor, TensorCut | None]]:
    """The same, each with its TensorCut, if it has one."""
    cuts = {part: cuts_by_name(part) for part in stages_of(model).values()}
    for part, of_part in cuts.items():
        for name, parameter in part.named_parameters():
            yield whole_name(model.config, name), parameter, of_part.get(name)
    for part, of_part in cuts.items():
        for name, buffer in saved_buffers(part):
            yield name, buffer, of_part.get(name)


def saved_buffers(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that are part of a checkpoint, as torch calls persistent."""
    for prefix, module in part.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def tensor_names(config: DecoderConfig, stage: Stage | None = None) -> list[str]:
    """Of parameters, then buffers, of a stage or of the whole decoder."""
    with torch.device("meta"):
        model = Decoder(config, stage)
    return [name for name, _ in chain(model.named_parameters(), model.named_buffers())]


def whole_name(config: DecoderConfig, name: str) -> str:
    """A stage's parameter as the whole decoder calls it."""
    return EMBEDDING if config.tied and name == "head.weight" else name


def holders(config: DecoderConfig, layout: Layout) -> list[int]:
    """The stages with a copy of the embedding, the one with the embedding itself first."""
    return [
        number
        for number, stage in enumerate(layout.stages)
        if stage.has_embedding or (config.tied and stage.head)
    ]


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
