"""The types of a plan, Plan ⊃ Round ⊃ Pack ⊃ Sequence, its digest, policies, and parallel axes.

A pack names its sequences by their index in the plan's list. Two sequences of 8 and 3 tokens on 2
lanes, the first split over both, the second beside it on lane 1, make one round:

    Round((Pack(0, 2, (0,), 4), Pack(1, 1, (1,), 3)))

A policy of Longshore's is registered once, in plan/policies.py, and is then known to recipes, the
command line, checks and pages. A plan may name a policy that cannot be imported here, such as the
function "mine:greedy" of another user: it has the default properties, so its pages can be drawn.
"""

import hashlib
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import index
from typing import NoReturn

import numpy as np

from longshore.plan.cost import (
    EMPTY_TOKENS,
    NO_PADDING,
    CostProfile,
    LanePadding,
    StageCosts,
    equal_stages,
)
from longshore.settings import ShardChoice

DEFAULT_POLICY = "mixed"


@dataclass(frozen=True, slots=True)
class Policy:
    """How a step is packed and split."""

    name: str
    """As a recipe, the command line and a plan have it."""
    run: Callable[..., None]
    """Takes a Task and a Choice (plan/policies.py) and offers rounds to the Choice."""
    about: str
    """One line for lists of policies."""
    one_cp_size: bool = False
    """All packs have one CP size, which the setting cp_size may choose."""
    fixed_packs: bool = False
    """Packs stay whole: rounds may be reordered for a pipeline, but not be split."""
    pads_to_longest: bool = False
    """Every sequence is padded to the longest of the step."""
    needs_packs: bool = False
    """It places packs that the caller made; other policies take none."""
    one_pack_per_lane: bool = False
    """A lane has at most one pack in a round."""


POLICIES: dict[str, Policy] = {}
"""The policies by name, the default first."""


def register_policy(policy: Policy) -> None:
    if policy.name in POLICIES:
        raise ValueError(f"there is a policy {policy.name!r} already; choose another name")
    POLICIES[policy.name] = policy


def policy_named(name: str) -> Policy:
    """The policy, or the default properties under a name that is not registered."""
    return POLICIES.get(name) or Policy(name, _cannot_run, about="")


def policy_names(has: Callable[[Policy], bool]) -> tuple[str, ...]:
    """The names of the registered policies that have a property."""
    return tuple(name for name, policy in POLICIES.items() if has(policy))


def _cannot_run(*_: object) -> NoReturn:
    raise ValueError(
        "the policy is not registered, so it cannot plan; load your own with load_policy"
    )


@dataclass(frozen=True, slots=True)
class Sequence:
    """A tokenized sample as the planner sees it."""

    id: int
    length: int
    loss_tokens: int


@dataclass(frozen=True, slots=True)
class Pack:
    """Sequences joined on one CP group: the lanes first_lane … first_lane + cp_size − 1."""

    first_lane: int
    cp_size: int
    sequences: tuple[int, ...]
    tokens_per_lane: int

    @property
    def lanes(self) -> range:
        return range(self.first_lane, self.first_lane + self.cp_size)


@dataclass(frozen=True, slots=True)
class Round:
    """One micro-batch index over all lanes; packs by falling CP size, then by first lane."""

    packs: tuple[Pack, ...]


@dataclass(frozen=True, slots=True)
class PlanSetting:
    """What a plan was asked for."""

    lanes: int
    """DP × CP coordinates."""
    capacity: int
    """The most tokens a lane holds in a round."""
    policy: str
    """A name in POLICIES, or module:function."""
    sync: str
    """When lanes wait for each other: after each "round", or each "step"."""
    cp_sizes: tuple[int, ...]
    """The legal CP sizes, rising."""
    profile: CostProfile
    """What packs cost."""
    align: int
    """A lane's tokens in a round are padded to a multiple of this."""
    max_sequences: int | None
    """The most sequences of a lane in a round; None: no limit."""
    pp: int
    """Pipeline ranks; 1: no pipeline."""
    vpp: int
    """Stages of each pipeline rank."""
    layout: str = ""
    """Which parts of the model each stage has, as plan/layout.py writes it; "": not known."""
    stage_costs: StageCosts | None = None
    """How stages share a round's cost; None: evenly, backward twice the forward."""
    tp: int = 1
    """Tensor-parallel ranks of a lane, which have equal parts of its tokens: it divides `align`."""
    ep: int = 1
    """Ranks that experts are split over, across lanes and TP ranks: it divides lanes · tp."""
    buckets: tuple[int, ...] = ()
    """A lane's tokens are padded to one of these, rising up to the capacity; (): to `align`."""
    cp_size: int = 0
    """The one CP size of a policy that has one; 0: the policy chooses."""

    @property
    def shares(self) -> StageCosts:
        return self.stage_costs or equal_stages(self.pp, self.vpp)

    @property
    def padding(self) -> LanePadding:
        """What `align` and buckets add to lanes; without both an empty lane's tokens are free."""
        most = self.capacity // self.align * self.align
        rule = LanePadding(self.align, self.buckets, min(EMPTY_TOKENS, most))
        return rule or NO_PADDING

    @property
    def synced(self) -> bool:
        """Whether lanes meet inside every layer, before its experts and after them."""
        return self.ep > 1

    @property
    def planned_by(self) -> Policy:
        """The policy with its properties; the default ones under a name that is not registered."""
        return policy_named(self.policy)


@dataclass(frozen=True, slots=True)
class Stats:
    """How good a plan is."""

    predicted: float
    """Estimated seconds of the step."""
    lower_bound: float
    """Seconds that no plan can beat."""
    gap: float
    """predicted / lower_bound − 1."""
    efficiency: float
    """Seconds of arithmetic on real tokens, spread evenly over all lanes, / predicted."""
    imbalance: float
    """Share of the lanes' time spent waiting for other lanes."""
    bubble: float
    """Share of the step that a pipeline rank waits for others."""
    fill: float
    """Tokens / (lanes · rounds · capacity)."""
    padding: float
    """Share of all tokens that is padding, that of buckets and `align` included."""
    cp_histogram: tuple[tuple[int, int], ...]
    """(CP size, number of sequences), rising."""
    rounds: int
    """Rounds of the step."""
    tokens: int
    """Real tokens."""
    sum_squared_lengths: int
    """Sum over all sequences, with which the cost of attention grows."""
    planning_seconds: float
    """Measured; the plan does not depend on it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All rounds of one optimizer step."""

    setting: PlanSetting
    """What the plan was asked for."""
    sequences: tuple[Sequence, ...]
    """In the order they came; packs name them by their index here."""
    rounds: tuple[Round, ...]
    """In the order they run."""
    stats: Stats
    """How good the plan is."""
    digest: str
    """A hash of what was decided: equal on all ranks."""

    def packs(self) -> Iterator[tuple[int, Pack]]:
        """Every pack with the number of its round."""
        for number, round_ in enumerate(self.rounds):
            for pack in round_.packs:
                yield number, pack


DIGESTED = ("lanes", "capacity", "align", "sync", "cp_sizes", "pp", "vpp")
"""Fields of a setting that decide how rounds are run: shapes, groups, the order of work."""


def plan_digest(setting: PlanSetting, sequences: Seq[Sequence], rounds: Seq[Round]) -> str:
    """64 hex digits that all ranks compare: a name for what was decided.

    Equal digests mean the same tensors on every rank in every round, and the same collectives in
    the same order. Why rounds were chosen (policy, costs) and which samples the sequences are is
    not in it. Only in a pipeline do costs decide how rounds are run: by them ranks order their
    messages.
    """
    lines = [f"{name} {getattr(setting, name)}" for name in DIGESTED]
    optional = {
        "tp": setting.tp if setting.tp > 1 else "",
        "ep": setting.ep if setting.ep > 1 else "",
        "buckets": " ".join(map(str, setting.buckets)),
        "curve": setting.profile.curve,
    }
    lines += [f"{name} {value}" for name, value in optional.items() if value]
    if setting.planned_by.pads_to_longest:
        lines.append("padded to the longest")
    if setting.pp > 1:
        lines += [f"layout {setting.layout}", f"{setting.profile}", f"{setting.shares}"]
    if setting.pp > 1 and setting.synced:
        lines.append(f"token-wise {setting.shares.tokenwise}")
    lines.append(" ".join(str(sequence.length) for sequence in sequences))
    for round_ in rounds:
        lines.append("round")
        lines += [
            f"{pack.first_lane} {pack.cp_size} {pack.tokens_per_lane}: "
            f"{' '.join(map(str, pack.sequences))}"
            for pack in round_.packs
        ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


AXES = ("pp", "lanes", "tp")
EXPERT_AXES = ("pp", "expert_replicas", "ep")
"""The same ranks, as layers of experts divide them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The parallel axes of a run, and the arithmetic between ranks and coordinates."""

    lanes: int
    """Data and context parallelism together."""
    tp: int = 1
    """Tensor parallelism."""
    pp: int = 1
    """Pipeline parallelism."""
    vpp: int = 1
    """Stages of each pipeline rank, unless a layout by hand has others."""
    ep: int = 1
    """Expert parallelism: ranks of a pipeline rank that share one set of experts."""
    shard: ShardChoice = "auto"
    """What lanes split of the model (ZeRO); "auto": not decided yet."""

    def __post_init__(self) -> None:
        for name in ("lanes", "tp", "pp", "vpp", "ep"):
            _check_size(name, getattr(self, name))
        for why in rank_refusals(lanes=self.lanes, tp=self.tp, ep=self.ep):
            raise ValueError(why)

    @property
    def splits_layers(self) -> bool:
        """Whether ranks of a pipeline rank split a layer's matrices or its experts."""
        return self.tp > 1 or self.ep > 1

    @property
    def expert_replicas(self) -> int:
        """How many ranks of a pipeline rank have the same experts."""
        return self.lanes * self.tp // self.ep

    @property
    def world_size(self) -> int:
        return self.lanes * self.tp * self.pp

    def check_world_size(self, ranks: int) -> None:
        """Raises unless the axes multiply to this number of ranks."""
        if ranks == self.world_size:
            return
        each = self.tp * self.pp
        fits = f", or set lanes to {ranks // each}" if ranks and ranks % each == 0 else ""
        raise ValueError(
            f"{self.lanes} lanes × tp {self.tp} × pp {self.pp} make {self.world_size} ranks, "
            f"but there are {ranks}; start {self.world_size}{fits}"
        )

    def rank_at(self, *, lane: int, tp_rank: int = 0, pp_rank: int = 0) -> int:
        """The rank at these coordinates."""
        for name, at, size in (
            ("lane", lane, self.lanes),
            ("tp_rank", tp_rank, self.tp),
            ("pp_rank", pp_rank, self.pp),
        ):
            if not 0 <= at < size:
                raise ValueError(f"{name} is {at}; it must be from 0 to {size - 1}")
        return (pp_rank * self.lanes + lane) * self.tp + tp_rank

    def lane_of(self, rank: int) -> int:
        return rank // self.tp % self.lanes

    def tp_rank_of(self, rank: int) -> int:
        return rank % self.tp

    def pp_rank_of(self, rank: int) -> int:
        return rank // (self.lanes * self.tp)

    def ep_rank_of(self, rank: int) -> int:
        return rank % self.ep

    def lane_blocks(self, lanes: Seq[int]) -> list[list[int]]:
        """For each TP and PP coordinate, the ranks of these lanes, in the order of the lanes."""
        return [
            [self.rank_at(lane=lane, tp_rank=tp_rank, pp_rank=pp_rank) for lane in lanes]
            for pp_rank in range(self.pp)
            for tp_rank in range(self.tp)
        ]

    def blocks(self, axis: str) -> list[list[int]]:
        """All groups along one of AXES or EXPERT_AXES, each as its ranks; every rank is in one."""
        axes = AXES if axis in AXES else EXPERT_AXES
        mesh = np.arange(self.world_size).reshape([getattr(self, name) for name in axes])
        size: int = getattr(self, axis)
        blocks: list[list[int]] = np.moveaxis(mesh, axes.index(axis), -1).reshape(-1, size).tolist()
        return blocks


def _check_size(name: str, size: object) -> None:
    try:
        good = index(size) >= 1 and not isinstance(size, bool)  # type: ignore[arg-type]
    except TypeError:
        good = False
    if not good:
        raise ValueError(f"{name} is {size!r}; it must be an integer of at least 1")


def rank_refusals(*, lanes: int, tp: int, ep: int) -> Iterator[str]:
    """Why the ranks of a pipeline stage cannot share experts `ep` by `ep`, and what works."""
    ranks = lanes * tp
    if ranks % ep:
        works = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
        yield (
            f"parallel.ep is {ep}, which does not divide the {ranks} ranks of a pipeline stage "
            f"({lanes} lanes × parallel.tp {tp}); use one of {works}, or another number of ranks"
        )
