"""Parts: what a run is put together from on one rank, built in one order and closed in one.

In: a job and the run's folder. Out: Parts, with weights but without what a checkpoint holds.
Building makes process groups, so all ranks build together: on 4 lanes with CP sizes 1, 2 and 4 the
CP groups come first, then those of the loader's thread, then those of the checkpoints' thread.

The model is built without memory, `parallelize` splits it, and only then each rank makes or reads
what it holds: with zero3 on 4 ranks, 139,584 parameters become 34,896 on each. The Loader plans
steps ahead: with data.batch 64 on 4 lanes, a step is one plan of 64 sequences and this lane's
micro-batches of it.

Models of transformers in a run: made, split over the lanes, filled, and written at its end.

In: a job with model.code=transformers. Out: a TransformersModel with the weights of model.from_hf,
of which each rank reads what it holds; and after the last step RUN/weights and output.export, under
the names that transformers gives its tensors. With zero3 on 4 ranks each reads a quarter.

The loss of a run, after a look at its data: what does not fit is refused before the first step.

In: a configuration and its sequences. Out: a Loss, whose fields the data have. Data of rows with
`chosen` and `rejected` have the fields pair and sign; with train.loss empty the answers would be
fine-tuned on, the rejected ones too:

    data.path has pairs of chosen and rejected answers, …; set train.loss=dpo, …

For train.loss=dpo all pairs are looked at once: each has one sequence of either sign in a step.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from longshore.config.check import LAYERS, check_longest, graph_layers, planner_options
from longshore.config.check_data import loss_columns
from longshore.config.located import in_keys, of_held_out, settings_in_keys
from longshore.config.schema import RunConfig
from longshore.data.fields import Field
from longshore.data.source import PAIR, REF_LOGPROBS, SIGN, IndexedSource, Ints, sequence_values
from longshore.data.steps import IndexedSteps, Loader, Packing, Steps, StreamedSteps
from longshore.data.stream import TextStream
from longshore.data.tokenize import Rules
from longshore.distributed.agreement import AnyRank, agreed
from longshore.distributed.topology import CPGroups
from longshore.hf.adapter import check_foreign
from longshore.hf.checkpoint import open_weights
from longshore.hf.transformers_model import TransformersModel, adapted, empty_model
from longshore.hf.transformers_weights import add_foreign_factors, fill_foreign
from longshore.model.decoder import Decoder
from longshore.model.host_tables import table_makers
from longshore.model.init import initial_block
from longshore.model.interface import LanguageModel
from longshore.model.lora import hold_frozen, is_factor
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.fsdp import keep_gathered_memory
from longshore.parallel.pipeline import EmbeddingCopies, Model, Stages, stages_of, whole_name
from longshore.parallel.shards import fill
from longshore.plan.planner import make_plan
from longshore.plan.types import Plan, Sequence
from longshore.run.auto import graph_bytes
from longshore.run.data import batch_size, given_planner, has_given_packs, held_out, step_groups
from longshore.run.job import TrainingJob, longest_of, open_source
from longshore.train.checkpoint import Checkpoints
from longshore.train.cuda_graph import CudaRecorder, GraphedLayers, GraphMemory
from longshore.train.evaluation import Evaluator, HeldOut, OnEvaluation
from longshore.train.loss import Loss, check_fields, make_loss
from longshore.train.optimizer import make_optimizer
from longshore.train.refine import Refiner
from longshore.train.step import Stepper


def make_foreign(job: TrainingJob, groups: CPGroups, choices: Choices) -> TransformersModel:
    """All ranks call it together; what cannot be trained exactly is refused here."""
    folder, dtype = job.config.model.from_hf, torch.promote_types(job.dtype, torch.float32)
    with agreed(job.topology.groups):
        try:
            hf = empty_model(folder, dtype)
            check_foreign(hf)
        except ValueError as error:
            raise ValueError(f"model.from_hf: {Path(folder)}: {error}") from None
        for parameter in hf.parameters():
            parameter.data = parameter.data.to(dtype)
        model = adapted(hf, job.decoder)
        check_positions(model, longest_of(job.source))
        if job.decoder.lora is not None:
            with settings_in_keys():
                add_foreign_factors(model, job.decoder.lora)
            hold_frozen(model, job.dtype)
    parallelize(model, job.topology, groups, choices=choices)
    with agreed(job.topology.groups):
        fill_foreign(model, job.topology.device, folder, seed=job.config.train.seed)
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
    check_fields(loss, fields)
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


def check_pairs(config: RunConfig, source: IndexedSource) -> None:
    """Refuses data of DPO that some step would fail on; nothing for other losses."""
    if config.train.loss != "dpo":
        return
    if not source.loss_tokens.all():
        place = int(np.argmin(source.loss_tokens))
        raise _refused(f"sequence {place} has no loss token", "leave its pair out")
    pairs, signs = (sequence_values(source, name) for name in (PAIR, SIGN))
    order = np.lexsort((signs, pairs))
    _check_signs(pairs[order], signs[order])
    groups = step_groups(config, source)
    if groups is not None:
        first, second = groups[order].reshape(-1, 2).T
        if (torn := first != second).any():
            pair = int(pairs[order][::2][torn.argmax()])
            raise _refused(
                f"the two sequences of pair {pair} have different values of data.group",
                "set data.group=pair",
            )


def _check_signs(pairs: Ints, signs: Ints) -> None:
    """Sorted by pair, then by sign: −1 and 1 of the same pair in turn."""
    numbers, sizes = np.unique(pairs, return_counts=True)
    is_wrong: NDArray[np.bool_] = sizes != 2
    if not is_wrong.any():
        is_wrong = (signs.reshape(-1, 2) != (-1, 1)).any(1)
    if is_wrong.any():
        pair = int(numbers[is_wrong.argmax()])
        theirs = signs[pairs == pair].tolist()
        shown = ", ".join(map(str, theirs[:4])) + (", …" if len(theirs) > 4 else "")
        raise _refused(
            f"pair {pair} has {len(theirs)} sequence{'s' if len(theirs) > 1 else ''}, of sign "
            f"{shown}",
            "give each pair one of sign 1 and one of sign -1, and its number to no other row; a "
            "file that is named twice has all its pairs twice",
        )


def _refused(problem: str, way_out: str) -> ValueError:
    return ValueError(f"data.path: train.loss=dpo compares two answers, but {problem}; {way_out}")


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """What a run is put together from."""

    groups: CPGroups
    """Of lanes that share packs."""
    loader: Loader
    """Of the training data."""
    stepper: Stepper
    """The model, its optimizer and its loss."""
    checkpoints: Checkpoints
    """Of the run's folder."""
    refiner: Refiner | None
    """Of the cost profile that the loader plans with; None: it stays as it is."""
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
        kinds={kind for kind, name in LAYERS.items() if name in names},
        setting=setting,
        memory=GraphMemory(CudaRecorder(), recompute=recompute, moving=moving),
        most_bytes=graph_bytes(job.config.graph, gpu_bytes),
        tell=job.tell,
    )


def make_model(job: TrainingJob, groups: CPGroups) -> Model:
    """The rank's stages with their first weights; it makes or reads only the blocks it holds."""
    if job.config.model.code == "transformers":
        return make_foreign(job, groups, _choices(job))
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
    """make_plan with all of its options given; only the sequences of a step are missing."""
    options = _planner_options(job)
    if refiner is None:
        return partial(make_plan, **options)
    return lambda sequences, **given: make_plan(
        sequences, **{**options, "profile": refiner.profile, **given}
    )


def _planner_options(job: TrainingJob) -> dict[str, Any]:
    return planner_options(
        job.config,
        lanes=job.topology.lanes,
        capacity=job.resolved.capacity,
        decoder=job.decoder,
    )


def make_refiner(job: TrainingJob) -> Refiner:
    """What corrects the cost profile of the run's plans."""
    return Refiner(
        _planner_options(job)["profile"],
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


def make_evaluator(
    job: TrainingJob,
    parts: Parts,
    *,
    tell: OnEvaluation,
    wants_stop: Callable[[], bool],
    on_demand: bool = False,
) -> Evaluator | None:
    """What evaluates the run's held-out data, if it has any. on_demand: see run/data.py."""
    config = held_out(job.config, on_demand=on_demand)
    if config is None:
        return None
    with of_held_out():
        source = open_source(config, job.decoder, job.topology, display=job.display)
    assert not isinstance(source, TextStream), "held-out data are never streamed"
    with agreed(job.topology.groups):
        with in_keys("data.eval_path"):
            check_longest(config, job.topology.lanes, longest_of(source))
        check_positions(parts.stepper.model, longest_of(source), "data.eval_path")
    # Its loss is a sum over tokens, so that no sequences have to share a step.
    steps = make_steps(job, config, source=source, shuffle=False, is_grouped=False)
    return Evaluator(
        HeldOut("held-out", steps),
        parts.stepper.executor,
        every=job.config.train.eval_every,
        tell=tell,
        status=job.status,
        stops=lambda: parts.any_rank([wants_stop()])[0],
    )


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
