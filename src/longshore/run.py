"""The way in: from a RunConfig to a trained model, on one rank of a run.

In: a checked configuration and this rank's place. Out: a run folder with config.toml, metrics.jsonl
and weights/. All ranks call `train` together; rank 0 writes and shows.

    train(config, Ranks(rank=0, world_size=1, local_rank=0, local_size=1, rendezvous="file:///…"))
"""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from longshore.config.check import decoder_config, planner_options
from longshore.config.folder import make_run_folder
from longshore.config.ranks import Ranks
from longshore.config.sections import RunConfig
from longshore.config.sequences import batch_size, count_steps, open_sequences
from longshore.config.settle import Settled, settle
from longshore.config.text import prepare_text, text_is_ready
from longshore.data.loader import Loader
from longshore.data.source import IndexedSource
from longshore.data.steps import IndexedSteps, Packing, Planner
from longshore.dist.collectives import agreed, gather
from longshore.dist.cp_groups import CPGroups
from longshore.dist.process_group import Rendezvous, process_group
from longshore.dist.topology import Topology, make_topology
from longshore.hf.checkpoint import open_weights, write_checkpoint
from longshore.hf.weights import save_weights
from longshore.model.decoder import Decoder
from longshore.model.flops import parameter_count, step_flops
from longshore.model.init import initial_rows
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.fsdp import fill, whole_parameters
from longshore.plan.planner import make_plan
from longshore.plan.shapes import make_buckets
from longshore.plan.types import Sequence
from longshore.train.device import memory_bytes, peak_flops, pick_backend, pick_device, pick_dtype
from longshore.train.display import Display, make_display
from longshore.train.journal import Journal
from longshore.train.loop import Machine, Report
from longshore.train.loop import train as run_steps
from longshore.train.loss import make_loss
from longshore.train.metrics import MetricsFile
from longshore.train.optim import Schedule, make_optimizer
from longshore.train.step import Stepper


def train(config: RunConfig, ranks: Ranks) -> None:
    """Trains, from the first to the last step, and leaves a run folder."""
    device = pick_device(config.train.device, ranks.local_rank)
    backend = pick_backend(device, ranks.local_size)
    where = Rendezvous(ranks.rank, ranks.world_size, ranks.rendezvous)
    with process_group(where, backend=backend, device=device):
        topology = make_topology(lanes=ranks.world_size, device=device)
        source, run = _settled(config, topology, memory_bytes(device, ranks.local_size))
        steps = count_steps(config, source.lengths)
        planner = _planner(run, topology.lanes)
        groups = CPGroups(topology, planner([Sequence(0, 1, 1)]).setting.cp_sizes)
        loader = _loader(run, source, topology, planner)
        model = _model(run, topology, groups)
        reports = _reports(run, model, loader, steps=steps, topology=topology)
        if topology.rank == 0:
            _lead(run, model, reports, steps=steps, about=_about(run, source, topology))
        else:
            _follow(run, model, reports)
        # Only after success: whoever closes waits for all ranks, and one that failed is not there.
        loader.close()
        groups.close()


def _settled(config: RunConfig, topology: Topology, memory: int) -> tuple[IndexedSource, Settled]:
    """The run's sequences, and all that is "auto" decided; memory: bytes of this rank."""
    decoder = decoder_config(config.model)
    with agreed(topology.groups):
        if topology.rank == 0 and not text_is_ready(config):
            prepare_text(config)
    with agreed(topology.groups):
        source = open_sequences(config, decoder)
    least = gather(torch.tensor([memory], device=topology.device), topology.groups.world).min()
    run = settle(
        config,
        decoder,
        lanes=topology.lanes,
        dtype=str(pick_dtype(config.train.dtype, topology.device)).removeprefix("torch."),
        memory=int(least),
        longest=int(source.lengths.max()),
    )
    return source, run


def _planner(run: Settled, lanes: int) -> Planner:
    options = planner_options(run.config, lanes=lanes, capacity=run.capacity, decoder=run.decoder)
    return partial(make_plan, **options)


def _loader(run: Settled, source: IndexedSource, topology: Topology, planner: Planner) -> Loader:
    data, plan = run.config.data, run.config.plan
    buckets: tuple[int, ...] = ()
    if plan.buckets:
        buckets = make_buckets(run.capacity, align=plan.align, count=plan.buckets)
    steps = IndexedSteps(
        source,
        planner=planner,
        batch=batch_size(run.config),
        seed=data.seed,
        shuffle=data.shuffle,
        topology=topology,
        packing=Packing(depths=len(run.decoder.mtp), buckets=buckets),
    )
    return Loader(steps, prefetch=data.prefetch, pin=topology.device.type == "cuda")


def _model(run: Settled, topology: Topology, groups: CPGroups) -> Decoder:
    """The decoder with its first weights; each rank makes or reads only the rows it holds."""
    config, dtype = run.config, pick_dtype(run.dtype, topology.device)
    with torch.device("meta"):
        model = Decoder(run.decoder).to(torch.promote_types(dtype, torch.float32))
    choices = Choices(
        mode=run.mode,
        dtype=dtype,
        attention=config.parallel.attention,
        scan=config.parallel.scan,
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


def _reports(
    run: Settled, model: Decoder, loader: Loader, *, steps: int, topology: Topology
) -> Iterator[Report]:
    """Trains one step for each report that is asked for."""
    train = run.config.train
    stepper = Stepper(
        model=model,
        optimizer=make_optimizer(
            model, weight_decay=train.weight_decay, betas=train.betas, eps=train.eps
        ),
        topology=topology,
        mode=run.mode,
        loss=make_loss(train.loss, train.loss_count),
        clip=train.clip,
        mtp_weight=train.mtp_weight,
    )
    return run_steps(
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
            peak_flops=peak_flops(topology.device, pick_dtype(run.dtype, topology.device)),
        ),
    )


def _lead(
    run: Settled, model: Decoder, reports: Iterator[Report], *, steps: int, about: str
) -> None:
    """Rank 0's part: it makes the folder, and shows and writes what all ranks do."""
    output = run.config.output
    folder = make_run_folder(output.folder)
    (folder / "config.toml").write_text(run.config.to_toml(), encoding="utf-8")
    display = make_display(output.display, steps, stream=sys.stdout, title=str(folder))
    with (
        MetricsFile(folder / "metrics.jsonl") as file,
        Journal(folder / "steps.jsonl") as journal,
        display,
    ):
        for line in (about, *run.lines):
            display.note(line)
        for report in reports:
            file.write(report.metrics)
            journal.write(report)
            display.update(report.metrics)
    _save(run, model, folder, display)


def _follow(run: Settled, model: Decoder, reports: Iterator[Report]) -> None:
    """The part of the other ranks: every step, and their rows whenever rank 0 writes weights."""
    for _ in reports:
        pass
    for _ in range(2 if run.config.output.export else 1):
        for _ in whole_parameters(model):
            pass


def _save(run: Settled, model: Decoder, folder: Path, display: Display) -> None:
    """Writes the weights, one whole tensor at a time."""
    base, export = run.config.model.from_hf or None, run.config.output.export
    save_weights(folder / "weights", run.decoder, whole_parameters(model), base=base)
    display.note(f"wrote {folder}: config.toml, metrics.jsonl, weights")
    if export:
        low = torch.bfloat16 if run.dtype == "bfloat16" else None
        write_checkpoint(export, run.decoder, whole_parameters(model), base=base, dtype=low)
        display.note(f"wrote {export}, a Hugging Face folder")


def _about(run: Settled, source: IndexedSource, topology: Topology) -> str:
    """The run in one line."""
    model, ranks = run.config.model, topology.world_size
    return (
        f"{model.preset or model.from_hf}: {parameter_count(run.decoder):,} parameters; "
        f"{len(source):,} sequences of {source.lengths.sum():,} tokens, the longest "
        f"{source.lengths.max():,}; {ranks} rank{'s' if ranks > 1 else ''} on "
        f"{topology.device.type}, {run.dtype}"
    )
