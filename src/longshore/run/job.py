"""A training job: what one rank is to do, decided once when the run starts, passed to all builders.

In: a checked configuration and this rank's place. Out: first a Topology and a Stop, once this
process has its device, its kernels, its signals and its process group: rank 5 of 8 on two machines
of 4 GPUs is local rank 1, on cuda:1, with NCCL; on CPUs all ranks talk through gloo. Then a
TrainingJob: the configuration, what is "auto" in it decided, the opened sequences, the number of
steps. All ranks make it together; 1000 sequences with data.batch 64 and train.epochs 2 are a job of
32 steps on every rank.
"""

import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch

from longshore.arch.costs import parameter_count
from longshore.arch.decoder import DecoderConfig
from longshore.config.check import decoder_config, lanes_of
from longshore.config.schema import RunConfig
from longshore.data.source import IndexedSource
from longshore.data.stream import TextStream
from longshore.distributed.agreement import agreed
from longshore.distributed.collectives import gather
from longshore.distributed.process_group import Ranks, process_group
from longshore.distributed.topology import Topology, make_topology
from longshore.files import size_text
from longshore.hf.lora import ModelBase, factor_shapes, find_base
from longshore.ops.backends import only
from longshore.plan.layout import Layout
from longshore.run.auto import Resolved, resolve
from longshore.run.data import (
    count_steps,
    open_sequences,
    open_stream,
    prepare_text,
    small_data,
    step_groups,
    text_is_ready,
)
from longshore.train.device import (
    memory_bytes,
    pick_backend,
    pick_device,
    pick_dtype,
    preferred_blas,
)
from longshore.train.display import startup_notes
from longshore.train.heartbeat import RankStatus
from longshore.train.stop import Stop, supervised


@contextmanager
def joined_ranks(
    config: RunConfig, ranks: Ranks, *, attempt: int, signals: bool
) -> Iterator[tuple[Topology, Stop]]:
    """This process as a rank of the run, for the block. All ranks enter together.

    attempt: of torchrun, from 0. signals: whether signals stop the run after a step, and a rank
    that hangs is reported.
    """
    device = pick_device(config.train.device, ranks.local_rank)
    dtype = pick_dtype(config.train.dtype, device)
    backend = pick_backend(device, ranks.local_size)
    limit, status = timedelta(minutes=config.parallel.timeout_min), RankStatus()
    with (
        preferred_blas(device, dtype, platform.machine()),
        only(config.train.kernels),
        supervised(status, rank=ranks.rank, ranks=ranks.world_size, address=ranks.rendezvous)
        if signals
        else nullcontext(Stop(status)) as stop,
        process_group(ranks, backend=backend, device=device, timeout=limit, attempt=attempt),
    ):
        lanes, parallel = lanes_of(config, ranks.world_size), config.parallel
        topology = make_topology(
            lanes=lanes, tp=parallel.tp, pp=parallel.pp, ep=parallel.ep, device=device
        )
        torch.manual_seed(config.train.seed + topology.rank)
        yield topology, stop


@dataclass(frozen=True, slots=True, eq=False)
class TrainingJob:
    """One rank's share of a run; the same on all ranks but for topology, stop and tell."""

    resolved: Resolved
    """The configuration, and what became of everything "auto" in it."""
    source: IndexedSource | TextStream
    """The sequences to train on, or the files they are drawn from while it trains."""
    steps: int
    """Of the whole run, those of earlier runs included."""
    topology: Topology
    """This rank's place among the others."""
    stop: Stop
    """Whether a signal has come, and this rank's status."""
    tell: Callable[[str], None]
    """Shows a line before there are steps; silent on all ranks but the first."""
    display: str
    """How it is shown: as output.display says, but with a Trainer "auto" is "none"."""
    base: ModelBase | None = None
    """What low-rank factors are trained on, as it was before it was read; None without them."""

    @property
    def indexed_source(self) -> IndexedSource:
        """The sequences, where all lengths are known: not those of a stream."""
        if isinstance(self.source, TextStream):
            raise ValueError("data.stream=true reads on and on; leave data.stream out")
        return self.source

    @property
    def config(self) -> RunConfig:
        return self.resolved.config

    @property
    def decoder(self) -> DecoderConfig:
        return self.resolved.decoder

    @property
    def layout(self) -> Layout:
        """The stages of the pipeline; one without it."""
        return self.resolved.layout

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic."""
        return pick_dtype(self.resolved.dtype, self.topology.device)

    @property
    def status(self) -> RankStatus:
        return self.stop.status


def make_job(
    config: RunConfig, topology: Topology, *, stop: Stop, local_size: int, display: str
) -> TrainingJob:
    """Opens the data and decides what is "auto". local_size: ranks of this machine."""
    tell = startup_notes(display, stream=sys.stdout, is_first=topology.rank == 0)
    tell("reading the data…")
    stop.status.at("reading the data")
    decoder = decoder_config(config.model)
    source = open_source(config, decoder, topology, display=display)
    resolved = resolve(
        config,
        decoder,
        lanes=topology.lanes,
        dtype=str(pick_dtype(config.train.dtype, topology.device)).removeprefix("torch."),
        device=topology.device.type,
        memory=_least_memory(topology, local_size),
        longest=longest_of(source),
        lengths=None if isinstance(source, TextStream) else source.lengths,
    )
    notes = [] if isinstance(source, TextStream) else small_data(config, source)
    for line in (_summary(resolved, source, topology), *notes, *resolved.notes):
        tell(line)
    steps = config.train.steps
    if not isinstance(source, TextStream):
        steps = count_steps(config, source.lengths, step_groups(config, source))
    with agreed(topology.groups):
        base = model_base(config, decoder)
    return TrainingJob(resolved, source, steps, topology, stop, tell, display, base)


def longest_of(source: IndexedSource | TextStream) -> int:
    """Tokens of the longest sequence that may come."""
    return source.longest if isinstance(source, TextStream) else int(source.lengths.max())


def open_source(
    config: RunConfig, decoder: DecoderConfig, topology: Topology, *, display: str
) -> IndexedSource | TextStream:
    """The run's sequences; text that is not yet tokenized is tokenized by rank 0."""
    with agreed(topology.groups):
        if topology.rank == 0 and not text_is_ready(config):
            prepare_text(config, display=display)
    with agreed(topology.groups):
        if config.data.stream:
            return open_stream(config, decoder)
        return open_sequences(config, decoder)


def _least_memory(topology: Topology, local_size: int) -> int:
    """Bytes of the rank that has least."""
    mine = torch.tensor([memory_bytes(topology.device, local_size)], device=topology.device)
    return int(gather(mine, topology.groups.world).min())


def _summary(resolved: Resolved, source: IndexedSource | TextStream, topology: Topology) -> str:
    """The run in one line."""
    model, ranks = resolved.config.model, topology.world_size
    factors = ""
    if resolved.decoder.lora is not None and model.code == "transformers":
        factors = ", all frozen, with low-rank factors"
    elif resolved.decoder.lora is not None:
        count = sum(prod(shape) for shape in factor_shapes(resolved.decoder).values())
        factors = f", all frozen, and {count:,} of low-rank factors"
    return (
        f"{model.preset or model.from_hf or model.module}: "
        f"{parameter_count(resolved.decoder):,} parameters{factors}; {_data_text(source)}; {ranks} "
        f"rank{'s' if ranks > 1 else ''} on {topology.device.type}, {resolved.dtype}"
    )


def _data_text(source: IndexedSource | TextStream) -> str:
    if isinstance(source, TextStream):
        files = sum(map(len, source.parts))
        return (
            f"a stream of {files:,} file{'s' if files > 1 else ''} of {size_text(source.bytes)}, "
            f"the longest sequence {source.longest:,}"
        )
    return (
        f"{len(source):,} sequences of {source.lengths.sum():,} tokens, the longest "
        f"{source.lengths.max():,}"
    )


def model_base(config: RunConfig, decoder: DecoderConfig) -> ModelBase | None:
    """What the run began with, as it is now; None for new weights that are all trained.

    A run looks once, before it reads the weights: a folder that changes while it trains is another.
    """
    if decoder.lora is None and not config.model.from_hf:
        return None
    return find_base(decoder, config.model.from_hf, seed=config.train.seed)
