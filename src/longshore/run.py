"""The way in: from a RunConfig to a trained model, on one rank of a run.

In: a checked configuration and this rank's place. Out: a run folder with config.toml, metrics.jsonl
and weights/. All ranks call `train` together; rank 0 writes and shows.

    train(config, Ranks(rank=0, world_size=1, local_rank=0, local_size=1, rendezvous="file:///…"))
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from longshore.config.check import check_longest, decoder_config, planner_options
from longshore.config.folder import make_run_folder
from longshore.config.ranks import Ranks
from longshore.config.sections import RunConfig
from longshore.config.text import prepare_text, text_folder
from longshore.data.batches import Batches, BatchSize
from longshore.data.loader import Loader
from longshore.data.mock import MockSource
from longshore.data.source import IndexedSource
from longshore.data.steps import IndexedSteps, Packing, Planner
from longshore.data.store import Store
from longshore.dist.collectives import agreed, gather
from longshore.dist.cp_groups import CPGroups
from longshore.dist.process_group import Rendezvous, process_group
from longshore.dist.topology import Topology, make_topology
from longshore.hf.checkpoint import open_weights, write_checkpoint
from longshore.hf.weights import save_weights
from longshore.model.config import DecoderConfig
from longshore.model.decoder import Decoder
from longshore.model.flops import step_flops
from longshore.model.init import initial_rows
from longshore.model.memory import auto_capacity, model_bytes
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.fsdp import Mode, fill, whole_parameters
from longshore.plan.planner import make_plan
from longshore.plan.shapes import make_buckets
from longshore.plan.types import Sequence
from longshore.train.device import memory_bytes, peak_flops, pick_backend, pick_device, pick_dtype
from longshore.train.display import make_display
from longshore.train.loop import Machine
from longshore.train.loop import train as run_steps
from longshore.train.loss import make_loss
from longshore.train.metrics import MetricsFile, StepMetrics
from longshore.train.optim import Schedule, make_optimizer
from longshore.train.step import Stepper


@dataclass(frozen=True, slots=True)
class Settled:
    """A configuration after everything "auto" in it was decided; `lines` say how, for people."""

    config: RunConfig
    decoder: DecoderConfig
    mode: Mode
    capacity: int
    dtype: torch.dtype
    lines: tuple[str, ...]


def train(config: RunConfig, ranks: Ranks) -> None:
    """Trains, from the first to the last step, and leaves a run folder."""
    device = pick_device(config.train.device, ranks.local_rank)
    backend = pick_backend(device, ranks.local_size)
    where = Rendezvous(ranks.rank, ranks.world_size, ranks.rendezvous)
    with process_group(where, backend=backend, device=device), ExitStack() as stack:
        topology = make_topology(lanes=ranks.world_size, device=device)
        decoder = decoder_config(config.model)
        with agreed(topology.groups):
            if topology.rank == 0:
                prepare_text(config)
        with agreed(topology.groups):
            source = _source(config, decoder)
        longest = int(source.lengths.max())
        memory = _least(memory_bytes(device, ranks.local_size), topology)
        dtype = pick_dtype(config.train.dtype, device)
        run = settle(config, decoder, topology.lanes, dtype=dtype, memory=memory, longest=longest)
        options = planner_options(
            run.config, lanes=topology.lanes, capacity=run.capacity, decoder=decoder
        )
        planner: Planner = partial(make_plan, **options)
        groups = stack.enter_context(
            CPGroups(topology, planner([Sequence(0, 1, 1)]).setting.cp_sizes)
        )
        loader = stack.enter_context(_loader(run, source, topology, planner))
        _train(run, _model(run, topology, groups), loader, topology)


def settle(
    config: RunConfig,
    decoder: DecoderConfig,
    lanes: int,
    *,
    dtype: torch.dtype,
    memory: int,
    longest: int,
) -> Settled:
    """Decides what is "auto"; memory: bytes of the rank that has least."""
    name = str(dtype).removeprefix("torch.")
    mode, why = _mode(config, decoder, lanes=lanes, dtype=name, memory=memory)
    lines = [f"parallel.shard: {why}"] if config.parallel.shard == "auto" else []
    capacity = config.plan.capacity
    if capacity == "auto":
        capacity, arithmetic = auto_capacity(
            decoder,
            memory_bytes=memory,
            lanes=lanes,
            shard=mode,
            dtype=name,
            recompute=config.train.recompute == "blocks",
            longest=longest,
        )
        lines += ["plan.capacity:", *arithmetic]
    fixed = replace(config, plan=replace(config.plan, capacity=capacity))
    check_longest(fixed, lanes, longest)
    return Settled(fixed, decoder, mode, capacity, dtype, tuple(lines))


def _mode(
    config: RunConfig, decoder: DecoderConfig, *, lanes: int, dtype: str, memory: int
) -> tuple[Mode, str]:
    """How the model is shared out: whole on every rank while that takes a quarter of the memory."""
    if config.parallel.shard != "auto":
        return config.parallel.shard, ""
    whole = model_bytes(decoder, lanes=1, shard="none", dtype=dtype).total
    share = f"model and optimizer take {whole / memory:.0%} of a rank's memory"
    if lanes == 1 or whole <= memory / 4:
        return "none", f"none, every rank holds all: {share}"
    if config.plan.sync == "step":
        return "zero2", f"zero2, because plan.sync is step: {share}"
    return "zero3", f"zero3: {share}"


def _least(amount: int, topology: Topology) -> int:
    mine = torch.tensor([amount], device=topology.device)
    return int(gather(mine, topology.groups.world).min())


def _source(config: RunConfig, decoder: DecoderConfig) -> IndexedSource:
    data = config.data
    if data.path:
        return Store(text_folder(config))
    count = data.count or None
    return MockSource(data.mock, count=count, vocab_size=decoder.vocab_size, seed=data.seed)


def _loader(run: Settled, source: IndexedSource, topology: Topology, planner: Planner) -> Loader:
    data, plan = run.config.data, run.config.plan
    buckets: tuple[int, ...] = ()
    if plan.buckets:
        buckets = make_buckets(run.capacity, align=plan.align, count=plan.buckets)
    steps = IndexedSteps(
        source,
        planner=planner,
        batch=_batch_size(run.config),
        seed=data.seed,
        shuffle=data.shuffle,
        topology=topology,
        packing=Packing(buckets=buckets),
    )
    return Loader(steps, prefetch=data.prefetch, pin=topology.device.type == "cuda")


def _batch_size(config: RunConfig) -> BatchSize:
    data = config.data
    return (
        BatchSize("sequences", data.batch) if data.batch else BatchSize("tokens", data.batch_tokens)
    )


def _steps(config: RunConfig, source: IndexedSource) -> int:
    if config.train.steps:
        return config.train.steps
    data = config.data
    batches = Batches(source.lengths, _batch_size(config), seed=data.seed, shuffle=data.shuffle)
    return sum(batches.steps(epoch) for epoch in range(config.train.epochs or 1))


def _model(run: Settled, topology: Topology, groups: CPGroups) -> Decoder:
    """The decoder with its first weights; each rank makes or reads only the rows it holds."""
    config, kept = run.config, torch.promote_types(run.dtype, torch.float32)
    with torch.device("meta"):
        model = Decoder(run.decoder).to(kept)
    choices = Choices(
        mode=run.mode,
        dtype=run.dtype,
        attention=config.parallel.attention,
        recompute=config.train.recompute,
        compile=config.train.compile,
    )
    parallelize(model, topology, groups, choices=choices)
    if config.model.from_hf:
        weights = open_weights(config.model.from_hf)
        fill(model, topology.device, lambda name, _, start, stop: weights.rows(name, start, stop))
    else:
        fill(model, topology.device, partial(initial_rows, run.decoder, seed=config.train.seed))
    return model


def _train(run: Settled, model: Decoder, loader: Loader, topology: Topology) -> None:
    config, train = run.config, run.config.train
    assert isinstance(loader.steps, IndexedSteps)
    steps = _steps(config, loader.steps.source)
    stepper = Stepper(
        model=model,
        optimizer=make_optimizer(
            model, weight_decay=train.weight_decay, betas=train.betas, eps=train.eps
        ),
        topology=topology,
        mode=run.mode,
        loss=make_loss(train.loss, train.loss_count),
        clip=train.clip,
    )
    reports = run_steps(
        stepper,
        loader,
        steps=steps,
        schedule=Schedule(
            kind=train.schedule,
            lr=train.lr,
            warmup=train.warmup,
            updates=steps,
            min_lr=train.min_lr,
        ),
        flops=partial(step_flops, run.decoder),
        machine=Machine(
            ranks=topology.world_size,
            device=topology.device,
            peak_flops=peak_flops(topology.device, run.dtype),
        ),
    )
    folder = make_run_folder(config.output.folder) if topology.rank == 0 else None
    _show(reports, run, steps, folder)
    _save(run, model, folder)


def _show(reports: Iterator[StepMetrics], run: Settled, steps: int, folder: Path | None) -> None:
    """Runs the steps; rank 0 writes and shows them, the others only train."""
    if folder is None:
        for _ in reports:
            pass
        return
    (folder / "config.toml").write_text(run.config.to_toml(), encoding="utf-8")
    display = make_display(run.config.output.display, steps, stream=sys.stdout, title=str(folder))
    with MetricsFile(folder / "metrics.jsonl") as file, display:
        for line in run.lines:
            display.note(line)
        for metrics in reports:
            file.write(metrics)
            display.update(metrics)


def _save(run: Settled, model: Decoder, folder: Path | None) -> None:
    """Writes the weights; all ranks take part, and rank 0 holds one tensor at a time."""
    base, export = run.config.model.from_hf or None, run.config.output.export
    if folder is None:
        for _ in range(2 if export else 1):
            for _ in whole_parameters(model):
                pass
        return
    save_weights(folder / "weights", run.decoder, whole_parameters(model), base=base)
    if export:
        low = run.dtype if run.dtype == torch.bfloat16 else None
        write_checkpoint(export, run.decoder, whole_parameters(model), base=base, dtype=low)
