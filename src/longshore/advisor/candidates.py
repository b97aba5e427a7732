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
from itertools import chain
from typing import Literal

import numpy as np

from longshore.advisor.machine import MachineProfile
from longshore.advisor.peak_memory import (
    MemoryBreakdown,
    RankSetting,
    communicator_bytes,
    expected_peak,
    joined_groups,
)
from longshore.arch.decoder import DecoderConfig, has_experts
from longshore.arch.memory import ModelSplit
from longshore.arch.part import Sharing
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
from longshore.plan.types import Plan
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
class ModelAxes:
    """How ranks share the model."""

    lanes: int
    """Ranks / (tp · pp)."""
    tp: int = 1
    """Ranks that share a layer's matrices."""
    pp: int = 1
    """Ranks that share the layers."""
    vpp: int = 1
    """Stages of each of them."""
    ep: int = 1
    """Ranks that share experts."""
    shard: ShardMode = "none"
    """What lanes share of the model."""
    recompute: bool = False
    """Whether blocks run again in backward."""

    @property
    def sync(self) -> Sync:
        """Once a step where nothing makes lanes wait for each other in every round."""
        waits = self.shard == "zero3" or self.ep > 1 or self.pp > 1 or self.lanes == 1
        return "round" if waits else "step"

    @property
    def complexity(self) -> tuple[int, int, int]:
        """ModelAxes beyond data and context parallelism, recomputation, what lanes share."""
        used = [self.tp > 1, self.pp > 1, self.vpp > 1, self.ep > 1]
        shard = ("none", "zero2", "zero3").index(self.shard)
        return sum(used) + self.recompute, max(self.tp, self.pp, self.ep), shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to run."""

    axes: ModelAxes
    """How ranks share the model."""
    capacity: int
    """Most tokens of a lane in a round."""
    max_cp: int
    """The largest CP size."""
    graph: bool = False
    """Whether layers are replayed from CUDA graphs."""


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
        axes = candidate.axes
        return RunConfig(
            model=self.model,
            plan=PlanConfig(capacity=candidate.capacity, max_cp=candidate.max_cp, sync=axes.sync),
            parallel=ParallelConfig(
                shard=axes.shard, tp=axes.tp, pp=axes.pp, vpp=axes.vpp, ep=axes.ep
            ),
            train=TrainConfig(recompute="blocks" if axes.recompute else "none", dtype=self.dtype),
            graph=GraphConfig(layers=("all",) if candidate.graph else ()),
        )

    @cached_property
    def _layouts(self) -> dict[tuple[int, int], Layout]:
        return {}

    def layout(self, axes: ModelAxes) -> Layout | None:
        """The stages; None without a pipeline."""
        key = axes.pp, axes.vpp
        if axes.pp > 1 and key not in self._layouts:
            any_size = Candidate(axes=axes, capacity=KIB, max_cp=1)
            self._layouts[key] = pipeline_layout(self.config(any_size), self.decoder)
        return self._layouts.get(key)


def legal_axes(task: AdviceTask) -> list[ModelAxes]:
    """All combinations that a run would accept on these GPUs."""
    legal = [axes for axes in _all_sizes(task) if _is_legal(task, axes)]
    return [each for axes in legal for each in _with_modes(axes)]


def _all_sizes(task: AdviceTask) -> Iterator[ModelAxes]:
    powers = [1 << bit for bit in range(task.gpus.bit_length()) if task.gpus % (1 << bit) == 0]
    for tp in (size for size in powers if size <= task.machine.node):
        for pp in (size for size in powers if size <= MOST_PP and task.gpus % (tp * size) == 0):
            lanes = task.gpus // (tp * pp)
            eps = [size for size in powers if has_experts(task.decoder) or size == 1]
            for ep in (size for size in eps if lanes * tp % size == 0):
                for vpp in (1, INTERLEAVED)[: 2 if pp > 1 else 1]:
                    yield ModelAxes(lanes=lanes, tp=tp, pp=pp, vpp=vpp, ep=ep)


def _with_modes(axes: ModelAxes) -> Iterator[ModelAxes]:
    """With a pipeline zero3 would gather all weights for each of its many rounds: left out."""
    shards: tuple[ShardMode, ...] = ("none", "zero2", "zero3")
    if axes.lanes == 1:
        shards = ("none",)
    elif axes.pp > 1:
        shards = ("none", "zero2")
    for shard in shards:
        for recompute in (False, True):
            yield replace(axes, shard=shard, recompute=recompute)


def _is_legal(task: AdviceTask, axes: ModelAxes) -> bool:
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
    peaks = (
        expected_peak(
            task.decoder,
            tokens=load.tokens,
            rounds=load.rounds,
            how=RankSetting(
                lanes=axes.lanes,
                shard=axes.shard,
                dtype=task.dtype,
                recompute=axes.recompute,
                split=ModelSplit(tp=axes.tp, ep=axes.ep),
                layout=layout,
                pp_rank=rank,
                cp_size=load.cp_size,
                shared_tokens=load.shared_tokens,
                sharing=Sharing("auto", "auto"),
            ),
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
        lanes=axes.lanes,
        tp=axes.tp,
        pp=axes.pp,
        ep=axes.ep,
        cp_sizes=legal_cp_sizes(axes.lanes, max_cp=candidate.max_cp),
        copies=2 if has_copies else 1,
        replicated_stages=axes.vpp if axes.shard == "none" and axes.lanes > 1 else 0,
    )
    return communicator_bytes(groups)


def capacities(task: AdviceTask, axes: ModelAxes) -> list[int]:
    """Powers of two times 1,024 that a step can fill, or that its longest sequence needs."""
    needed = padded_length(task.longest, axes.lanes) // axes.lanes
    share = -(-task.step_tokens // axes.lanes)
    most = max(needed, share, KIB)
    sizes = [KIB << bit for bit in range(11) if KIB << bit <= MOST_CAPACITY]
    useful = [size for size in sizes if size >= needed and size // 2 < most]
    return useful


def cp_limits(task: AdviceTask, axes: ModelAxes, capacity: int) -> list[int]:
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
        self.least: dict[ModelAxes, tuple[Candidate, GpuMemory]] = {}
        """What needs least of all that does not fit, by axes."""
        self._limits: dict[tuple[ModelAxes, int, bool], int] = {}

    def fits(self, candidate: Candidate) -> bool:
        """Whether it fits at the full capacity."""
        key = candidate.axes, candidate.max_cp, candidate.graph
        if candidate.capacity >= self._limits.get(key, MOST_CAPACITY + 1):
            return False
        memory = memory_of(self.task, candidate)
        if memory.total <= self.task.usable:
            return True
        self._limits[key] = candidate.capacity
        least = self.least.get(candidate.axes)
        if least is None or memory.total < least[1].total:
            self.least[candidate.axes] = candidate, memory
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
    for axes in legal_axes(task):
        for capacity in capacities(task, axes):
            for max_cp in cp_limits(task, axes, capacity):
                yield Candidate(axes=axes, capacity=capacity, max_cp=max_cp)
