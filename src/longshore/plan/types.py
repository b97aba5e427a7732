"""The words of a plan: Plan ⊃ Round ⊃ Pack ⊃ Sequence.

A pack names its sequences by their place in the plan's list. Two sequences of 8 and 3 tokens on 2
lanes, the first split over both, the second beside it on lane 1, make one round:

    Round((Pack(0, 2, (0,), 4), Pack(1, 1, (1,), 3)))
"""

from collections.abc import Iterator
from dataclasses import dataclass

from longshore.plan.cost import CostProfile
from longshore.plan.policy import Policy, policy_named


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
class Setting:
    """What a plan was asked for. `cp_sizes` are the legal sizes, rising."""

    lanes: int
    capacity: int
    policy: str
    sync: str
    cp_sizes: tuple[int, ...]
    profile: CostProfile
    align: int
    max_sequences: int | None
    pp: int
    vpp: int

    @property
    def planned_by(self) -> Policy:
        """The policy with its properties; the default ones under a name that is not registered."""
        return policy_named(self.policy)


@dataclass(frozen=True, slots=True)
class Stats:
    """What a plan is worth.

    predicted, lower_bound: seconds of the step, and what no plan can beat. gap: predicted /
    lower_bound − 1. efficiency: seconds of pure arithmetic on real tokens, spread over all lanes, /
    predicted. imbalance: share of the lanes' time spent waiting for other lanes; bubble: for the
    pipeline. fill: tokens / (lanes · rounds · capacity). padding: share of all tokens that is
    padding. cp_histogram: sequences at each CP size.
    """

    predicted: float
    lower_bound: float
    gap: float
    efficiency: float
    imbalance: float
    bubble: float
    fill: float
    padding: float
    cp_histogram: tuple[tuple[int, int], ...]
    rounds: int
    tokens: int
    sum_squared_lengths: int
    planning_seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """All rounds of one optimizer step. `digest` names the decision, not how long it took."""

    setting: Setting
    sequences: tuple[Sequence, ...]
    rounds: tuple[Round, ...]
    stats: Stats
    digest: str

    def packs(self) -> Iterator[tuple[int, Pack]]:
        """Every pack with the number of its round."""
        for number, round_ in enumerate(self.rounds):
            for pack in round_.packs:
                yield number, pack
