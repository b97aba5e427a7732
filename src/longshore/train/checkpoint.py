"""Checkpoints: saved while the run continues, loaded on any number of lanes.

In: a model and its optimizer on the lanes, and the run's position. Out: RUN/checkpoints/step-N, or
the same restored from it. Training waits only for a copy in host memory; a thread writes it.

    checkpoints.save(Position(step=40, updates=40, loader=loader.state_dict()))
    checkpoints.confirm(40)          once the loss of step 40 is known to be finite: completes it

Each lane copies and writes its own rows. Rows of replicated tensors are divided among the lanes
too, so 4 lanes with 139,584 parameters and two moments of each copy 104,688 numbers. The host
memory of the copy is reused, by one save at a time.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from longshore.arch.costs import parameter_count
from longshore.data.loader import Loader
from longshore.distributed.agreement import PeerError, agreed
from longshore.distributed.collectives import gather_rows
from longshore.distributed.topology import Topology
from longshore.files import free_bytes, reason, size_text, way_out
from longshore.parallel.fsdp import is_split, shard_rows
from longshore.parallel.pipeline.copies import EmbeddingCopies
from longshore.parallel.pipeline.stages import Model, parameters_by_name, stages_of
from longshore.parallel.timestamp import Timestamp
from longshore.train.checkpoint_files import (
    CheckpointIndex,
    DamagedError,
    begin_save,
    check_files,
    checkpoint_folder,
    finish_save,
    newest_complete,
    partial_folder,
    read_index,
    remove_leftovers,
    saved_steps,
)
from longshore.train.checkpoint_storage import TensorRows, load_parts, save_parts
from longshore.train.loop import Progress
from longshore.train.stop import RunError

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a run after a step: steps and updates done, and the loader's state."""

    step: int
    updates: int
    loader: dict[str, object]


class Checkpoints:
    """The checkpoints of one run. All ranks construct, save, load and close together."""

    def __init__(
        self,
        run: Path,
        model: Model,
        optimizer: AdamW,
        *,
        topology: Topology,
        keep: int,
        copies: EmbeddingCopies | None = None,
    ) -> None:
        self.run = run
        self.model = model
        self.optimizer = optimizer
        self.topology = topology
        self.keep = keep
        self._saved = {id(tensor) for tensor in copies.counted} if copies else None
        self.last: int | None = None  # the step of the last save, or of what was loaded
        self._groups = topology.host_groups()
        self._host: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._confirmed = threading.Event()
        self._error: Exception | None = None

    @property
    def host_bytes(self) -> int:
        """Of the copy in host memory."""
        return sum(tensor.nbytes for tensor in self._host.values())

    @property
    def save_bytes(self) -> int:
        """Of a whole checkpoint, the files of all ranks together."""
        item = next(self.model.parameters()).element_size()
        state = (1 + len(MOMENTS)) * parameter_count(self.model.config) * item
        random = self.topology.world_size * sum(state.nbytes for _, state in self._rng_states())
        # Other stages have as many buffers as these, more or less.
        buffers = sum(_whole_bytes(tensor) for tensor in self.model.buffers()) * self.topology.pp
        return state + random + buffers

    def room_warning(self) -> list[str]:
        """A warning, if the next checkpoint would not fit on the disk."""
        free, needed = free_bytes(self.run), self.save_bytes
        if free is None or free > needed:
            return []
        return [
            f"warning: a checkpoint takes {size_text(needed)}, and {self.run} has only "
            f"{size_text(free)} free; make room before the first is saved, or set output.keep=0"
        ]

    def save(self, position: Position) -> None:
        """Copies the state and writes it in a thread; waits for the previous save first."""
        self.wait()
        parts, copied = self._copy()
        self.last = position.step
        self._confirmed.clear()
        self._thread = threading.Thread(
            target=self._write,
            args=(position, parts, copied),
            name="longshore-checkpoint",
            daemon=True,  # a run that fails does not wait for it
        )
        self._thread.start()

    def confirm(self, step: int) -> None:
        """The losses up to this step are finite, so its checkpoint may exist."""
        if self.last is not None and step >= self.last:
            self._confirmed.set()

    @property
    def has_failed(self) -> bool:
        """Whether a save has failed; `wait` says why."""
        return self._error is not None

    def wait(self) -> None:
        """Waits for the last save, which must be confirmed; raises its error on all ranks."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise RunError(self._error_text(self._error))

    def close(self) -> None:
        self.wait()
        self._groups.close()

    @torch.no_grad()
    def _copy(self) -> tuple[dict[str, TensorRows], Timestamp]:
        """This lane's rows in host memory, complete once the timestamp is reached."""
        lane, lanes = self.topology.lane, self.topology.lanes
        parts, rows, hosts = dict[str, TensorRows](), list[Tensor](), list[Tensor]()
        for name, tensor in _state(self.model, self.optimizer, only=self._saved):
            own, start = _own_rows(tensor, lane, lanes)
            if own.numel():
                host = self._buffer(name, own)
                parts[name] = TensorRows(host, start, tuple(tensor.shape))
                rows.append(own)
                hosts.append(host)
        torch._foreach_copy_(hosts, rows, non_blocking=True)
        copied = Timestamp(self.topology.device)
        for name, state in self._rng_states():
            parts[name] = TensorRows(state, 0, tuple(state.shape))
        return parts, copied

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        if name not in self._host:
            pin = like.device.type == "cuda"
            self._host[name] = torch.empty(like.shape, dtype=like.dtype, pin_memory=pin)
        return self._host[name]

    def _rng_states(self) -> Iterator[tuple[str, Tensor]]:
        rank, device = self.topology.rank, self.topology.device
        yield f"rng.cpu.{rank}", torch.get_rng_state()
        if device.type == "cuda":
            yield f"rng.cuda.{rank}", torch.cuda.get_rng_state(device)

    def _write(self, position: Position, parts: dict[str, TensorRows], copied: Timestamp) -> None:
        """Run by the thread: writes a partial folder, then renames it."""
        is_first = self.topology.rank == 0
        try:
            with agreed(self._groups):
                if is_first:
                    begin_save(self.run, position.step, needed=self.save_bytes)
            copied.wait()
            folder = partial_folder(self.run, position.step)
            files, tensors = save_parts(parts, folder, self._groups.world)
            self._confirmed.wait()
            with agreed(self._groups):
                if is_first:
                    content = CheckpointIndex(
                        step=position.step,
                        updates=position.updates,
                        ranks=self.topology.world_size,
                        loader=position.loader,
                        files=files,
                        tensors=tensors,
                    )
                    finish_save(self.run, content, keep=self.keep)
        except Exception as error:
            if is_first:  # all ranks have written what they could, or nothing
                remove_leftovers(self.run)
            self._error = error

    def _error_text(self, error: Exception) -> str:
        """Alike on all ranks, whichever of them failed."""
        why, then = str(error), "make room there"
        if isinstance(error, PeerError):
            why = error.message
            error = error.as_os_error() or error
        if isinstance(error, OSError):
            why, then = reason(error), way_out(error)
        good = newest_complete(self.run)
        last = f"the last good one is {good}" if good else "there is none before it"
        return (
            f"the checkpoint of step {self.last} cannot be written into "
            f"{checkpoint_folder(self.run, 0).parent} ({why}); {last}; {then}, then resume with "
            "--resume"
        )

    def load_newest(self) -> tuple[Position | None, list[str]]:
        """Loads the newest readable checkpoint, and returns warnings about unreadable ones.

        None if the run has none; a ValueError if it has some, and none can be read.
        """
        mine = torch.tensor(saved_steps(self.run), dtype=torch.int64).view(-1, 1)
        steps = gather_rows(mine, self._groups.world, room=4)[0].view(-1).tolist()
        notes: list[str] = []
        newest: DamagedError | None = None
        for step in steps:
            try:
                return self.load(step), notes
            except DamagedError as error:
                newest = newest or error
                notes.append(f"warning: {error}; taking the checkpoint before it")
        if newest is not None:
            raise ValueError(
                f"no checkpoint of {self.run} can be read: {newest}; restore it from a copy, or "
                f"remove {self.run / 'checkpoints'} to begin again with step 1"
            )
        return None, notes

    def load(self, step: int) -> Position:
        """Loads the checkpoint of a step, saved on any number of lanes; may raise DamagedError."""
        folder, world = checkpoint_folder(self.run, step), self._groups.world
        try:
            with agreed(self._groups):
                content = read_index(folder)
                check_files(folder, content, part=world.rank(), parts=world.size())
        except PeerError as error:
            if error.kind != DamagedError.__name__:
                raise  # as on the rank that failed: all must do the same
            raise DamagedError(error.message) from None
        if content.updates:
            _make_moments(self.model, self.optimizer, updates=content.updates)
        parts = dict[str, TensorRows]()
        copies = list[tuple[Tensor, str]]()
        for name, tensor in _state(self.model, self.optimizer):
            local, start, _ = shard_rows(tensor.detach())
            if name in parts:
                copies.append((local, name))
            elif local.numel():
                parts[name] = TensorRows(local, start, tuple(tensor.shape))
        random = dict(self._rng_states())
        known = {name: state for name, state in random.items() if name in content.tensors}
        parts |= {name: TensorRows(state, 0, tuple(state.shape)) for name, state in known.items()}
        load_parts(parts, folder, content, world)
        for copy, name in copies:
            copy.copy_(parts[name].rows)
        self._set_rng(known)
        self.last = step
        return Position(step, content.updates, content.loader)

    def _set_rng(self, states: dict[str, Tensor]) -> None:
        for name, state in states.items():
            if name.startswith("rng.cpu"):
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, self.topology.device)


def same_data(
    state: dict[str, object], now: dict[str, object], *, is_forced: bool
) -> tuple[dict[str, object], list[str]]:
    """A loader's saved state, to resume from with the current data, and notes about it.

    now: how the loader describes its data. Changed data are refused, unless is_forced.
    """
    known = ("sequences", "data")
    if all(state.get(name) == now[name] for name in known):
        return state, []
    was, are = (f"{each.get('sequences')} sequences ({_short(each)})" for each in (state, now))
    text = f"the data have changed since the checkpoint: they were {was}, and are now {are}"
    if is_forced:
        return {**state, **{name: now[name] for name in known}}, [f"{text}; --force accepts them"]
    raise ValueError(
        f"{text}; restore the old data (data.path or data.mock), leave --resume out, or accept "
        "the new data with --resume --force"
    )


def _short(state: dict[str, object]) -> str:
    return str(state.get("data", "of no digest"))[:12]


class Saver:
    """Saves every `every` steps of a loop (0: never) and at its end.

    With keep=0 it only tracks the progress.
    """

    def __init__(
        self, checkpoints: Checkpoints, loader: Loader, *, every: int, start: Progress
    ) -> None:
        self.checkpoints = checkpoints
        self.loader = loader
        self.every = every
        self.progress = start
        self.is_on = checkpoints.keep > 0

    def after_step(self, progress: Progress) -> None:
        """A hook of the loop."""
        self.progress = progress
        if self.is_on and self.every and progress.step % self.every == 0:
            self._save()

    def finish(self) -> None:
        """Saves the last step and waits for it; the loop is over, so its losses are known."""
        if self.is_on and self.checkpoints.last != self.progress.step and self.progress.step:
            self._save()
        self.checkpoints.confirm(self.progress.step)
        self.checkpoints.wait()

    def _save(self) -> None:
        done = self.progress
        self.checkpoints.save(Position(done.step, done.updates, self.loader.state_dict()))


def _state(
    model: Model, optimizer: AdamW, *, only: set[int] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and moments by name; there are no moments before the first update.

    only: the ids of the parameters to take, and of none else.
    """
    parameters = [
        (name, parameter)
        for name, parameter in parameters_by_name(model)
        if only is None or id(parameter) in only
    ]
    buffers = (part.named_buffers() for part in stages_of(model).values())
    for name, tensor in chain(parameters, *buffers):
        yield f"model.{name}", tensor
    for name, parameter in parameters:
        for kind in MOMENTS if parameter in optimizer.state else ():
            yield f"optimizer.{name}.{kind}", optimizer.state[parameter][kind]


def _whole_bytes(tensor: Tensor) -> int:
    """Of all ranks' rows of it, each once."""
    return tensor.shape.numel() * tensor.element_size()


def _own_rows(tensor: Tensor, lane: int, lanes: int) -> tuple[Tensor, int]:
    """The rows that a lane saves: its own of a sharded tensor, its share of a replicated one."""
    local, start, _ = shard_rows(tensor)
    if is_split(tensor):
        return local, start
    if not local.dim():
        return (local, 0) if lane == 0 else (local.new_empty(0), 0)
    each = -(-len(local) // lanes)
    first = min(lane * each, len(local))
    return local[first : first + each], first


def _make_moments(model: nn.Module, optimizer: AdamW, *, updates: int) -> None:
    """Creates the optimizer's state as its first step would, with this number of updates."""
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        state["step"] = torch.tensor(float(updates), dtype=torch.float32, device=parameter.device)
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
