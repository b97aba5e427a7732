"""Probes of the ranks: whether they can connect, and where each is.

In: this rank's RankPlace. Out: RankProbe, the same on every rank: each rank's place, and findings.
All ranks call `probe_ranks` together; it creates the process groups that training creates, runs
collectives with known results in each, and reports to all ranks what went wrong on any.

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
from longshore.distributed.process_group import Ranks, process_group
from longshore.distributed.topology import CPGroups, Topology, make_topology
from longshore.doctor.machine import Finding, bad, first_line, good, warn
from longshore.plan.shapes import legal_cp_sizes

UNEVEN = 3
NUMBERS = 1024
INTERFACE = (
    "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the network interface that connects the "
    "machines, such as eth0; `ip addr` lists the interfaces"
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank in the machines and in the topology."""

    rank: int
    """Global rank."""
    node: int
    """The machine's number."""
    local_rank: int
    """Rank on its machine."""
    host: str
    """The machine's name."""
    device: str
    """Such as cuda:0."""
    versions: str
    """Versions of Python and torch, which must be the same on all ranks."""
    lane: int = 0
    """Its lane in the topology."""
    cp_groups: tuple[tuple[int, int], ...] = ()
    """(first_lane, cp_size) of each of its CP groups."""
    remarks: tuple[Finding, ...] = ()
    """Findings about its machine."""

    @property
    def groups_in_words(self) -> str:
        """The lanes of its CP groups: 5, 4-5, 4-7, 0-7."""
        spans = [(first, first + size - 1) for first, size in self.cp_groups]
        return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


@dataclass(frozen=True, slots=True)
class RankProbe:
    """The places of all ranks, in rank order, and what was wrong."""

    places: tuple[RankPlace, ...]
    findings: tuple[Finding, ...]


class StageTimer:
    """The stage a rank is in, in case it hangs, and the seconds of each stage before."""

    def __init__(self) -> None:
        self.name = "starting"
        self.times: dict[str, float] = {}
        self._since = time.perf_counter()

    def enter(self, name: str) -> None:
        now = time.perf_counter()
        self.times[self.name] = now - self._since
        self.name, self._since = name, now


def local_place(rank: int, *, node: int, local_rank: int, device: torch.device) -> RankPlace:
    """The place of a rank on this machine, before the ranks are connected."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return RankPlace(rank, node, local_rank, socket.gethostname(), str(device), versions)


def with_time_limit(seconds: float, work: Callable[[StageTimer], T]) -> T:
    """Returns work(stage); raises TimeoutError with the stage's name if it takes too long.

    After the TimeoutError the caller must end the process: the work still hangs in its thread.
    """
    stage, results = StageTimer(), SimpleQueue[tuple[T | None, BaseException | None]]()

    def run_work() -> None:
        try:
            results.put((work(stage), None))
        except BaseException as error:
            results.put((None, error))

    Thread(target=run_work, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except Empty:
        raise TimeoutError(f"timeout after {seconds:g} s in this stage: {stage.name}") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def probe_ranks(
    place: RankPlace, stage: StageTimer, *, ranks: Ranks, backend: str, device: torch.device
) -> RankProbe:
    """Creates the groups of a run and tests them; all ranks call it together."""
    stage.enter("connecting the ranks")
    with process_group(ranks, backend=backend, device=device):
        topology = make_topology(lanes=ranks.world_size, device=device)
        problems = _try_sum(topology, stage)
        stage.enter("creating the CP groups")
        with CPGroups(topology, legal_cp_sizes(topology.lanes)) as groups:
            keys = groups.keys
            problems += _try_groups(topology, groups, stage)
        problems += _try_uneven(topology, stage)
        stage.enter("exchanging the results")
        mine = replace(place, lane=topology.lane, cp_groups=keys)
        results: list[tuple[RankPlace, list[str]]] = [(mine, [])] * ranks.world_size
        dist.all_gather_object(results, (mine, problems))
        stage.enter("closing the process group")
    places = tuple(sorted((place for place, _ in results), key=lambda place: place.rank))
    wrong = [f"rank {place.rank}: {text}" for place, texts in results for text in texts]
    findings = [*_times(places, stage, backend), *(bad(text, INTERFACE) for text in wrong)]
    return RankProbe(places, (*findings, *_differences(places, backend)))


def _try_sum(topology: Topology, stage: StageTimer) -> list[str]:
    """The first sum connects the ranks; the second shows what one costs."""
    ranks, wrong = topology.world_size, False
    right = [ranks * i + ranks * (ranks - 1) // 2 for i in range(NUMBERS)]
    for name in ("the first sum over all ranks", "a sum over all ranks"):
        stage.enter(name)
        numbers = torch.arange(NUMBERS, device=topology.device) + topology.rank
        wrong |= sum_over(numbers, topology.groups.world).tolist() != right
    return ["a sum over all ranks is wrong"] if wrong else []


def _try_groups(topology: Topology, groups: CPGroups, stage: StageTimer) -> list[str]:
    """Each lane sends its number to its groups, small ones first."""
    problems = []
    for first, size in groups.keys:
        stage.enter(f"a CP group of {size} lanes")
        mine = torch.tensor([topology.lane], device=topology.device)
        lanes = gather(mine, groups.group(first, size)).tolist()
        if lanes != [*range(first, first + size)]:
            problems.append(f"the CP group of lanes {first} to {first + size - 1} gathered {lanes}")
    return problems


def _try_uneven(topology: Topology, stage: StageTimer) -> list[str]:
    stage.enter("an uneven all-to-all")
    me, ranks = topology.rank, topology.world_size
    sends = [(me + other) % UNEVEN for other in range(ranks)]
    rows = [[me, other] for other in range(ranks) for _ in range(sends[other])]
    sent = torch.tensor(rows, dtype=torch.int64, device=topology.device).view(-1, 2)
    # What others send me is what I send them: the numbers are symmetric.
    received = all_to_all(sent, topology.groups.world, sends=sends, receives=sends).tolist()
    right = [[other, me] for other in range(ranks) for _ in range(sends[other])]
    return [] if received == right else ["an uneven all-to-all returns wrong rows"]


def _times(places: Sequence[RankPlace], stage: StageTimer, backend: str) -> list[Finding]:
    took, ranks = stage.times, len(places)
    nodes = len({place.node for place in places})
    sizes = [name for name in took if name.startswith("a CP group of")]
    numbers = ", ".join(name.split()[4] for name in sizes)
    many = f"{ranks} ranks" if ranks > 1 else "1 rank"
    where = f" on {nodes} nodes" if nodes > 1 else ""
    return [
        good(
            f"{many}{where} connected over {backend} in "
            f"{words(took['connecting the ranks'] + took['the first sum over all ranks'])}; "
            f"a sum over all takes {words(took['a sum over all ranks'])}"
        ),
        good(
            f"CP groups of {numbers} lanes: created in {words(took['creating the CP groups'])}, "
            f"tested in {words(sum(took[name] for name in sizes))}"
        ),
        good(f"an uneven all-to-all over all ranks: {words(took['an uneven all-to-all'])}"),
    ]


def _differences(places: Sequence[RankPlace], backend: str) -> list[Finding]:
    """What differs between ranks, and the findings of the other machines."""
    findings, first = [], places[0].versions
    if other := next((place for place in places if place.versions != first), None):
        text = f"rank {other.rank} has {other.versions}, but rank 0 has {first}"
        findings.append(warn(text, "install the same on all machines"))
    devices = [(place.node, place.device) for place in places if place.device != "cpu"]
    if len(set(devices)) < len(devices):
        text = f"several ranks share a GPU, connected over {backend}"
        findings.append(warn(text, "start one rank for each GPU"))
    for place in places:
        for remark in place.remarks:
            text = f"node {place.node} ({place.host}): {remark.text}"
            findings.append(Finding(remark.mark, text, remark.way_out))
    return findings


def failed(error: BaseException) -> Finding:
    """Why the ranks could not connect."""
    lines = str(error).strip().splitlines()
    # Of a rank's traceback, the line before it, which names the rank, and the error itself.
    short = f"{lines[0]} {lines[-1]}" if len(lines) > 2 and "Traceback" in lines[1] else ""
    return bad(f"the ranks could not connect: {short or first_line(error)}", INTERFACE)


def words(seconds: float) -> str:
    """0.0123 as "12 ms"."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 1e-2 else f"{seconds * 1e3:.1f} ms"
