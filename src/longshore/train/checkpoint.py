"""Checkpoints: saved while the run continues, loaded on any ranks, however they share the model.

In: a model and its optimizer on the ranks, and the run's position. Out: RUN/checkpoints/step-N, or
the same restored from it. Training waits only for a copy in host memory; a thread writes it.

    checkpoints.save(Position(step=40, updates=40, loader=loader.state_dict()))
    checkpoints.confirm(40)          once the loss of step 40 is known to be finite: completes it

Each rank copies and writes its own boxes (parallel/shards.py). What several ranks have alike is
divided among them, so 4 ranks with 139,584 parameters and two moments of each copy 104,688 numbers,
whether they are sharded or not. The host memory of the copy is reused, by one save at a time.
A norm's weight of 64 on 2 lanes × tp 2 is whole on all 4 ranks: lane 1's TP rank 0 is number 2 of
them and saves 32…48.

Each rank writes one safetensors file, from the memory its tensors are in. There a tensor's only
block has the tensor's name; one of several has its range too, as "embed.weight[48:64, 0:16]".
torch.distributed.checkpoint would write a pickle, which executes code when it is read, or copy a
rank's tensors twice.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from longshore.arch.cuts import TensorCut
from longshore.distributed.collectives import PeerError, agreed, gather_rows
from longshore.distributed.topology import Groups, Topology
from longshore.files import free_bytes, reason, size_text, way_out
from longshore.parallel.pipeline import EmbeddingCopies, Model, Timestamp, cut_tensors_by_name
from longshore.parallel.shards import Box, boxes_of, replica_of
from longshore.train.checkpoint_files import (
    CheckpointIndex,
    DamagedError,
    SavedChunk,
    SavedFile,
    SavedTensor,
    begin_save,
    check_covered,
    check_files,
    checkpoint_folder,
    finish_save,
    newest_complete,
    partial_folder,
    read_index,
    remove_leftovers,
    saved_steps,
)
from longshore.train.safetensors_stream import DTYPES, checked_file, read_block, write_safetensors
from longshore.train.supervision import RunError

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, eq=False)
class TensorBlock:
    """A block of a tensor; offsets: its first index in the whole tensor, which has this shape."""

    values: Tensor
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


Blocks = Mapping[str, Sequence[TensorBlock]]
"""A rank's blocks of each tensor, by the tensor's name; they do not overlap."""


def whole_block(tensor: Tensor) -> TensorBlock:
    """All of a tensor."""
    return TensorBlock(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def state_of(
    model: Model, optimizer: AdamW, *, only: set[int] | None = None
) -> Iterator[tuple[str, Tensor, TensorCut | None]]:
    """Parameters, buffers and moments by name; there are no moments before the first update.

    only: the ids of the parameters to take, and of none else.
    """
    tensors = list(tensors_of(model, only=only))
    for name, tensor, cut in tensors:
        yield f"model.{name}", tensor, cut
    for name, tensor, cut in tensors:
        for kind in MOMENTS if tensor in optimizer.state else ():
            yield f"optimizer.{name}.{kind}", optimizer.state[tensor][kind], cut


def tensors_of(
    model: Model, *, only: set[int] | None = None
) -> Iterator[tuple[str, Tensor, TensorCut | None]]:
    """Parameters and buffers; only: see state_of. With LoRA what is trained alone.

    Models may also have frozen parameters of their own, which no base can restore.
    """
    has_base = model.config.lora is not None
    for name, tensor, cut in cut_tensors_by_name(model):
        if has_base and not tensor.requires_grad:
            continue
        if only is None or id(tensor) in only or not isinstance(tensor, nn.Parameter):
            yield name, tensor, cut


def own_blocks(tensor: Tensor, cut: TensorCut | None, topology: Topology) -> list[TensorBlock]:
    """What this rank saves: its share of each of its boxes, which other ranks may have too."""
    shape, boxes = boxes_of(tensor, cut)
    replica, replicas = replica_of(tensor, cut, topology)
    blocks = []
    for box in boxes:
        number, ranks = replica * box.copies + box.copy, replicas * box.copies
        values, offsets = _share(box, number, ranks)
        if values.numel():
            blocks.append(TensorBlock(values, offsets, tuple(shape)))
    return blocks


def _share(box: Box, number: int, ranks: int) -> tuple[Tensor, tuple[int, ...]]:
    """The part of a box that one of `ranks` ranks saves, cut along the first dim long enough."""
    if not box.offsets:
        return (box.local if number == 0 else box.local.new_empty(0)), ()
    sizes = box.local.shape
    dim = max(range(len(sizes)), key=lambda dim: min(sizes[dim], ranks))
    each = -(-sizes[dim] // ranks)
    start = min(number * each, sizes[dim])
    offsets = list(box.offsets)
    offsets[dim] += start
    return box.local.narrow(dim, start, min(each, sizes[dim] - start)), tuple(offsets)


Read = tuple[str, list[int], Tensor]
"""A block in a file, the first index to read there, and where its values go."""
SavedRank = tuple[str, SavedFile, dict[str, SavedTensor]]
"""The name of a rank's file, its size, and its blocks by the tensor's name."""


def save_blocks(blocks: Blocks, folder: Path, groups: Groups) -> list[SavedRank]:
    """Writes each rank's blocks, contiguous and on the CPU; rank 0 gets what all ranks wrote."""
    rank = groups.world.rank()
    file, tensors, saved = f"rank-{rank:05}.safetensors", dict[str, Tensor](), {}
    for name, own in blocks.items():
        chunks = []
        for block in own:
            sizes = tuple(block.values.shape)
            spans = zip(block.offsets, sizes, strict=True)
            span = ", ".join(f"{start}:{start + size}" for start, size in spans)
            key = name if len(own) == 1 else f"{name}[{span}]"
            tensors[key] = block.values
            chunks.append(SavedChunk(block.offsets, sizes, file, key))
        saved[name] = SavedTensor(DTYPES[own[0].values.dtype], own[0].shape, tuple(chunks))
    with agreed(groups):
        size = write_safetensors(folder / file, tensors)
    every: list[SavedRank] = [("", size, {})] * groups.world.size() if rank == 0 else []
    dist.gather_object((file, size, saved), every or None, group=groups.world)
    return every


def joined(ranks: Sequence[SavedRank]) -> dict[str, SavedTensor]:
    """The tensors of all ranks' files, each with all its blocks."""
    tensors, chunks = dict[str, SavedTensor](), dict[str, list[SavedChunk]]()
    for _, _, own in ranks:
        for name, tensor in own.items():
            tensors.setdefault(name, tensor)
            chunks.setdefault(name, []).extend(tensor.chunks)
    for name, tensor in tensors.items():
        tensors[name] = replace(tensor, chunks=tuple(sorted(chunks[name])))
        check_covered(name, tensors[name])
    return tensors


def load_blocks(blocks: Blocks, folder: Path, content: CheckpointIndex) -> None:
    """Fills this rank's blocks, from the files of any number of ranks; no more is read."""
    try:
        for name, parts in _reads(blocks, content).items():
            file = checked_file(folder / name)
            for key, offsets, target in parts:
                read_block(file, key, offsets, target)
    except (LookupError, OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise DamagedError(f"{folder} cannot be read ({why})") from None


def _reads(blocks: Blocks, content: CheckpointIndex) -> dict[str, list[Read]]:
    """What to read from each file."""
    reads: dict[str, list[Read]] = {}
    for name, own in blocks.items():
        saved = content.tensors.get(name)
        if saved is None:
            raise ValueError(f"{name} is missing")
        for block in own:
            if saved.shape != block.shape:
                raise ValueError(f"{name} has the shape {saved.shape}, not {block.shape}")
            for chunk in saved.chunks:
                if overlap := _overlap(block, chunk):
                    reads.setdefault(chunk.file, []).append((chunk.key, *overlap))
    return reads


def _overlap(block: TensorBlock, chunk: SavedChunk) -> tuple[list[int], Tensor] | None:
    """What a block has in common with a saved one: the first index in that, and its own values."""
    target, offsets = block.values, []
    for dim, (mine, start) in enumerate(zip(block.offsets, chunk.offsets, strict=True)):
        first = max(mine, start)
        stop = min(mine + block.values.shape[dim], start + chunk.sizes[dim])
        if stop <= first:
            return None
        target = target.narrow(dim, first - mine, stop - first)
        offsets.append(first - start)
    return offsets, target


def make_moments(model: nn.Module, optimizer: AdamW, *, updates: int) -> None:
    """Creates the optimizer's state as its first step would, with this number of updates."""
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        state = optimizer.state[parameter]
        state["step"] = torch.tensor(float(updates), dtype=torch.float32, device=parameter.device)
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a run after a step: steps and updates done, and the loader's state."""

    step: int
    updates: int
    loader: dict[str, object]
    shared: Callable[[Groups], dict[str, object]] | None = None
    """Makes more of the loader's state, on all ranks together, in the thread that writes."""


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
        base: Mapping[str, object] | None = None,
    ) -> None:
        """base: what the run began with, as hf/lora.py describes it."""
        self.run = run
        self.model = model
        self.optimizer = optimizer
        self.topology = topology
        self.keep = keep
        self.base = dict(base or {})
        self._saved = {id(tensor) for tensor in copies.counted} if copies else None
        self.last: int | None = None  # the step of the last save, or of what was loaded
        self._groups = topology.host_groups()
        self._host: dict[tuple[str, int], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._confirmed = threading.Event()  # or abandoned: the thread need not wait any longer
        self._is_abandoned = False
        self._error: Exception | None = None
        self.save_bytes = self._save_bytes()
        """Bytes of a whole checkpoint with moments, the files of all ranks together."""

    @property
    def host_bytes(self) -> int:
        """Bytes of the copy in host memory."""
        return sum(tensor.nbytes for tensor in self._host.values())

    def _save_bytes(self) -> int:
        own = sum(state.nbytes for _, state in self._rng_states())
        for _, tensor, cut in tensors_of(self.model, only=self._saved):
            kinds = 1 + len(MOMENTS) if isinstance(tensor, nn.Parameter) else 1
            blocks = own_blocks(tensor.detach(), cut, self.topology)
            own += kinds * sum(block.values.nbytes for block in blocks)
        sizes = gather_rows(torch.tensor([[own]]), self._groups.world, expected=1)
        return int(torch.cat(sizes).sum())

    def disk_warning(self) -> list[str]:
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
        blocks, copied = self._copy()
        self.last = position.step
        self._confirmed.clear()
        self._thread = threading.Thread(
            target=self._write,
            args=(position, blocks, copied),
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
        self._join()
        if self._error is not None:
            raise RunError(self._error_text(self._error))

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def save_again(self) -> None:
        """Forgets the last save, because its files are lost. All ranks call it together."""
        self._join()
        self._error = self.last = None

    def abandon(self) -> None:
        """Ends the last save after a failure; what was not confirmed is removed.

        Only where this is the only rank: the others would still wait to be confirmed.
        """
        self._is_abandoned = not self._confirmed.is_set()
        self._confirmed.set()
        self._join()
        self._error = None  # the failure is the error to report

    def close(self) -> None:
        self.wait()
        self._groups.close()

    @torch.no_grad()
    def _copy(self) -> tuple[dict[str, list[TensorBlock]], Timestamp]:
        """What this rank saves, in host memory, complete once the timestamp is reached."""
        blocks, sources, hosts = dict[str, list[TensorBlock]](), list[Tensor](), list[Tensor]()
        for name, tensor, cut in state_of(self.model, self.optimizer, only=self._saved):
            for own in own_blocks(tensor, cut, self.topology):
                host = self._buffer(name, len(blocks.get(name, ())), own.values)
                blocks.setdefault(name, []).append(replace(own, values=host))
                sources.append(own.values)
                hosts.append(host)
        if hosts:  # nothing of a pipeline rank may be trained
            torch._foreach_copy_(hosts, sources, non_blocking=True)
        copied = Timestamp(self.topology.device)
        for name, state in self._rng_states():
            blocks[name] = [whole_block(state)]
        return blocks, copied

    def _buffer(self, name: str, number: int, like: Tensor) -> Tensor:
        """Contiguous memory for a block, the same in every save."""
        if (name, number) not in self._host:
            pin = like.device.type == "cuda"
            buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=pin)
            self._host[name, number] = buffer
        return self._host[name, number]

    def _rng_states(self) -> Iterator[tuple[str, Tensor]]:
        rank, device = self.topology.rank, self.topology.device
        yield f"rng.cpu.{rank}", torch.get_rng_state()
        if device.type == "cuda":
            yield f"rng.cuda.{rank}", torch.cuda.get_rng_state(device)

    def _write(
        self, position: Position, blocks: dict[str, list[TensorBlock]], copied: Timestamp
    ) -> None:
        """Run by the thread: writes a partial folder, then renames it."""
        is_first = self.topology.rank == 0
        try:
            with agreed(self._groups):
                if is_first:
                    begin_save(self.run, position.step, needed=self.save_bytes)
            copied.wait()
            folder = partial_folder(self.run, position.step)
            ranks = save_blocks(blocks, folder, self._groups)
            shared = position.shared(self._groups) if position.shared else {}
            self._confirmed.wait()
            if self._is_abandoned:
                remove_leftovers(self.run)
                return
            with agreed(self._groups):
                if is_first:
                    content = CheckpointIndex(
                        step=position.step,
                        updates=position.updates,
                        ranks=self.topology.world_size,
                        loader={**position.loader, **shared},
                        files={name: file for name, file, _ in ranks},
                        tensors=joined(ranks),
                        base=self.base,
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
        steps = gather_rows(mine, self._groups.world, expected=4)[0].view(-1).tolist()
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
        """Loads the checkpoint of a step, saved on any ranks; may raise DamagedError."""
        folder, world = checkpoint_folder(self.run, step), self._groups.world
        with self._damaged_for_all():
            content = read_index(folder)
            check_files(folder, content, part=world.rank(), parts=world.size())
            self._check_base(content)
        if content.updates:
            make_moments(self.model, self.optimizer, updates=content.updates)
        blocks, copies = dict[str, list[TensorBlock]](), list[tuple[Box, TensorBlock]]()
        for name, tensor, cut in state_of(self.model, self.optimizer):
            shape, boxes = boxes_of(tensor.detach(), cut)
            if name in blocks:
                copies += zip(boxes, blocks[name], strict=True)
            elif boxes:
                blocks[name] = [TensorBlock(box.local, box.offsets, tuple(shape)) for box in boxes]
        random = dict(self._rng_states())
        known = {name: state for name, state in random.items() if name in content.tensors}
        blocks |= {name: [whole_block(state)] for name, state in known.items()}
        with self._damaged_for_all():
            load_blocks(blocks, folder, content)
        for copy, block in copies:
            copy.local.copy_(block.values)
        for name, state in known.items():
            if name.startswith("rng.cpu"):
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, self.topology.device)
        self.last = step
        return Position(step, content.updates, content.loader)

    @contextmanager
    def _damaged_for_all(self) -> Iterator[None]:
        """If the block fails on one rank, all ranks raise the same."""
        try:
            with agreed(self._groups):
                yield
        except PeerError as error:
            if error.kind != DamagedError.__name__:
                raise
            raise DamagedError(error.message) from None

    def _check_base(self, content: CheckpointIndex) -> None:
        """Factors are of no use on another base; all weights may be of one that changed there."""
        if content.base.get("digest") == self.base.get("digest"):
            return
        was, now = content.base.get("folder"), self.base.get("folder")
        if self.model.config.lora is None and was not in (None, now):
            raise ValueError(
                f"model.from_hf: {now} is not the base that the run began with, {was}: its content "
                "differs; name the folder where that is now, or leave --resume out to begin again"
            )
        if self.model.config.lora is not None:
            raise ValueError(
                f"the base {self.base.get('folder') or 'of new weights'} has changed since the "
                f"checkpoint of step {content.step}, whose low-rank factors belong to it; restore "
                "it, name the folder where it is now (model.from_hf), or leave --resume out to "
                "begin again"
            )


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
