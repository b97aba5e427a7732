"""What one policy made of one case, and a way to look it up.

In: what planner.py measured. Out: shares of the bound, speed-ups, and the cells of tables.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cases import Case

POLICIES = ("static", "balanced", "dynamic", "mixed")
OWN, FITTED = "megatron own", "megatron fitted"
SYNCS = ("round", "step")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A policy's plan of a case under a profile and sync mode, as the evaluator scored it.

    `predicted` is None where there is no plan or it breaks a rule other than the capacity; `note`
    then says why. `said_predicted` and `said_bound` are what longshore's plan says of itself.
    """

    case: Case
    profile: str
    sync: str
    policy: str
    bound: float
    predicted: float | None = None
    rounds: int = 0
    efficiency: float | None = None
    seconds: float | None = None
    faults: tuple[str, ...] = ()
    note: str = ""
    said_predicted: float | None = None
    said_bound: float | None = None

    @property
    def share(self) -> float | None:
        """The part of the step that the lower bound needs: 1 is the best possible."""
        return None if self.predicted is None else self.bound / self.predicted

    @property
    def share_cell(self) -> str:
        if self.share is None:
            return self.note or "no plan"
        return f"{self.share:.3f}{'†' if self.faults else ''}"

    @property
    def seconds_cell(self) -> str:
        return self.note or "no plan" if self.seconds is None else f"{self.seconds:.4f}"


class Outcomes:
    """All outcomes of a run, in order, and by (case, profile, sync, policy)."""

    def __init__(self, outcomes: Iterable[Outcome]) -> None:
        self.all = list(outcomes)
        self.by_key = {(o.case, o.profile, o.sync, o.policy): o for o in self.all}

    def get(self, case: Case, profile: str, sync: str, policy: str) -> Outcome:
        return self.by_key[case, profile, sync, policy]

    def beside(self, outcome: Outcome, policy: str) -> Outcome:
        """Another policy's outcome of the same case."""
        return self.get(outcome.case, outcome.profile, outcome.sync, policy)

    def select(self, profile: str, sync: str, policy: str = "mixed") -> list[Outcome]:
        wanted = (profile, sync, policy)
        return [o for o in self.all if (o.profile, o.sync, o.policy) == wanted]

    def speed_up(self, outcome: Outcome, policy: str) -> float | None:
        """How many times as fast this outcome's step is as the other policy's."""
        other = self.beside(outcome, policy)
        if outcome.predicted is None or other.predicted is None:
            return None
        return other.predicted / outcome.predicted
