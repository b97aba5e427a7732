"""Megatron's `BalancedCPScheduler` as published in megatron-core, asked for plans in one process.

In: lengths, lanes, capacity. Out: its plan in longshore's JSON form and its planning time.

The scheduler needs no GPU and no process group: of the group it reads only `size()`. It takes
pairs of sequence number and length, and returns for each of its groups, and each lane in it, the
numbers of the sequences; a sequence's CP size is the number of lanes that name it. It counts
length²/cp_size as work, nothing else, and pads nothing. A lane runs the sequences of a group one
after another, each as a micro-batch of its own, and all lanes wait for each other after each group;
so the capacity holds for each sequence, not for what a lane gets between two barriers. There are
two ways to read that as rounds:

- `own`: a group is a round, whatever its tokens: Megatron's real barriers, and a pack's fixed cost
  once a group instead of once a sequence. The favourable reading, though over our capacity.
- `fitted`: the sequences of a CP group are filled into packs up to the capacity, in Megatron's
  order, and the n-th packs of all CP groups of a group make a round: a valid plan.
"""

import importlib.metadata
import importlib.util
import multiprocessing
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from evaluate import padded
from results import one_line

LIMIT_SECONDS = 60.0
START_SECONDS = 300.0
REPEAT_BELOW = 2.0

Groups = list[list[list[int]]]


@dataclass(frozen=True, slots=True)
class Peer:
    """Both readings of Megatron's plan, or a note why there is none."""

    own: dict[str, Any] | None
    fitted: dict[str, Any] | None
    seconds: float | None
    note: str


class LaneGroup:
    """Stands for the process group of all lanes."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes

    def size(self) -> int:
        return self.lanes


def version() -> str | None:
    """The installed megatron-core, or None."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("torch") is None:
        return None
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


class Megatron:
    """Runs the scheduler in a process of its own, which is ended where a case takes too long."""

    def __init__(self) -> None:
        self.process: multiprocessing.process.BaseProcess | None = None
        self.pipe: Connection | None = None
        self.cannot = "not installed" if version() is None else ""

    def plan(self, lengths: list[int], lanes: int, capacity: int) -> Peer:
        pipe = self._start()
        if pipe is None:
            return Peer(None, None, None, self.cannot)
        pipe.send((lengths, lanes, capacity))
        if not pipe.poll(LIMIT_SECONDS):
            self.close()
            return Peer(None, None, None, f"over {LIMIT_SECONDS:.0f} s")
        try:
            groups, seconds, note = pipe.recv()
        except EOFError:
            self.close()
            return Peer(None, None, None, "its process died")
        if groups is None:
            return Peer(None, None, seconds, note)
        return convert(groups, seconds, lengths, capacity)

    def _start(self) -> Connection | None:
        """Returns the pipe to a process that has imported Megatron, which takes some seconds."""
        if self.pipe is not None or self.cannot:
            return self.pipe
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        try:
            self.pipe = ours if ours.poll(START_SECONDS) and ours.recv() == "ready" else None
        except EOFError:
            self.pipe = None
        self.cannot = "" if self.pipe else "cannot be imported"
        return self.pipe

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = self.pipe = None


def _serve(pipe: Connection) -> None:
    """The other process: answers each problem with (groups or None, seconds, note)."""
    warnings.simplefilter("ignore")
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    pipe.send("ready")
    while True:
        lengths, lanes, capacity = pipe.recv()
        best, started = float("inf"), time.perf_counter()
        for _ in range(3):
            scheduler = BalancedCPScheduler(capacity, LaneGroup(lanes))
            began = time.perf_counter()
            try:
                _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
                note = ""
            except Exception as error:  # whatever it raises is its answer
                groups, note = None, one_line(error)
            best = min(best, time.perf_counter() - began)
            if time.perf_counter() - started > REPEAT_BELOW:
                break
        pipe.send((groups, best, note))


def convert(groups: Groups, seconds: float, lengths: list[int], capacity: int) -> Peer:
    """Megatron's groups as rounds, in both readings."""
    own, fitted = [], []
    for group in groups:
        packs = _packs(group)
        own.append({"packs": packs})
        fitted += _fitted_rounds(packs, lengths, capacity)
    return Peer({"rounds": own}, {"rounds": fitted}, seconds, "")


def _packs(group: list[list[int]]) -> list[dict[str, Any]]:
    """The lanes that name the same sequences are a CP group and share a pack."""
    lanes_of: dict[int, list[int]] = {}
    for lane, sequences in enumerate(group):
        for sequence in sequences:
            lanes_of.setdefault(sequence, []).append(lane)
    packs: dict[tuple[int, ...], list[int]] = {}
    for sequence, lanes in lanes_of.items():
        packs.setdefault(tuple(lanes), []).append(sequence)
    return [_pack(lanes, sequences) for lanes, sequences in sorted(packs.items(), key=_largest)]


def _largest(item: tuple[tuple[int, ...], list[int]]) -> tuple[int, int]:
    return -len(item[0]), item[0][0]


def _pack(lanes: tuple[int, ...], sequences: list[int]) -> dict[str, Any]:
    """A CP group with a gap in it gets a first lane that the evaluator refuses."""
    whole = lanes == tuple(range(lanes[0], lanes[0] + len(lanes)))
    return {
        "first_lane": lanes[0] if whole else -1,
        "cp_size": len(lanes),
        "sequences": sequences,
    }


def _fitted_rounds(
    packs: list[dict[str, Any]], lengths: list[int], capacity: int
) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = []
    for pack in packs:
        for number, sequences in enumerate(_fill(pack, lengths, capacity)):
            if number == len(rounds):
                rounds.append({"packs": []})
            rounds[number]["packs"].append({**pack, "sequences": sequences})
    return rounds


def _fill(pack: dict[str, Any], lengths: list[int], capacity: int) -> list[list[int]]:
    """Next-fit in the order given: a pack is closed when the next sequence does not fit."""
    filled: list[list[int]] = [[]]
    held = 0
    for i in pack["sequences"]:
        tokens = padded(lengths[i], pack["cp_size"]) // pack["cp_size"]
        if filled[-1] and held + tokens > capacity:
            filled.append([])
            held = 0
        filled[-1].append(i)
        held += tokens
    return filled
