"""Whether the ranks of a run can meet, and where each of them stands.

In: this rank's place. Out: Meeting, the same on every rank: where each rank stands, and findings.
All ranks call `meet` together; it forms the groups that training forms, sends numbers whose answer
is known through each, and tells all ranks what went wrong on any.

With 4 ranks on 2 nodes, rank 3 is local rank 1 of node 1, lane 3, in the CP groups 3, 2-3 and 0-3.
An uneven exchange sends (r + s) mod 3 rows from rank r to rank s: rank 1 of 4 sends 1 2 0 1.
"""

import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

import torch
import torch.distributed as dist

from longshore.distributed.collectives import all_to_all, gather, sum_over
from longshore.distributed.cp_groups import CPGroups
from longshore.distributed.process_group import Rendezvous, process_group
from longshore.distributed.topology import Topology, make_topology
from longshore.doctor.result import Finding, bad, first_line, good, warn
from longshore.plan.cp_size import legal_cp_sizes

UNEVEN = 3
NUMBERS = 1024
INTERFACE = (
    "name the network that joins the machines: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, such as "
    "eth0; `ip addr` lists them"
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank stands. versions: of what must be alike on all. remarks: of its machine."""

    rank: int
    node: int
    local_rank: int
    host: str
    device: str
    versions: str
    lane: int = 0
    cp_groups: tuple[tuple[int, int], ...] = ()
    remarks: tuple[Finding, ...] = ()

    @property
    def groups_in_words(self) -> str:
        """The lanes of its CP groups: 5, 4-5, 4-7, 0-7."""
        spans = [(first, first + size - 1) for first, size in self.cp_groups]
        return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


@dataclass(frozen=True, slots=True)
class Meeting:
    """seats: of all ranks, in their order."""

    seats: tuple[Seat, ...]
    findings: tuple[Finding, ...]


class Stage:
    """What a rank is doing, for when it hangs."""

    def __init__(self) -> None:
        self.name = "starting"
        self.times: dict[str, float] = {}
        self._since = time.perf_counter()

    def enter(self, name: str) -> None:
        now = time.perf_counter()
        self.times[self.name] = now - self._since
        self.name, self._since = name, now


def versions() -> str:
    return f"Python {platform.python_version()}, torch {torch.__version__}"


def here(rank: int, *, node: int, local_rank: int, device: torch.device) -> Seat:
    """The seat of a rank on this machine, before the ranks have met."""
    return Seat(rank, node, local_rank, socket.gethostname(), str(device), versions())


def within(seconds: float, work: Callable[[Stage], T]) -> T:
    """What `work` returns; TimeoutError, naming its stage, if it does not come to an end.

    Whoever gets the TimeoutError must leave the process: the work hangs on in its thread.
    """
    stage, results = Stage(), SimpleQueue[tuple[T | None, BaseException | None]]()

    def attempt() -> None:
        try:
            results.put((work(stage), None))
        except BaseException as error:
            results.put((None, error))

    Thread(target=attempt, daemon=True).start()
    try:
        made, error = results.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"no end after {seconds:g} s of {stage.name}") from None
    if error is not None:
        raise error
    return made  # type: ignore[return-value]


def meet(
    seat: Seat, stage: Stage, *, where: Rendezvous, backend: str, device: torch.device
) -> Meeting:
    """Forms the groups of a run and tries them, on every rank together."""
    stage.enter("meeting the other ranks")
    with process_group(where, backend=backend, device=device):
        topology = make_topology(lanes=where.world_size, device=device)
        problems = _try_sum(topology, stage)
        stage.enter("making the CP groups")
        with CPGroups(topology, legal_cp_sizes(topology.lanes)) as groups:
            keys = groups.keys
            problems += _try_groups(topology, groups, stage)
        problems += _try_uneven(topology, stage)
        stage.enter("telling each other")
        mine = replace(seat, lane=topology.lane, cp_groups=keys)
        told: list[tuple[Seat, list[str]]] = [(mine, [])] * where.world_size
        dist.all_gather_object(told, (mine, problems))
        stage.enter("taking leave")
    seats = tuple(sorted((seat for seat, _ in told), key=lambda seat: seat.rank))
    wrong = [f"rank {seat.rank}: {text}" for seat, texts in told for text in texts]
    findings = [*_times(seats, stage, backend), *(bad(text, INTERFACE) for text in wrong)]
    return Meeting(seats, (*findings, *_differences(seats, backend)))


def _try_sum(topology: Topology, stage: Stage) -> list[str]:
    """The first sum connects the ranks; the second shows what one costs."""
    ranks, wrong = topology.world_size, False
    right = [ranks * i + ranks * (ranks - 1) // 2 for i in range(NUMBERS)]
    for name in ("the first sum over all ranks", "a sum over all ranks"):
        stage.enter(name)
        numbers = torch.arange(NUMBERS, device=topology.device) + topology.rank
        wrong |= sum_over(numbers, topology.groups.world).tolist() != right
    return ["a sum over all ranks comes out wrong"] if wrong else []


def _try_groups(topology: Topology, groups: CPGroups, stage: Stage) -> list[str]:
    """Each lane sends its number to its groups, small ones first."""
    found = []
    for first, size in groups.keys:
        stage.enter(f"a CP group of {size} lanes")
        mine = torch.tensor([topology.lane], device=topology.device)
        got = gather(mine, groups.group(first, size)).tolist()
        if got != [*range(first, first + size)]:
            found.append(f"the CP group of {size} lanes from {first} gathers {got}")
    return found


def _try_uneven(topology: Topology, stage: Stage) -> list[str]:
    stage.enter("an uneven exchange")
    me, ranks = topology.rank, topology.world_size
    sends = [(me + other) % UNEVEN for other in range(ranks)]
    rows = [[me, other] for other in range(ranks) for _ in range(sends[other])]
    sent = torch.tensor(rows, dtype=torch.int64, device=topology.device).view(-1, 2)
    # What others send me is what I send them: the numbers are symmetric.
    got = all_to_all(sent, topology.groups.world, sends=sends, receives=sends).tolist()
    right = [[other, me] for other in range(ranks) for _ in range(sends[other])]
    return [] if got == right else ["an uneven exchange brings wrong rows"]


def _times(seats: Sequence[Seat], stage: Stage, backend: str) -> list[Finding]:
    took, ranks = stage.times, len(seats)
    nodes = len({seat.node for seat in seats})
    sizes = [name for name in took if name.startswith("a CP group of")]
    numbers = ", ".join(name.split()[4] for name in sizes)
    many = f"{ranks} ranks" if ranks > 1 else "1 rank"
    where = f" on {nodes} nodes" if nodes > 1 else ""
    return [
        good(
            f"{many}{where} met over {backend} in "
            f"{words(took['meeting the other ranks'] + took['the first sum over all ranks'])}; "
            f"a sum over all takes {words(took['a sum over all ranks'])}"
        ),
        good(
            f"CP groups of {numbers} lanes: made in {words(took['making the CP groups'])}, tried "
            f"in {words(sum(took[name] for name in sizes))}"
        ),
        good(f"an uneven exchange between all ranks: {words(took['an uneven exchange'])}"),
    ]


def _differences(seats: Sequence[Seat], backend: str) -> list[Finding]:
    """What is not alike on all ranks, and what the other machines have to remark."""
    found = []
    first = seats[0]
    for seat in seats[1:]:
        if seat.versions != first.versions:
            found.append(
                warn(
                    f"rank {seat.rank} has {seat.versions}, and rank 0 {first.versions}",
                    "install the same on all machines",
                )
            )
            break
    places = [(seat.node, seat.device) for seat in seats if seat.device != "cpu"]
    if len(set(places)) < len(places):
        found.append(warn(f"ranks share GPUs, over {backend}", "start one rank for each GPU"))
    for seat in seats:
        for remark in seat.remarks:
            text = f"node {seat.node} ({seat.host}): {remark.text}"
            found.append(Finding(remark.mark, text, remark.way_out))
    return found


def failed(error: BaseException) -> Finding:
    """Why the ranks did not meet."""
    lines = str(error).strip().splitlines()
    # A rank's traceback: what it is of, and the error itself.
    said = f"{lines[0]} {lines[-1]}" if len(lines) > 2 and "Traceback" in lines[1] else ""
    return bad(f"the ranks did not meet: {said or first_line(error)}", INTERFACE)


def words(seconds: float) -> str:
    """0.0123 as "12 ms"."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 1e-2 else f"{seconds * 1e3:.1f} ms"
