"""The ways to run a model on some GPUs that `longshore advise` compares. No torch.

In: an AdviceTask: a model, a machine, the lengths of the data. Out: Candidates that are legal and
whose memory fits, each with its capacity and largest CP size. What a run would refuse is never
proposed: the rules are asked of config/check.py, which refuses by them.

On 8 GPUs tp may be 1, 2, 4 or 8, and pp as much of the rest; a model of 32 layers without experts
on one GPU has 3 shard modes, of which one lane needs one, with and without recomputation. Of each,
capacities are powers of two times 1,024, as far as they fit and a step has tokens for them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import Literal

import numpy as np

from longshore.advisor.machine import MachineProfile
from longshore.advisor.peak_memory import (
    MemoryBreakdown,
    communicator_bytes,
    expected_peak,
    joined_groups,
)
from longshore.arch.decoder import DecoderConfig, has_experts
from longshore.arch.memory import RankSetting
from longshore.config.check import (
    code_refusals,
    graph_refusals,
    lora_refusals,
    parallel_refusals,
    pipeline_layout,
)
from longshore.config.schema import (
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    PlanConfig,
    RunConfig,
    TrainConfig,
)
from longshore.plan.cost import Ints
from longshore.plan.layout import Layout, stage_refusals
from longshore.plan.shapes import lane_tokens, legal_cp_sizes, padded_length
from longshore.plan.types import Axes, Plan
from longshore.run.auto import graph_bytes
from longshore.settings import ShardMode, Sync

KIB = 1 << 10
CONTEXT_BYTES = 768 << 20
"""Memory of CUDA itself and the kernels that are loaded, before any tensor; an assumption."""
FREE_SHARE = 10
"""One part in ten of a GPU's memory stays free, for fragmentation and what is not counted."""
MOST_CAPACITY = 1 << 20
MOST_PP = 16
INTERLEAVED = 2
"""Stages of a pipeline rank that are tried beside one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run."""

    axes: Axes
    """How ranks share the model."""
    capacity: int
    """Most tokens of a lane in a round."""
    max_cp: int
    """The largest CP size."""
    recompute: bool = False
    """Whether blocks run again in backward."""
    graph: bool = False
    """Whether layers are replayed from CUDA graphs."""

    @property
    def sync(self) -> Sync:
        """Once a step where nothing makes lanes wait for each other in every round."""
        axes = self.axes
        waits = axes.shard == "zero3" or axes.ep > 1 or axes.pp > 1 or axes.lanes == 1
        return "round" if waits else "step"

    @property
    def complexity(self) -> tuple[int, ...]:
        """What is used beyond data and context parallelism, largest axis, what lanes share."""
        axes = self.axes
        used = [axes.tp > 1, axes.pp > 1, axes.vpp > 1, axes.ep > 1, self.recompute, self.graph]
        shard = ("none", "zero2", "zero3").index(axes.shard)
        return sum(used), max(axes.tp, axes.pp, axes.ep), shard, self.max_cp, self.capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """What the rank that needs most takes of a GPU."""

    peak: MemoryBreakdown
    """Bytes of its tensors."""
    communicators: int
    """Bytes of its process groups, an assumption for each."""
    graphs: int = 0
    """Most that CUDA graphs may take."""
    context: int = CONTEXT_BYTES
    """Bytes of CUDA itself."""

    @property
    def total(self) -> int:
        return self.peak.total + self.communicators + self.graphs + self.context

    def parts(self) -> dict[str, int]:
        more = {
            "communicators": self.communicators,
            "graphs": self.graphs,
            "context": self.context,
        }
        return {**self.peak.parts(), **more}


@dataclass(frozen=True, kw_only=True)
class AdviceTask:
    """What advice is wanted for."""

    model: ModelConfig
    """The model, as a recipe names it."""
    decoder: DecoderConfig
    """The same as data."""
    gpus: int
    """How many there are."""
    memory: int
    """Bytes of each."""
    machine: MachineProfile
    """How fast they are."""
    machine_name: str
    """The profile's name, which Longshore ships, or its file."""
    lengths: Ints
    """Lengths of all sequences."""
    batch: int
    """Sequences of a step."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the arithmetic."""

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max())

    @cached_property
    def step_tokens(self) -> int:
        """Tokens of a step, on average."""
        return max(1, round(float(np.mean(self.lengths)) * self.batch))

    @property
    def usable(self) -> int:
        """Bytes of a GPU that a run may take."""
        return self.memory - self.memory // FREE_SHARE

    def config(self, candidate: Candidate) -> RunConfig:
        """The configuration of a run; without data."""
        axes, recompute = candidate.axes, candidate.recompute
        return RunConfig(
            model=self.model,
            plan=PlanConfig(
                capacity=candidate.capacity, max_cp=candidate.max_cp, sync=candidate.sync
            ),
            parallel=ParallelConfig(
                shard=axes.shard, tp=axes.tp, pp=axes.pp, vpp=axes.vpp, ep=axes.ep
            ),
            train=TrainConfig(recompute="blocks" if recompute else "none", dtype=self.dtype),
            graph=GraphConfig(layers=("all",) if candidate.graph else ()),
        )

    @cached_property
    def _layouts(self) -> dict[tuple[int, int], Layout]:
        return {}

    def layout(self, axes: Axes) -> Layout | None:
        """The stages; None without a pipeline."""
        key = axes.pp, axes.vpp
        if axes.pp > 1 and key not in self._layouts:
            any_size = Candidate(axes=axes, capacity=KIB, max_cp=1)
            self._layouts[key] = pipeline_layout(self.config(any_size), self.decoder)
        return self._layouts.get(key)


def legal_axes(task: AdviceTask) -> list[Axes]:
    """All combinations that a run would accept on these GPUs."""
    legal = [axes for axes in _all_sizes(task) if _is_legal(task, axes)]
    return [replace(axes, shard=shard) for axes in legal for shard in _shard_modes(axes)]


def _all_sizes(task: AdviceTask) -> Iterator[Axes]:
    powers = [1 << bit for bit in range(task.gpus.bit_length()) if task.gpus % (1 << bit) == 0]
    for tp in (size for size in powers if size <= task.machine.node):
        for pp in (size for size in powers if size <= MOST_PP and task.gpus % (tp * size) == 0):
            lanes = task.gpus // (tp * pp)
            eps = [size for size in powers if has_experts(task.decoder) or size == 1]
            for ep in (size for size in eps if lanes * tp % size == 0):
                for vpp in (1, INTERLEAVED)[: 2 if pp > 1 else 1]:
                    yield Axes(lanes=lanes, tp=tp, pp=pp, vpp=vpp, ep=ep, shard="none")


def _shard_modes(axes: Axes) -> tuple[ShardMode, ...]:
    """With a pipeline zero3 would gather all weights for each of its many rounds: left out."""
    if axes.lanes == 1:
        return ("none",)
    return ("none", "zero2") if axes.pp > 1 else ("none", "zero2", "zero3")


def _is_legal(task: AdviceTask, axes: Axes) -> bool:
    config = task.config(Candidate(axes=axes, capacity=KIB, max_cp=1))
    layers, depths = len(task.decoder.layers), len(task.decoder.mtp)
    return not any(
        chain(
            code_refusals(config),
            parallel_refusals(config, task.decoder, lanes=axes.lanes),
            stage_refusals(layers, depths, pp=axes.pp, vpp=axes.vpp),
        )
    )


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """What of plans decides about memory."""

    tokens: int
    """Tokens of the fullest micro-batch, with padding."""
    rounds: int
    """Rounds of a step, at most."""
    cp_size: int = 1
    """CP size of the pack with most tokens of all its lanes."""
    shared_tokens: int | None = None
    """Tokens of a lane in that pack; None: as many as it holds."""

    @staticmethod
    def of(plans: Sequence[Plan]) -> "LaneLoad":
        packs = [pack for plan in plans for _, pack in plan.packs()]
        largest = max(
            packs, key=lambda pack: (pack.cp_size > 1) * pack.cp_size * pack.tokens_per_lane
        )
        return LaneLoad(
            max(map(_fullest, plans)),
            max(len(plan.rounds) for plan in plans),
            largest.cp_size,
            largest.tokens_per_lane,
        )


def _fullest(plan: Plan) -> int:
    """Tokens of the fullest micro-batch, with padding."""
    tokens: Counter[tuple[int, int]] = Counter()
    for number, pack in plan.packs():
        for lane in range(pack.first_lane, pack.first_lane + pack.cp_size):
            tokens[number, lane] += pack.tokens_per_lane
    ((number, lane), _) = tokens.most_common(1)[0]
    return lane_tokens(plan, number, lane)


def memory_of(task: AdviceTask, candidate: Candidate, plans: Sequence[Plan] = ()) -> GpuMemory:
    """Memory of the rank that needs most: with these plans, or with a lane that is full."""
    load = LaneLoad.of(plans) if plans else LaneLoad(candidate.capacity, 2, candidate.max_cp)
    axes, layout = candidate.axes, task.layout(candidate.axes)
    how = RankSetting(axes=axes, dtype=task.dtype, recompute=candidate.recompute, layout=layout)
    peaks = (
        expected_peak(
            task.decoder,
            replace(how, pp_rank=rank),
            tokens=load.tokens,
            rounds=load.rounds,
            cp_size=load.cp_size,
            shared_tokens=load.shared_tokens,
        )
        # The first saves most rounds, the last has the loss, those between are alike.
        for rank in sorted({0, min(1, axes.pp - 1), axes.pp - 1})
    )
    peak = max(peaks, key=lambda each: each.total)
    graphs = graph_bytes(task.config(candidate).graph, task.memory)
    return GpuMemory(peak=peak, communicators=_communicators(task, candidate), graphs=graphs)


def _communicators(task: AdviceTask, candidate: Candidate) -> int:
    axes = candidate.axes
    has_copies = axes.pp > 1 and (task.decoder.tied or task.decoder.mtp)
    groups = joined_groups(
        axes,
        cp_sizes=legal_cp_sizes(axes.lanes, max_cp=candidate.max_cp),
        copies=2 if has_copies else 1,
        replicated_stages=axes.vpp if axes.shard == "none" and axes.lanes > 1 else 0,
    )
    return communicator_bytes(groups)


def capacities(task: AdviceTask, axes: Axes) -> list[int]:
    """Powers of two times 1,024 that a step can fill, or that its longest sequence needs."""
    needed = padded_length(task.longest, axes.lanes) // axes.lanes
    share = -(-task.step_tokens // axes.lanes)
    most = max(needed, share, KIB)
    sizes = [KIB << bit for bit in range(11) if KIB << bit <= MOST_CAPACITY]
    useful = [size for size in sizes if size >= needed and size // 2 < most]
    return useful


def cp_limits(task: AdviceTask, axes: Axes, capacity: int) -> list[int]:
    """The least CP size at which every sequence fits, that of a node, and all lanes."""
    # parallel.attention and parallel.scan are left at "auto", where heads limit no CP size.
    sizes = legal_cp_sizes(axes.lanes)
    fitting = [size for size in sizes if padded_length(task.longest, size) // size <= capacity]
    if not fitting:
        return []
    node = max(1, task.machine.node // (axes.tp * axes.pp))
    inside = max((size for size in sizes if size <= node), default=1)
    return sorted({max(least, fitting[0]) for least in (1, inside, sizes[-1])})


class MemoryCheck:
    """Which candidates fit; what needs more than one that does not is not computed."""

    def __init__(self, task: AdviceTask) -> None:
        self.task = task
        self.least: dict[tuple[Axes, bool], tuple[Candidate, GpuMemory]] = {}
        """What needs least of all that does not fit, by axes and recomputation."""
        self._limits: dict[tuple[Axes, bool, int, bool], int] = {}

    def fits(self, candidate: Candidate) -> bool:
        """Whether it fits at the full capacity."""
        kind = candidate.axes, candidate.recompute
        key = *kind, candidate.max_cp, candidate.graph
        if candidate.capacity >= self._limits.get(key, MOST_CAPACITY + 1):
            return False
        memory = memory_of(self.task, candidate)
        if memory.total <= self.task.usable:
            return True
        self._limits[key] = candidate.capacity
        least = self.least.get(kind)
        if least is None or memory.total < least[1].total:
            self.least[kind] = candidate, memory
        return False


def with_graphs(task: AdviceTask, candidate: Candidate) -> Candidate | None:
    """The same with CUDA graphs; None where a run refuses them."""
    graphed = replace(candidate, graph=True)
    config = task.config(graphed)
    refusals = chain(
        graph_refusals(config, task.decoder),
        code_refusals(config),
        lora_refusals(config, task.decoder),
    )
    return None if any(refusals) else graphed


def all_candidates(task: AdviceTask) -> Iterator[Candidate]:
    """Every legal one without graphs, whether it fits or not."""
    for axes, recompute in product(legal_axes(task), (False, True)):
        for capacity in capacities(task, axes):
            for max_cp in cp_limits(task, axes, capacity):
                yield Candidate(axes=axes, capacity=capacity, max_cp=max_cp, recompute=recompute)
