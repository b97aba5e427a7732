"""The policies: each offers one or more ways to run a step, and the fastest is kept.

In: a Task. Out: rounds, offered to a Choice that times them. On 2 lanes of 8 tokens, lengths 6, 3
and 3 give under `static` at CP size 1 the packs (6) and (3, 3) side by side, and under `padded` two
rounds of one sequence each, all of them as long as 6. A new policy is a function and its Policy.

A policy of a user's own: a function that a recipe or the command line names as module:function.

In: the name. Out: a Policy whose function gets the Task and an OwnChoice. All that it offers is
checked before it is used, and what is wrong is a ValueError that names the policy:

    def one_a_round(task, choice):
        choice.offer_packs([(task.cp_sizes[-1], [place]) for place in range(len(task.lengths))])

on 2 lanes with the lengths 6 and 3 makes two rounds, each of one pack at CP size 2.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import index

import numpy as np

from longshore.plan.bound import UNLIMITED, work_bound
from longshore.plan.check import check_rounds
from longshore.plan.packing import PackingLimits, Placed, Problem
from longshore.plan.search import Draft, search_pipeline, search_rounds, search_step
from longshore.plan.task import Choice, Rounds, Task, make_pack
from longshore.plan.types import POLICIES, Pack, Policy, Round, register_policy
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
        raise ValueError(
            f"plan.policy is {name!r}; it must be {', '.join(POLICIES)}, or your own function as "
            "module:function"
        )
    function = load_function(name, "plan.policy")

    def run(task: Task, choice: Choice) -> None:
        try:
            function(task, OwnChoice(task, choice))
            if choice.time is None:
                raise ValueError("it offered no rounds; call choice.offer_packs or offer_rounds")
        except ValueError as error:
            raise ValueError(f"plan.policy {name}: {error}") from error

    return Policy(name, run, fixed_packs=True, about="a function of the user's")


TOKEN_SLACKS = (1.05, 1.1, 1.4)
"""Limits of a lane's tokens that are tried, as multiples of their mean."""
WORTH_MORE = 1.02
"""A plan further above the bound than this is worth a second search."""


def padded(task: Task, choice: Choice) -> None:
    """One sequence a group a round, in the order they came, each charged as the longest."""
    size = task.sizes_that_fit()[0]
    choice.offer(_in_order(task, size, [[i] for i in range(len(task.table.cost))]))


def static(task: Task, choice: Choice) -> None:
    """One CP size, next-fit in the order they came."""
    choice.offer(_next_fit(task, task.sizes_that_fit()[0]))


def balanced(task: Task, choice: Choice) -> None:
    """One CP size for all, balanced by cost: the one asked for, or the best."""
    for size in sorted(task.sizes_that_fit(), key=lambda size: (task.least_time(size), size)):
        if choice.could_gain(task.least_time(size)):
            _search(task, choice, sizes=(size,), sole=True)


def dynamic(task: Task, choice: Choice) -> None:
    """One pack for a lane and round, a CP size for each."""
    _search(task, choice, sizes=task.table.sizes, sole=True)


def mixed(task: Task, choice: Choice) -> None:
    """Packs of several CP sizes in a lane's micro-batch; never slower than the other policies.

    With a pipeline and many sequences the others are tried only where the plan is not yet near its
    bound.
    """
    _search(task, choice, sizes=task.table.sizes, sole=False)
    if choice.is_good():
        return
    dynamic(task, choice)
    balanced(task, choice)
    for size in task.sizes_that_fit():
        if choice.could_gain(task.least_time(size)):
            choice.offer(_next_fit(task, size))


def given(task: Task, choice: Choice) -> None:
    """The caller's rounds as they are, or the caller's packs, placed on lanes and rounds."""
    if task.rounds is not None:
        OwnChoice(task, choice).offer_rounds(task.rounds)
        return
    table = task.given_table()
    order = np.argsort(-table.cost[:, 0], kind="stable")
    members = [task.packs[i] for i in order]
    limits = _limits(task, lanes=task.setting.lanes, max_items=1, sole=True)
    table = table.part(order, table.sizes)
    _run(choice, Problem(table, limits, tokenwise=task.tokenwise), members)


for _policy in (
    Policy(
        "mixed",
        mixed,
        about="a lane may hold packs of different CP sizes in one round",
    ),
    Policy(
        "dynamic",
        dynamic,
        one_pack_per_lane=True,
        about="a CP size for each pack, at most one pack per lane and round",
    ),
    Policy(
        "balanced",
        balanced,
        one_cp_size=True,
        one_pack_per_lane=True,
        about="one CP size for all, packs balanced by cost",
    ),
    Policy(
        "static",
        static,
        one_cp_size=True,
        fixed_packs=True,
        one_pack_per_lane=True,
        about="one CP size for all, packs filled in the order of arrival",
    ),
    Policy(
        "padded",
        padded,
        one_cp_size=True,
        fixed_packs=True,
        pads_to_longest=True,
        one_pack_per_lane=True,
        about="one sequence per lane and round, padded to the longest",
    ),
    Policy(
        "given",
        given,
        fixed_packs=True,
        needs_packs=True,
        about="your own packs, assigned to lanes and rounds; or your own rounds",
    ),
):
    register_policy(_policy)


def _limits(task: Task, *, lanes: int, max_items: int, sole: bool) -> PackingLimits:
    step = task.setting.sync == "step"
    return PackingLimits(
        lanes=lanes,
        capacity=task.capacity,
        lane_tokens=1 << 50 if step else task.capacity,
        max_items=UNLIMITED if step and max_items > 1 else max_items,
        min_rounds=1,
        sole=sole,
    )


def _search(task: Task, choice: Choice, *, sizes: tuple[int, ...], sole: bool) -> None:
    """Offers what the search finds with these sizes."""
    setting = task.setting
    lanes = setting.lanes // sizes[0] * sizes[0] if len(sizes) == 1 else setting.lanes
    table = task.table.part(np.array(task.by_length), sizes)
    members = [(i,) for i in task.by_length]
    limits = _limits(task, lanes=lanes, max_items=task.most_sequences, sole=sole)
    _run(choice, Problem(table, limits, tokenwise=task.tokenwise), members)


def _run(choice: Choice, problem: Problem, members: Seq[tuple[int, ...]]) -> None:
    task = choice.task
    sync = task.setting.sync
    bound = work_bound(problem, task.setting)
    if sync == "round":
        if task.setting.pp > 1:
            pp, vpp = task.setting.pp, task.setting.vpp
            search = partial(search_pipeline, time=task.finish, bound=bound, pp=pp, vpp=vpp)
        else:
            search = partial(search_rounds, bound=bound)
        draft = search(problem)
        drafts = [draft, *(search(level) for level in _level_problems(problem, draft))]
        if task.setting.pp == 1:
            drafts = [min(drafts, key=lambda each: each.time(problem))]
        # With a pipeline, or experts over ranks, a draft's time is only nearly exact.
        is_near = task.setting.pp > 1 or problem.tokenwise > 0
        for draft in drafts:
            if is_near or choice.could_gain(draft.time(problem)):
                choice.offer(_to_rounds(task, draft.packs(), members))
        return
    draft = search_step(problem, bound=bound)
    joins = (False, True) if problem.table.round and not problem.sole else (False,)
    times = [
        choice.offer(_to_rounds(task, _lay_out(task, problem, draft, members, join=join), members))
        for join in joins
    ]
    # By this search's own result: a policy must find the same alone as when `mixed` tries it.
    many = problem.sole and len(members) > 1024
    if many or min(times) <= 3 * bound * WORTH_MORE:
        return
    # A plan for lanes that meet after every round is one for these too, and no slower.
    most = min(problem.max_items, task.most_sequences)
    meeting = replace(problem.limits, lane_tokens=task.capacity, max_items=most)
    draft = search_rounds(Problem(problem.table, meeting), bound=bound)
    choice.offer(_to_rounds(task, draft.packs(), members))


def _level_problems(problem: Problem, draft: Draft) -> Iterator[Problem]:
    """The same items on lanes that are more even in tokens; none where one maximum counts.

    Where mixers and experts have maxima of their own, a round should be level in both. So a lane's
    tokens have a limit not far above their mean in the draft, and what is made level below it is
    the cost of mixers alone, or all of it.
    """
    if not problem.tokenwise or problem.sole:
        return
    tokens = int(problem.least_tokens.sum())
    mean = -(-tokens // (problem.lanes * len(draft.heights)))
    least = int(problem.table.tokens.min(axis=1).max())
    mixers = problem.table.without_tokens(problem.tokenwise)
    for most in sorted({min(problem.capacity, max(least, int(mean * s))) for s in TOKEN_SLACKS}):
        limits = replace(problem.limits, capacity=most, lane_tokens=most)
        yield Problem(mixers, limits, tokenwise=problem.tokenwise, is_apart=True)
        if most < problem.capacity:
            yield Problem(problem.table, limits, tokenwise=problem.tokenwise)


def _to_rounds(task: Task, packs: Iterable[Placed], members: Seq[tuple[int, ...]]) -> Rounds:
    ordered = sorted(packs, key=lambda p: (p.round, -p.cp_size, p.first_lane))
    rounds: list[list[Pack]] = [[] for _ in range(ordered[-1].round + 1)]
    for placed in ordered:
        sequences = tuple(i for item in placed.items for i in members[item])
        rounds[placed.round].append(make_pack(task, placed.first_lane, placed.cp_size, sequences))
    return tuple(Round(tuple(packs)) for packs in rounds)


def _lay_out(
    task: Task, problem: Problem, draft: Draft, members: Seq[tuple[int, ...]], *, join: bool
) -> list[Placed]:
    """Cuts one round of unbounded capacity into rounds, larger CP sizes first.

    Lanes of a nested group have spent the same before it, so they meet without waiting. With `join`
    a pack goes into its lanes' last round where there is room, which saves rounds but makes lanes
    joined that way end together.
    """
    used = [[0, 0] for _ in range(task.setting.lanes)]
    last = [-1] * task.setting.lanes
    packs: list[Placed] = []
    for placed in sorted(draft.packs(), key=lambda p: (-p.cp_size, p.first_lane)):
        lanes = range(placed.first_lane, placed.first_lane + placed.cp_size)
        level = problem.sizes.index(placed.cp_size)
        tokens = problem.table.tokens[:, level]
        for number, part in enumerate(_parts(task, placed.items, tokens, members)):
            need, count = int(tokens[part].sum()), sum(len(members[i]) for i in part)
            round_ = max(last[lane] for lane in lanes)
            fits = all(
                last[lane] < round_
                or (
                    used[lane][0] + need <= task.capacity
                    and used[lane][1] + count <= task.most_sequences
                )
                for lane in lanes
            )
            if not (join and number == 0 and round_ >= 0 and fits):
                round_ += 1
            for lane in lanes:
                before = used[lane] if last[lane] == round_ else [0, 0]
                used[lane], last[lane] = [before[0] + need, before[1] + count], round_
            packs.append(Placed(round_, placed.first_lane, placed.cp_size, part))
    return packs


def _parts(
    task: Task, items: list[int], tokens: np.ndarray, members: Seq[tuple[int, ...]]
) -> Iterator[list[int]]:
    """Items of one pack, cut where capacity or the cap on sequences asks for it."""
    part: list[int] = []
    need = count = 0
    for item in items:
        more, n = int(tokens[item]), len(members[item])
        if part and (need + more > task.capacity or count + n > task.most_sequences):
            yield part
            part, need, count = [], 0, 0
        part.append(item)
        need, count = need + more, count + n
    yield part


def _next_fit(task: Task, cp_size: int) -> Rounds:
    """Packs filled one after the other, in the order the sequences came."""
    tokens = task.table.tokens[:, task.table.sizes.index(cp_size)]
    members = [(i,) for i in range(len(tokens))]
    return _in_order(task, cp_size, _parts(task, list(range(len(tokens))), tokens, members))


def _in_order(task: Task, cp_size: int, packs: Iterable[list[int]]) -> Rounds:
    """Packs of one CP size laid side by side, round after round."""
    per_round = task.setting.lanes // cp_size
    rounds: list[list[Pack]] = []
    for number, sequences in enumerate(packs):
        if number % per_round == 0:
            rounds.append([])
        first_lane = number % per_round * cp_size
        rounds[-1].append(make_pack(task, first_lane, cp_size, tuple(sequences)))
    return tuple(Round(tuple(packs)) for packs in rounds)
