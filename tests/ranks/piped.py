"""A model in stages on gloo ranks, for tests that compare it with every sequence alone.

What the ranks issue is recorded and compared, too.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from tests.data.stage_batch import only
from tests.ranks.spine import MTP_WEIGHT, Outcome, batches_of, dense

from longshore.arch.decoder import DecoderConfig
from longshore.distributed.topology import CPGroups, make_topology
from longshore.model.init import initial_block
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.pipeline import EmbeddingCopies, Stages, stages_of, whole_name
from longshore.parallel.shards import fill
from longshore.plan.layout import Layout
from longshore.train.losses import make_loss
from longshore.train.step import Stepper


@dataclass(frozen=True)
class Piped:
    """What ranks of a pipeline found: the loss, the gradients, and how many graphs they held."""

    loss: float
    gradients: dict[str, torch.Tensor]
    norm: float
    most_graphs: list[int]


def deep(layers: int, **changes) -> DecoderConfig:
    """The dense decoder with more layers."""
    config = dense(**changes)
    return replace(config, layers=(config.layers * layers)[:layers])


@contextmanager
def pipeline_of(lanes: int, pp: int):
    topology = make_topology(lanes=lanes, pp=pp, device="cpu")
    with CPGroups(topology, [size for size in (1, 2, 4) if size <= lanes]) as groups:
        yield topology, groups


def staged(config, layout: Layout, topology, groups, choices: Choices) -> Stages:
    with torch.device("meta"):
        model = Stages(config, layout, pp_rank=topology.pp_rank).double()
    for part in stages_of(model).values():
        parallelize(part, topology, groups, choices=choices)
        fill(part, topology.device, partial(initial_block, config, seed=3))
    return model


def stage_batches(plan, samples, topology, layout: Layout):
    """The lane's micro-batches, with what this rank's stages read."""
    inputs = layout.inputs(topology.pp_rank)
    whole = batches_of(plan, samples, topology.lane, layout.depths)
    return [only(batch, inputs) for batch in whole]


def piped(config, plan, samples, layout: Layout, topology, groups, choices: Choices) -> Piped:
    """The plan through the pipeline; every rank gets the whole outcome."""
    model = staged(config, layout, topology, groups, choices)
    copies = EmbeddingCopies(model, topology)
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
    losses, _, _ = stepper.gradients(batches, max(1, batches[0].counts.main), plan=plan)
    mine = {
        whole_name(config, name): p.grad.full_tensor()
        for part in stages_of(model).values()
        for name, p in part.named_parameters()
    }
    square = sum(p.grad.full_tensor().square().sum().item() for p in copies.counted)
    everything = [None] * topology.world_size
    part = (topology.pp_rank, stepper.weighted(losses).item(), mine, square)
    dist.all_gather_object(everything, (*part, stepper.executor.most_graphs))
    gradients: dict[str, torch.Tensor] = {}
    for _, _, theirs, _, _ in everything:
        for name, gradient in theirs.items():
            known = gradients.setdefault(name, gradient)
            assert torch.equal(known, gradient), f"copies of {name} differ"
    squares = {rank: square for rank, _, _, square, _ in everything}
    graphs = {rank: graphs for rank, _, _, _, graphs in everything}
    copies.close()
    return Piped(
        loss=sum(loss for _, loss, _, _, _ in everything),
        gradients=gradients,
        norm=sum(squares.values()) ** 0.5,
        most_graphs=[graphs[rank] for rank in range(topology.pp)],
    )


def error_of(got: Piped, want: Outcome) -> tuple[float, str]:
    """The largest max|a − b| / max|b|, and of what."""
    assert got.gradients.keys() == want.gradients.keys()
    norm = sum(g.square().sum().item() for g in want.gradients.values()) ** 0.5
    errors = {
        "loss": abs(got.loss - want.loss) / (abs(want.loss) or 1.0),
        "norm": abs(got.norm - norm) / (norm or 1.0),
    }
    for name, wanted in want.gradients.items():
        size = wanted.abs().max().item()
        errors[name] = (got.gradients[name] - wanted).abs().max().item() / (size or 1.0)
    name = max(errors, key=errors.get)
    return errors[name], name
