"""A policy of a user's own: a function that a recipe or the command line names as module:function.

In: the name. Out: a Policy whose function gets the Task and an OwnChoice. All that it offers is
checked before it is used, and what is wrong is a ValueError that names the policy:

    def one_a_round(task, choice):
        choice.offer_packs([(task.cp_sizes[-1], [place]) for place in range(len(task.lengths))])

on 2 lanes with the lengths 6 and 3 makes two rounds, each of one pack at CP size 2.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import index

from longshore.errors import SettingError
from longshore.plan.check import check_rounds
from longshore.plan.policy import POLICIES, Policy
from longshore.plan.task import Choice, Rounds, Task, make_pack
from longshore.plan.types import Pack, Round
from longshore.user_code import FUNCTION_NAME, load_function


class OwnChoice:
    """Where a policy of a user's own offers its packs; the fastest offer becomes the plan."""

    def __init__(self, task: Task, choice: Choice) -> None:
        self._task = task
        self._choice = choice

    def offer_packs(self, packs: Iterable[tuple[int, Iterable[int]]]) -> float:
        """Lays packs (cp_size, sequences) side by side, the largest CP size first.

        Returns the predicted seconds of the step.
        """
        with _only_whole_numbers("(cp_size, sequences)"):
            sized = [(index(cp_size), list(sequences)) for cp_size, sequences in packs]
        rounds: list[list[tuple[int, int, Iterable[int]]]] = [[]]
        free = 0
        for cp_size, sequences in sorted(sized, key=lambda pack: -pack[0]):
            self._check_legal(cp_size)
            first_lane = -(-free // cp_size) * cp_size
            if first_lane + cp_size > self._task.lanes:
                rounds.append([])
                first_lane = 0
            rounds[-1].append((first_lane, cp_size, sequences))
            free = first_lane + cp_size
        return self.offer_rounds(rounds)

    def offer_rounds(self, rounds: Iterable[Iterable[tuple[int, int, Iterable[int]]]]) -> float:
        """Takes rounds of packs (first_lane, cp_size, sequences).

        Returns the predicted seconds of the step.
        """
        task = self._task
        with _only_whole_numbers("(first_lane, cp_size, sequences)"):
            offered: Rounds = tuple(self._round(packs) for packs in rounds)
        check_rounds(offered, setting=task.setting, lengths=task.lengths)
        time = self._choice.offer(offered)
        return task.table.seconds(time) / task.setting.shares.whole

    def _round(self, packs: Iterable[tuple[int, int, Iterable[int]]]) -> Round:
        joined = [self._pack(*pack) for pack in packs]
        return Round(tuple(sorted(joined, key=lambda pack: (-pack.cp_size, pack.first_lane))))

    def _pack(self, first_lane: int, cp_size: int, sequences: Iterable[int]) -> Pack:
        places = tuple(index(place) for place in sequences)
        most = len(self._task.lengths) - 1
        for place in places:
            if not 0 <= place <= most:
                raise ValueError(
                    f"there is no sequence {place}; sequences are numbered 0 to {most}"
                )
        self._check_legal(index(cp_size))
        return make_pack(self._task, index(first_lane), index(cp_size), places)

    def _check_legal(self, cp_size: int) -> None:
        if cp_size not in self._task.cp_sizes:
            legal = ", ".join(map(str, self._task.cp_sizes))
            raise ValueError(f"CP size {cp_size} is not legal; legal are {legal}")


@contextmanager
def _only_whole_numbers(pack: str) -> Iterator[None]:
    """A pack that is something else is the user's mistake. pack: what it must be."""
    try:
        yield
    except TypeError as error:
        raise ValueError(f"a pack must be {pack}, all integers ({error})") from error


def load_policy(name: str) -> Policy:
    """The registered policy, or that of a user's function."""
    if isinstance(name, str) and name in POLICIES:
        return POLICIES[name]
    if not isinstance(name, str) or not FUNCTION_NAME.fullmatch(name):
        raise SettingError(
            "{policy} is {given!r}; it must be {names}, or your own function as module:function",
            given=name,
            names=", ".join(POLICIES),
        )
    function = load_function(name, "policy")

    def run(task: Task, choice: Choice) -> None:
        try:
            function(task, OwnChoice(task, choice))
            if choice.time is None:
                raise ValueError("it offered no rounds; call choice.offer_packs or offer_rounds")
        except ValueError as error:
            problem = str(error)
            raise SettingError("{policy} {name}: {problem}", name=name, problem=problem) from error

    return Policy(name, run, fixed_packs=True, about="a function of the user's")
