"""What a run is put together from on one rank: its job, then its parts, built in one order.

In: a checked configuration and this rank's topology. Out: a TrainingJob: what is "auto" decided,
the opened sequences, the number of steps (1000 sequences with data.batch 64 and train.epochs 2 are
32 on every rank); and Parts, with weights but without what a checkpoint holds.

Building makes process groups, so all ranks build together: on 4 lanes with CP sizes 1, 2 and 4 the
CP groups come first, then those of the loader's thread, then those of the checkpoints' thread. The
model is built without memory, `parallelize` splits it, and only then each rank makes or reads what
it holds: with zero3 on 4 ranks, 139,584 parameters become 34,896 on each, of transformers' models
(model.code=transformers) too. The Loader plans steps ahead: with data.batch 64 on 4 lanes, a step
is one plan of 64 sequences and this lane's micro-batches of it.

A loss whose fields the data do not have is refused before the first step, and so is one that does
not suit them: rows with `chosen` and `rejected` have the fields pair and sign, and with train.loss
empty the answers would be fine-tuned on, the rejected ones too.
"""

import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from longshore.arch.costs import parameter_count
from longshore.arch.decoder import DecoderConfig
from longshore.config.check import (
    check_longest,
    decoder_config,
    graph_layers,
    lanes_of,
    planner_setting,
)
from longshore.config.check_data import loss_columns
from longshore.config.schema import RunConfig, in_keys
from longshore.data.source import PAIR, REF_LOGPROBS, SIGN, Field, IndexedSource
from longshore.data.steps import IndexedSteps, Loader, Packing, Steps, StreamedSteps
from longshore.data.stream import TextStream
from longshore.data.tokenize import Rules
from longshore.distributed.collectives import AnyRank, agreed, gather
from longshore.distributed.process_group import Ranks, process_group
from longshore.distributed.topology import CPGroups, Topology, topology_of
from longshore.files import size_text
from longshore.hf.adapter import check_transformers
from longshore.hf.checkpoint import open_weights
from longshore.hf.lora import ModelBase, factor_shapes, find_base
from longshore.hf.transformers_model import TransformersModel, adapted, empty_model
from longshore.hf.transformers_weights import add_transformers_factors, fill_transformers
from longshore.model.decoder import Decoder
from longshore.model.init import initial_block
from longshore.model.interface import LanguageModel
from longshore.model.lora import hold_frozen, is_factor
from longshore.model.registry import table_makers
from longshore.ops.backends import using_kernels
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.fsdp import keep_gathered_memory
from longshore.parallel.pipeline import EmbeddingCopies, Model, Stages, stages_of, whole_name
from longshore.parallel.shards import fill
from longshore.plan.layout import Layout
from longshore.plan.planner import GivenPack, plan_step
from longshore.plan.types import Plan, PlanSetting, Sequence
from longshore.run.auto import Resolved, graph_bytes, resolve, run_axes
from longshore.run.data import (
    batch_size,
    check_pairs,
    count_steps,
    given_planner,
    has_given_packs,
    held_out,
    open_sequences,
    open_stream,
    prepare_text,
    small_data,
    step_groups,
    text_is_ready,
    text_rules,
)
from longshore.train.checkpoint import Checkpoints
from longshore.train.cuda_graph import CudaRecorder, GraphedLayers, GraphMemory
from longshore.train.device import (
    memory_bytes,
    pick_backend,
    pick_device,
    pick_dtype,
    preferred_blas,
)
from longshore.train.display import make_display
from longshore.train.loss import Loss
from longshore.train.loss_fields import check_needed
from longshore.train.losses import make_loss
from longshore.train.optimizer import make_optimizer
from longshore.train.record import check_trackers
from longshore.train.refine import Refiner
from longshore.train.step import Stepper
from longshore.train.supervision import RankStatus, Stop, supervised


def check_before_text(config: RunConfig) -> None:
    """Refuses what only torch and other packages can tell, before any text is tokenized.

    Tokenizing may take hours.
    """
    pick_device(config.train.device, 0)
    with in_keys("output.trackers"):
        check_trackers(config.output.trackers)
    if (rules := text_rules(config)) is not None:
        data_loss(config, rules)
    if config.model.from_hf and config.model.code == "longshore":
        open_weights(config.model.from_hf)


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
        using_kernels(config.train.kernels),
        supervised(status, rank=ranks.rank, ranks=ranks.world_size, address=ranks.rendezvous)
        if signals
        else nullcontext(Stop(status)) as stop,
        process_group(ranks, backend=backend, device=device, timeout=limit, attempt=attempt),
    ):
        axes = run_axes(config, lanes_of(config, ranks.world_size))
        topology = topology_of(axes, device)
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
    """Steps of the whole run, those of earlier runs included."""
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
        """The dtype of the arithmetic."""
        return pick_dtype(self.resolved.dtype, self.topology.device)

    @property
    def status(self) -> RankStatus:
        return self.stop.status


def make_job(
    config: RunConfig, topology: Topology, *, stop: Stop, local_size: int, display: str
) -> TrainingJob:
    """Opens the data and decides what is "auto". local_size: ranks of this machine."""
    kind = display if topology.rank == 0 else "none"
    tell = make_display(kind, 0, stream=sys.stdout).note
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


def make_transformers(job: TrainingJob, groups: CPGroups, choices: Choices) -> TransformersModel:
    """All ranks call it together; what cannot be trained exactly is refused here."""
    folder, dtype = job.config.model.from_hf, torch.promote_types(job.dtype, torch.float32)
    with agreed(job.topology.groups):
        try:
            hf = empty_model(folder, dtype)
            check_transformers(hf)
        except ValueError as error:
            raise ValueError(f"model.from_hf: {Path(folder)}: {error}") from None
        for parameter in hf.parameters():
            parameter.data = parameter.data.to(dtype)
        model = adapted(hf, job.decoder)
        check_positions(model, longest_of(job.source))
        if job.decoder.lora is not None:
            add_transformers_factors(model, job.decoder.lora)
            hold_frozen(model, job.dtype)
    parallelize(model, job.topology, groups, choices=choices)
    with agreed(job.topology.groups):
        fill_transformers(model, job.topology.device, folder, seed=job.config.train.seed)
    return model


def check_positions(model: nn.Module, longest: int, key: str = "data.path") -> None:
    """Refuses data that a learned table of positions is too short for, before any step."""
    if isinstance(model, TransformersModel):
        with in_keys(key):
            model.check_longest(longest)


def data_loss(config: RunConfig, source: IndexedSource | TextStream | Rules) -> Loss:
    """The run's loss, whose fields the data have, or will have once they are tokenized."""
    train = config.train
    loss = make_loss(train.loss, train.loss_count, train.loss_options)
    fields = source.fields
    if isinstance(source, Rules) and scores_reference(config, fields):
        fields = (*fields, Field(REF_LOGPROBS, "target", "float32"))
    check_needed(loss.name, loss.fields, fields)
    if {PAIR, SIGN} <= {spec.name for spec in source.fields}:
        _refuse_likelihood(train.loss)
    return loss


def scores_reference(config: RunConfig, fields: Iterable[Field]) -> bool:
    """Whether the run scores its data with its first weights: pairs for DPO, without scores."""
    names = {spec.name for spec in fields}
    is_read = config.train.loss == "dpo" and REF_LOGPROBS in loss_columns(config)
    return is_read and REF_LOGPROBS not in names and {PAIR, SIGN} <= names


def _refuse_likelihood(name: str) -> None:
    """Cross entropy on pairs makes the rejected answers likelier too."""
    if name in ("", "cross_entropy"):
        given = f"with train.loss={name}" if name else "without a train.loss"
        raise ValueError(
            f"data.path has pairs of chosen and rejected answers, and {given} both would be made "
            "likelier; set train.loss=dpo, or prepare rows that have the chosen answers alone, as "
            "prompt and completion"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a run is put together from."""

    groups: CPGroups
    """Process groups of lanes that share packs."""
    loader: Loader
    """Plans and packs the training data, ahead of the steps."""
    stepper: Stepper
    """The model, its optimizer and its loss."""
    checkpoints: Checkpoints
    """Checkpoints in the run's folder."""
    refiner: Refiner | None
    """Corrects the cost profile that the loader plans with; None: it stays as it is."""
    any_rank: AnyRank
    """Whether any rank is asked to stop."""

    def close(self) -> None:
        """Only after success: closing waits for all ranks, and one that failed never comes."""
        self.loader.close()
        self.checkpoints.close()
        if self.stepper.copies is not None:
            self.stepper.copies.close()
        self.groups.close()
        self.any_rank.close()


def build_parts(job: TrainingJob, folder: Path) -> Parts:
    """All ranks call it together. folder: of the run, for its checkpoints."""
    job.status.at("building the model")
    # What is wrong with the loss and its data is said before the model is built.
    data_loss(job.config, job.source)
    with agreed(job.topology.groups):
        if not isinstance(job.source, TextStream):
            check_pairs(job.config, job.source)
    groups = make_cp_groups(job)
    refiner = make_refiner(job) if job.config.plan.refine else None
    loader = make_loader(job, refiner)
    job.tell("loading the weights…" if job.config.model.from_hf else "building the model…")
    stepper = make_stepper(job, groups)
    checkpoints = Checkpoints(
        folder,
        stepper.model,
        stepper.optimizer,
        topology=job.topology,
        keep=job.config.output.keep,
        copies=stepper.copies,
        base=None if job.base is None else job.base.as_json(),
    )
    return Parts(groups, loader, stepper, checkpoints, refiner, AnyRank(job.topology))


def make_cp_groups(job: TrainingJob) -> CPGroups:
    """The process groups of all CP sizes that the run's plans may use."""
    # The planner decides which CP sizes are legal; any plan says so.
    smallest_plan = make_planner(job)([Sequence(0, 1, 1)])
    return CPGroups(job.topology, smallest_plan.setting.cp_sizes)


def make_stepper(job: TrainingJob, groups: CPGroups) -> Stepper:
    """The model with its first weights, its optimizer and its loss."""
    train, model = job.config.train, make_model(job, groups)
    graphs = _graphed_layers(job, model) if job.resolved.graph else None
    return Stepper(
        model=model,
        optimizer=make_optimizer(
            model, weight_decay=train.weight_decay, betas=train.betas, eps=train.eps
        ),
        topology=job.topology,
        mode=job.resolved.shard,
        loss=data_loss(job.config, job.source),
        clip=train.clip,
        mtp_weight=train.mtp_weight,
        status=job.status,
        copies=EmbeddingCopies(model, job.topology) if job.topology.pp > 1 else None,
        trace=job.config.parallel.trace,
        graphs=graphs,
    )


def _graphed_layers(job: TrainingJob, model: Model) -> GraphedLayers:
    """CUDA graphs in the place of the layers they can replay."""
    (decoder,) = stages_of(model).values()
    assert isinstance(decoder, Decoder)
    setting, moving = job.resolved.graph, job.resolved.shard == "zero3"
    assert setting is not None
    if not moving:
        keep_gathered_memory(decoder)
    recompute = job.config.train.recompute == "blocks"
    names = graph_layers(job.config, job.decoder)
    gpu_bytes = torch.cuda.get_device_properties(job.topology.device).total_memory
    return GraphedLayers(
        decoder,
        kinds={type(part) for part in job.decoder.parts if part.graph_layer in names},
        setting=setting,
        memory=GraphMemory(CudaRecorder(), recompute=recompute, moving=moving),
        most_bytes=graph_bytes(job.config.graph, gpu_bytes),
        tell=job.tell,
    )


def make_model(job: TrainingJob, groups: CPGroups) -> Model:
    """The rank's stages with their first weights; it makes or reads only the blocks it holds."""
    if job.config.model.code == "transformers":
        return make_transformers(job, groups, _choices(job))
    with torch.device("meta"):
        model = Stages(job.decoder, job.layout, pp_rank=job.topology.pp_rank)
        model.to(torch.promote_types(job.dtype, torch.float32))
        hold_frozen(model, job.dtype)
    for part in stages_of(model).values():
        parallelize(part, job.topology, groups, choices=_choices(job))
        _fill(part, job)
    return model


def _choices(job: TrainingJob) -> Choices:
    parallel, train = job.config.parallel, job.config.train
    return Choices(
        mode=job.resolved.shard,
        dtype=job.dtype,
        attention=parallel.attention,
        scan=parallel.scan,
        recompute=train.recompute,
        compile=job.resolved.compile,
    )


def _fill(model: LanguageModel, job: TrainingJob) -> None:
    """Weights of a checkpoint, or new ones from the seed."""
    config, device = job.config, job.topology.device
    new = partial(initial_block, job.decoder, seed=config.train.seed)
    if config.model.from_hf:
        weights = open_weights(config.model.from_hf)

        def block(name: str, shape: torch.Size, index: tuple[slice, ...]) -> Tensor:
            if is_factor(name):
                return new(name, shape, index)
            return weights.block(whole_name(job.decoder, name), index)

        fill(model, device, block)
    else:
        fill(model, device, new)


def make_planner(job: TrainingJob, refiner: Refiner | None = None) -> Callable[..., Plan]:
    """Plans a step from its sequences, and from its packs where the data have them."""
    setting = _planner_setting(job)

    def planner(sequences: Iterable[Sequence], *, packs: Iterable[GivenPack] | None = None) -> Plan:
        profile = setting.profile if refiner is None else refiner.profile
        policy = setting.policy if packs is None else "given"
        return plan_step(sequences, replace(setting, profile=profile, policy=policy), packs=packs)

    return planner


def _planner_setting(job: TrainingJob) -> PlanSetting:
    return planner_setting(
        job.config,
        lanes=job.topology.lanes,
        capacity=job.resolved.capacity,
        decoder=job.decoder,
    )


def make_refiner(job: TrainingJob) -> Refiner:
    """What corrects the cost profile of the run's plans."""
    return Refiner(
        _planner_setting(job).profile,
        prefetch=job.config.data.prefetch,
        lane=job.topology.lane,
        pp=job.topology.pp,
    )


def make_loader(job: TrainingJob, refiner: Refiner | None = None) -> Loader:
    data, source = job.config.data, job.source
    steps: Steps
    if isinstance(source, TextStream):
        steps = _make_streamed_steps(job, source, refiner)
    else:
        steps = make_steps(job, job.config, source=source, shuffle=data.shuffle, refiner=refiner)
    return Loader(steps, prefetch=data.prefetch, pin=job.topology.device.type == "cuda")


def open_held_out(
    job: TrainingJob, model: Model, *, on_demand: bool = False
) -> IndexedSteps | None:
    """The run's held-out data, if it has any. on_demand: see run/data.py."""
    config = held_out(job.config, on_demand=on_demand)
    if config is None:
        return None
    source = open_source(config, job.decoder, job.topology, display=job.display)
    assert not isinstance(source, TextStream), "held-out data are never streamed"
    with agreed(job.topology.groups):
        with in_keys("data.eval_path"):
            check_longest(config, job.topology.lanes, longest_of(source))
        check_positions(model, longest_of(source), "data.eval_path")
    # Its loss is a sum over tokens, so that no sequences have to share a step.
    return make_steps(job, config, source=source, shuffle=False, is_grouped=False)


def make_steps(
    job: TrainingJob,
    config: RunConfig,
    *,
    source: IndexedSource,
    shuffle: bool,
    refiner: Refiner | None = None,
    is_grouped: bool = True,
) -> IndexedSteps:
    """config: the job's, or that of its held-out data. is_grouped: whether groups share a step."""
    with agreed(job.topology.groups):
        planner, batch, packing = make_planner(job, refiner), batch_size(config), _packing(job)
        groups = step_groups(config, source) if is_grouped else None
        if is_grouped and has_given_packs(config):
            planner = given_planner(planner, source, groups)
    return IndexedSteps(
        source,
        planner=planner,
        batch=batch,
        seed=config.data.seed,
        shuffle=shuffle,
        topology=job.topology,
        packing=packing,
        before_plan=refiner.before_plan if refiner is not None else None,
        groups=groups,
    )


def _packing(job: TrainingJob) -> Packing:
    return Packing(
        depths=len(job.decoder.mtp),
        layout=job.layout,
        max_sequences=job.resolved.graph.max_sequences if job.resolved.graph else 0,
        tables=table_makers(
            job.decoder,
            scan=job.config.parallel.scan,
            device=job.topology.device,
            kernels=job.config.train.kernels,
        ),
    )


def _make_streamed_steps(
    job: TrainingJob, stream: TextStream, refiner: Refiner | None
) -> StreamedSteps:
    """The first rank of each lane reads and tokenizes its share of the files."""
    topology = job.topology
    with agreed(topology.groups), in_keys("data.path"):
        planner, batch, packing = make_planner(job, refiner), batch_size(job.config), _packing(job)
        is_first = topology.tp_rank == 0 and topology.pp_rank == 0
        samples = stream.lane(topology.lane, topology.lanes) if is_first else None
    return StreamedSteps(
        samples,
        planner=planner,
        batch=batch,
        topology=topology,
        fields=stream.fields,
        packing=packing,
        before_plan=refiner.before_plan if refiner is not None else None,
        stream=stream,
    )
