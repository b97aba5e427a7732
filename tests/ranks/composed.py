"""A model on lanes × TP × PP × EP gloo ranks, for tests that compare it with sequences alone.

What the ranks issue is recorded and compared, too.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tests.ranks.piped import stage_batches, staged
from tests.ranks.spine import MTP_WEIGHT

from longshore.distributed.topology import CPGroups, make_topology
from longshore.parallel.apply import Choices
from longshore.parallel.pipeline import EmbeddingCopies, stages_of, whole_name
from longshore.parallel.shards import boxes_of, cuts_by_name
from longshore.plan.layout import Layout, one_stage
from longshore.train.losses import make_loss
from longshore.train.optimizer import clip
from longshore.train.step import Stepper


@dataclass(frozen=True)
class Composed:
    """What the ranks of a step found together."""

    loss: float
    gradients: dict[str, torch.Tensor]
    norm: float
    experts: tuple[torch.Tensor, ...]
    """Tokens of each expert, by layer of one pipeline rank."""


@contextmanager
def ranks_of(*, lanes: int, tp: int = 1, pp: int = 1, ep: int = 1):
    topology = make_topology(lanes=lanes, tp=tp, pp=pp, ep=ep, device="cpu")
    with CPGroups(topology, [size for size in (1, 2, 4) if size <= lanes]) as groups:
        yield topology, groups


def whole_tensors(parts: list[dict[str, tuple]]) -> dict[str, torch.Tensor]:
    """Put together from the boxes of all ranks; every value is there, and copies are equal."""
    wholes: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, (shape, boxes) in part.items():
            whole = wholes.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            for index, block in boxes:
                known = whole[index]
                there = ~known.isnan()
                assert torch.equal(known[there], block[there]), f"copies of {name} differ"
                whole[index] = block
    for name, whole in wholes.items():
        assert not whole.isnan().any(), f"no rank has some of {name}"
    return wholes


def own_gradients(model) -> dict[str, tuple]:
    """Of each parameter its whole shape and this rank's blocks of the gradient."""
    found = {}
    for number, part in stages_of(model).items():
        cuts = cuts_by_name(part)
        for name, parameter in part.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None, f"{name} is frozen, and has a gradient"
                continue
            shape, boxes = boxes_of(parameter.grad, cuts.get(name))
            blocks = [(box.index, box.local.detach().clone()) for box in boxes]
            found[f"{number} {whole_name(model.config, name)}"] = (shape, blocks)
    return found


def composed(
    config, plan, samples, topology, groups, choices: Choices, *, layout: Layout | None = None
) -> Composed:
    """The plan on all ranks; every rank gets the whole outcome."""
    layout = layout or one_stage(layers=len(config.layers), depths=len(config.mtp))
    model = staged(config, layout, topology, groups, choices)
    copies = EmbeddingCopies(model, topology) if topology.pp > 1 else None
    stepper = Stepper(
        model,
        None,
        topology,
        choices.mode,
        make_loss(),
        0.0,
        MTP_WEIGHT,
        copies=copies,
        trace=True,
    )
    batches = stage_batches(plan, samples, topology, layout)
    losses, counts, _ = stepper.gradients(batches, max(1, batches[0].counts.main), plan=plan)
    mine = losses if topology.tp_rank == 0 else torch.zeros_like(losses)
    parts = [None] * topology.world_size
    dist.all_gather_object(parts, own_gradients(model))
    gradients: dict[str, torch.Tensor] = {}
    for name, gradient in whole_tensors(parts).items():
        known = gradients.setdefault(name.split()[1], gradient)
        assert torch.equal(known, gradient), f"copies of {name} differ"
    norm = clip(model, 0.0, topology, also=mine, counted=copies.counted if copies else None)
    routed = counts.over_lanes(topology)
    if copies is not None:
        copies.close()
    return Composed(stepper.weighted(mine).item(), gradients, norm.item(), routed)
