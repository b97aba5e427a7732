"""The way in: from a RunConfig to a trained model, on one rank of a run.

In: a checked configuration and this rank's place. Out: a run folder with config.toml,
metrics.jsonl, checkpoints/ and weights/. All ranks call `train` together; rank 0 writes and shows.

    train(config, Ranks(rank=0, world_size=1, local_rank=0, local_size=1, rendezvous="file:///…"))
"""

import platform
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from pathlib import Path

import torch

from longshore.arch.flops import parameter_count, step_flops
from longshore.config.check import check_longest, decoder_config, planner_options
from longshore.config.schema import RunConfig
from longshore.data.loader import Loader
from longshore.data.source import IndexedSource
from longshore.data.steps import IndexedSteps, Packing, Planner
from longshore.distributed.collectives import agreed, gather
from longshore.distributed.cp_groups import CPGroups
from longshore.distributed.process_group import Rendezvous, attempt_address, process_group
from longshore.distributed.topology import Topology, make_topology
from longshore.files import check_room
from longshore.hf.checkpoint import open_weights, write_checkpoint
from longshore.hf.weights import save_weights
from longshore.model.decoder import Decoder
from longshore.model.init import initial_rows
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.fsdp import fill, whole_parameters
from longshore.plan.planner import make_plan
from longshore.plan.shapes import make_buckets
from longshore.plan.types import Sequence
from longshore.run.auto import Settled, settle
from longshore.run.claim import Claimed, change_config, claimed_run
from longshore.run.data import (
    batch_size,
    count_steps,
    held_out,
    open_sequences,
    prepare_text,
    small_data,
    text_is_ready,
)
from longshore.run.ranks import Ranks
from longshore.run.resume import FRESH, Start
from longshore.train.checkpoint import Checkpoints, Saver, same_data
from longshore.train.checkpoint_files import remove_leftovers
from longshore.train.device import (
    memory_bytes,
    peak_flops,
    pick_backend,
    pick_device,
    pick_dtype,
    prefer_blas,
)
from longshore.train.display import startup_notes
from longshore.train.evaluation import Evaluator, HeldOut
from longshore.train.failed_step import explain
from longshore.train.heartbeat import SAVING, RankStatus
from longshore.train.loop import Hooks, Machine, Progress, StepReport
from longshore.train.loop import train as run_steps
from longshore.train.loss import make_loss
from longshore.train.optimizer import Schedule, make_optimizer
from longshore.train.record import RunRecord, recording, writing
from longshore.train.step import Stepper
from longshore.train.stop import Stop, StoppedError, supervised


def train(config: RunConfig, ranks: Ranks, start: Start = FRESH) -> None:
    """Trains up to the last step, from the first or from a checkpoint, and leaves a run folder."""
    device = pick_device(config.train.device, ranks.local_rank)
    prefer_blas(device, pick_dtype(config.train.dtype, device), platform.machine())
    backend = pick_backend(device, ranks.local_size)
    address = attempt_address(ranks.rendezvous, start.attempt)
    where = Rendezvous(ranks.rank, ranks.world_size, address)
    limit = timedelta(minutes=config.parallel.timeout_min)
    status = RankStatus()
    with (
        supervised(
            status, rank=ranks.rank, ranks=ranks.world_size, address=ranks.rendezvous
        ) as stop,
        process_group(where, backend=backend, device=device, timeout=limit),
    ):
        topology = make_topology(lanes=ranks.world_size, device=device)
        torch.manual_seed(config.train.seed + topology.rank)
        tell = startup_notes(config.output.display, stream=sys.stdout, is_first=topology.rank == 0)
        tell("reading the data…")
        status.at("reading the data")
        source, run = _settled(config, topology, memory_bytes(device, ranks.local_size))
        for line in (_about(run, source, topology), *small_data(config, source), *run.lines):
            tell(line)
        steps = count_steps(config, source.lengths)
        with claimed_run(run.config, start, topology, steps=steps) as claimed:
            status.folder = str(claimed.folder)
            done = _on_lanes(
                run, source, topology, claimed=claimed, steps=steps, tell=tell, stop=stop
            )
    if done < steps:
        then = f"resume with --resume {claimed.folder}"
        if not config.output.keep:
            then = "nothing is saved, because output.keep is 0"
        text = f"stopped after step {done} of {steps}; {then}"
        raise StoppedError(text, stop.number or signal.SIGTERM)


def _on_lanes(
    run: Settled,
    source: IndexedSource,
    topology: Topology,
    *,
    claimed: Claimed,
    steps: int,
    tell: Callable[[str], None],
    stop: Stop,
) -> int:
    """Puts the run together on this rank, and trains; returns the steps done."""
    stop.status.at("building the model")
    planner = _planner(run, topology.lanes)
    groups = CPGroups(topology, planner([Sequence(0, 1, 1)]).setting.cp_sizes)
    loader = _loader(run, source, topology)
    tell("loading the weights…" if run.config.model.from_hf else "building the model…")
    stepper = _stepper(run, _model(run, topology, groups), topology, stop.status)
    checkpoints = Checkpoints(
        claimed.folder,
        stepper.model,
        stepper.optimizer,
        topology=topology,
        keep=run.config.output.keep,
    )
    if claimed.is_resumed:
        tell("loading the checkpoint…")
    done = _train(run, stepper, loader, checkpoints, claimed=claimed, steps=steps, stop=stop)
    stop.status.at("ending")
    # Only after success: whoever closes waits for all ranks, and one that failed is not there.
    loader.close()
    checkpoints.close()
    groups.close()
    return done


def _train(
    run: Settled,
    stepper: Stepper,
    loader: Loader,
    checkpoints: Checkpoints,
    *,
    claimed: Claimed,
    steps: int,
    stop: Stop,
) -> int:
    """From where the run stands to its last step, or to a signal; returns the steps done."""
    start, lines = _go_on(loader, checkpoints, claimed, steps=steps)
    saver = Saver(checkpoints, loader, every=run.config.output.save_every, start=start)
    recorded = recording(
        claimed.folder,
        display=run.config.output.display,
        trackers=run.config.output.trackers,
        steps=steps,
        after=start.step,
        is_first=stepper.topology.rank == 0,
    )
    with stop.after_steps():
        with recorded as record:
            evaluator = _evaluator(run, stepper, record)

            def after_step(progress: Progress) -> None:
                stop.status.at(SAVING)
                saver.after_step(progress)
                if evaluator is not None:
                    evaluator.after_step(progress.step, is_last=progress.step == steps)
                stop.status.at("waiting for data", step=progress.step + 1)

            def is_evaluated(step: int) -> bool:
                return evaluator is not None and evaluator.is_due(step, is_last=step == steps)

            hooks = Hooks(
                wants_stop=lambda: stop.is_asked or checkpoints.has_failed,
                reported=checkpoints.confirm,
                after_step=after_step,
                wants_report=is_evaluated,
                phase=partial(_phase, run, stepper, record),
                not_finite=partial(explain, claimed.folder, stepper),
            )
            for line in (*lines, *(checkpoints.room_warning() if saver.is_on else ())):
                record.note(line)
            stop.status.at("waiting for data", step=start.step + 1)
            reports = _reports(run, stepper, loader, steps=steps, start=start, hooks=hooks)
            first = list(islice(reports, 1))
            _keep_settings(run, checkpoints, claimed, step=start.step)
            for report in chain(first, reports):
                record.write(report)
            if evaluator is not None:
                evaluator.held_out.steps.close()
        stop.status.at(SAVING)
        saver.finish()
        if saver.progress.step >= steps:
            _save(run, stepper, claimed.folder, record)
    return saver.progress.step


def _evaluator(run: Settled, stepper: Stepper, record: RunRecord) -> Evaluator | None:
    """What evaluates the run's held-out data, if it has any."""
    others, topology = held_out(run.config), stepper.topology
    if others is None:
        return None
    with agreed(topology.groups):
        source = open_sequences(others, run.decoder)
        check_longest(others, topology.lanes, int(source.lengths.max()))
    steps = _steps(replace(run, config=others), source, topology, shuffle=False)
    return Evaluator(
        HeldOut("held-out", steps),
        stepper.model,
        topology,
        every=run.config.train.eval_every,
        tell=record.evaluated,
        status=stepper.status,
    )


def _go_on(
    loader: Loader, checkpoints: Checkpoints, claimed: Claimed, *, steps: int
) -> tuple[Progress, list[str]]:
    """What an earlier run has done, now in the model and the loader, and what to say of it."""
    if not claimed.is_resumed:
        return Progress(), [claimed.note] if claimed.note else []
    with agreed(checkpoints.topology.groups):
        if checkpoints.topology.rank == 0:
            remove_leftovers(claimed.folder)
    position, told = checkpoints.load_newest()
    start = Progress()
    if position is None:
        told.append(f"{claimed.folder} has no checkpoint, so it begins with step 1")
    else:
        state, notes = same_data(
            position.loader, loader.steps.describe(), is_forced=claimed.is_forced
        )
        loader.load_state_dict(state)
        told += notes
        start = Progress(position.step, position.updates)
        told.append(f"{claimed.folder} goes on after step {position.step}")
        if position.step >= steps:
            told[-1] = (
                f"{claimed.folder} is already finished: step {position.step} of {steps} is done; "
                "a larger train.steps or train.epochs trains it further"
            )
    return start, [*told, *claimed.changes]


def _keep_settings(run: Settled, checkpoints: Checkpoints, claimed: Claimed, *, step: int) -> None:
    """Writes the settings of a resumed run, which have just been seen to work.

    Not before: after a resume that fails, also in its first step, a plain one must do as before.
    """
    if not claimed.is_resumed:
        return
    with agreed(checkpoints.topology.groups):
        if checkpoints.topology.rank == 0:
            with writing(claimed.folder):
                change_config(run.config, claimed, step=step)


def _phase(run: Settled, stepper: Stepper, record: RunRecord, name: str) -> None:
    compiles = run.config.train.compile or stepper.topology.device.type == "cuda"
    is_slow = compiles and name == "first step"
    record.phase(f"{name} (compiling)…" if is_slow else f"{name}…")


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


def _loader(run: Settled, source: IndexedSource, topology: Topology) -> Loader:
    data = run.config.data
    steps = _steps(run, source, topology, shuffle=data.shuffle)
    return Loader(steps, prefetch=data.prefetch, pin=topology.device.type == "cuda")


def _steps(
    run: Settled, source: IndexedSource, topology: Topology, *, shuffle: bool
) -> IndexedSteps:
    plan = run.config.plan
    buckets: tuple[int, ...] = ()
    if plan.buckets:
        buckets = make_buckets(run.capacity, align=plan.align, count=plan.buckets)
    return IndexedSteps(
        source,
        planner=_planner(run, topology.lanes),
        batch=batch_size(run.config),
        seed=run.config.data.seed,
        shuffle=shuffle,
        topology=topology,
        packing=Packing(depths=len(run.decoder.mtp), buckets=buckets),
    )


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


def _stepper(run: Settled, model: Decoder, topology: Topology, status: RankStatus) -> Stepper:
    train = run.config.train
    return Stepper(
        model=model,
        optimizer=make_optimizer(
            model, weight_decay=train.weight_decay, betas=train.betas, eps=train.eps
        ),
        topology=topology,
        mode=run.mode,
        loss=make_loss(train.loss, train.loss_count),
        clip=train.clip,
        mtp_weight=train.mtp_weight,
        status=status,
    )


def _reports(
    run: Settled, stepper: Stepper, loader: Loader, *, steps: int, start: Progress, hooks: Hooks
) -> Iterator[StepReport]:
    """Trains one step for each report that is asked for."""
    train, topology = run.config.train, stepper.topology
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
        start=start,
        hooks=hooks,
    )


def _save(run: Settled, stepper: Stepper, folder: Path, record: RunRecord) -> None:
    """Rank 0 writes the weights, one whole tensor at a time; the others bring their rows."""
    output, base = run.config.output, run.config.model.from_hf or None
    if stepper.topology.rank:
        for _ in range(output.weights + bool(output.export)):
            for _ in whole_parameters(stepper.model):
                pass
        return
    size = sum(p.shape.numel() * p.element_size() for p in stepper.model.parameters())
    files = ["config.toml", "metrics.jsonl"]
    if output.weights:
        with writing(folder / "weights", then=f"write it again with --resume {folder}"):
            check_room(folder, size)
            tensors = whole_parameters(stepper.model)
            save_weights(folder / "weights", run.decoder, tensors, base=base, is_replaced=True)
        files.append("weights")
    record.note(f"wrote {folder}: {', '.join(files)}")
    if output.export:
        low = torch.bfloat16 if run.dtype == "bfloat16" else None
        with writing(Path(output.export), then=f"longshore export {folder} {output.export}"):
            check_room(Path(output.export), size // 2 if low else size)
            tensors = whole_parameters(stepper.model)
            write_checkpoint(output.export, run.decoder, tensors, base=base, dtype=low)
        record.note(f"wrote {output.export}, a Hugging Face folder")


def _about(run: Settled, source: IndexedSource, topology: Topology) -> str:
    """The run in one line."""
    model, ranks = run.config.model, topology.world_size
    return (
        f"{model.preset or model.from_hf}: {parameter_count(run.decoder):,} parameters; "
        f"{len(source):,} sequences of {source.lengths.sum():,} tokens, the longest "
        f"{source.lengths.max():,}; {ranks} rank{'s' if ranks > 1 else ''} on "
        f"{topology.device.type}, {run.dtype}"
    )
