"""The policies: each offers one or more ways to run a step, and the fastest is kept.

In: a Task. Out: rounds, offered to a Choice that times them. On 2 lanes of 8 tokens, lengths 6, 3
and 3 give under `static` at CP size 1 the packs (6) and (3, 3) side by side, and under `padded` two
rounds of one sequence each, all of them as long as 6. A new policy is a function and its Policy.

A user's own policy is a function that a recipe or the command line names as module:function:

    def one_a_round(task, choice):
        choice.offer_packs([(task.cp_sizes[-1], [i]) for i in range(len(task.lengths))])

on 2 lanes with the lengths 6 and 3 makes two rounds, each of one pack at CP size 2.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import index

import numpy as np

from longshore.plan.check import check_rounds
from longshore.plan.cost import CostTable
from longshore.plan.packing import (
    BlockItems,
    Draft,
    PackingLimits,
    Problem,
    search_rounds,
    search_step,
    work_bound,
)
from longshore.plan.pipeline import (
    arrange,
    line_up_quickly,
    plan_bound,
    quick_finish,
    search_pipeline,
)
from longshore.plan.simulate import (
    RoundColumns,
    columns_for,
    lane_costs,
    make_pack,
    step_time,
    walk_rounds,
)
from longshore.plan.types import POLICIES, Pack, PlanSetting, Policy, Round, register_policy
from longshore.user_code import FUNCTION_NAME, load_function

UNLIMITED = 1 << 30


def step_bound(setting: PlanSetting, table: CostTable, *, capacity: int) -> int:
    """The bound of every policy with these limits; capacity: after alignment."""
    limits = PackingLimits(
        lanes=setting.lanes,
        capacity=capacity,
        lane_tokens=capacity,
        max_items=UNLIMITED,
        sole=False,
    )
    problem = Problem(table, limits, alone=True)
    work = work_bound(problem, setting)
    if setting.pp == 1:
        return work * setting.shares.whole
    return plan_bound(problem, setting.shares, pp=setting.pp, least_work=work)


GOOD_PIPELINE = 1.1
"""A pipeline's plan of a step that is not small is good this close to its bound."""
SMALL_STEP = 64
"""Sequences."""
Rounds = tuple[Round, ...]


@dataclass(frozen=True)
class Task:
    """A step to be planned."""

    setting: PlanSetting
    """What the plan was asked for."""
    lengths: tuple[int, ...]
    """Tokens of each sequence, in the order they came; a sequence is named by its index here."""
    table: CostTable
    """Costs and tokens, a row for each sequence."""
    capacity: int
    """The most tokens a lane holds in a round, after alignment."""
    packs: tuple[tuple[int, ...], ...]
    """The caller's packs, for a policy that needs them."""
    pack_sizes: tuple[int, ...] = ()
    """The CP size of each of these packs, or 0: the policy chooses."""
    rounds: list[list[tuple[int, int, Iterable[int]]]] | None = None
    """The caller's rounds instead: (first lane, CP size, sequences) of each pack."""

    @property
    def lanes(self) -> int:
        return self.setting.lanes

    @property
    def cp_size(self) -> int:
        """The one CP size that a policy must use, or 0."""
        return self.setting.cp_size

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        """The legal CP sizes, rising."""
        return self.table.sizes

    @cached_property
    def by_length(self) -> list[int]:
        order: list[int] = np.argsort(-self.table.tokens[:, 0], kind="stable").tolist()
        return order

    @cached_property
    def columns(self) -> RoundColumns:
        """What rounds cost the stages of a pipeline."""
        return columns_for(self.setting, self.table)

    @cached_property
    def bound(self) -> int:
        """A time that no plan can beat, in 1/whole quanta."""
        return step_bound(self.setting, self.table, capacity=self.capacity)

    @cached_property
    def tokenwise(self) -> int:
        """Quanta of a token that have a maximum of their own; 0 where lanes meet after rounds."""
        setting, shares = self.setting, self.setting.shares
        if not setting.synced:
            return 0
        whole = sum(shares.forward_linear) + sum(shares.backward_linear)
        quanta = int(setting.profile.linear * self.table.scale)
        return quanta * sum(shares.tokenwise) // max(1, whole)

    def finish(self, heights: list[int]) -> int:
        """About when a pipeline is done with rounds of these heights, in 1/whole quanta."""
        setting = self.setting
        return quick_finish(heights, setting.shares, pp=setting.pp, vpp=setting.vpp)

    def tokens_at(self, cp_size: int) -> list[int]:
        """Tokens of every sequence on each lane at this CP size."""
        return list(self.table.tokens_at(cp_size))

    def costs_at(self, cp_size: int) -> list[int]:
        """What every sequence costs each lane at this CP size, in units of equal time."""
        return list(self.table.costs_at(cp_size))

    @property
    def most_sequences(self) -> int:
        """The most sequences of a lane in a round."""
        return self.setting.max_sequences or UNLIMITED

    def given_table(self) -> CostTable:
        """Costs and tokens of the caller's packs; a CP size that a pack may not have never fits."""
        table = self.table.joined(self.packs)
        asked, sizes = np.array(self.pack_sizes)[:, None], np.array(table.sizes)
        return table.only((asked == 0) | (asked == sizes))

    def sizes_that_fit(self) -> tuple[int, ...]:
        """The CP sizes at which every sequence fits, or the one asked for."""
        if self.cp_size:
            return (self.cp_size,)
        widest = self.table.tokens.max(axis=0)
        return tuple(k for k, n in zip(self.table.sizes, widest, strict=True) if n <= self.capacity)

    def least_time(self, cp_size: int) -> int:
        """Quanta that no plan with just this CP size can beat."""
        column = self.table.cost[:, self.table.sizes.index(cp_size)]
        work = int(column.sum()) // (self.setting.lanes // cp_size) + self.table.pack
        # A pipeline takes the longest sequence's round through all ranks.
        return max(work, self.setting.pp * (int(column.max()) + self.table.pack))


class Choice:
    """Where a policy offers rounds or packs; the fastest offer stays, and of equals the first."""

    def __init__(self, task: Task, *, may_split: bool) -> None:
        self.task = task
        self.may_split = may_split
        self.rounds: Rounds = ()
        self.time: int | None = None

    def offer(self, rounds: Rounds) -> int:
        """Keeps the rounds if they are the fastest; returns their time in 1/whole quanta."""
        setting, table = self.task.setting, self.task.table
        if setting.pp > 1:
            if self.is_small:
                rounds = self._arranged(rounds)
            else:
                columns = self.task.columns
                rounds = line_up_quickly(rounds, columns, pp=setting.pp, vpp=setting.vpp)
            time = walk_rounds(rounds, setting, self.task.columns).finish
        elif setting.synced:
            time = sum(self.task.columns.heights(rounds, pp=1))
        else:
            costs = lane_costs(rounds, table, setting.lanes)
            time = step_time(costs, rounds, table, setting.sync) * setting.shares.whole
        if self.time is None or time < self.time:
            self.rounds, self.time = rounds, time
        return time

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
            if first_lane + cp_size > self.task.lanes:
                rounds.append([])
                first_lane = 0
            rounds[-1].append((first_lane, cp_size, sequences))
            free = first_lane + cp_size
        return self.offer_rounds(rounds)

    def offer_rounds(self, rounds: Iterable[Iterable[tuple[int, int, Iterable[int]]]]) -> float:
        """Takes rounds of packs (first_lane, cp_size, sequences), all of which are checked.

        Returns the predicted seconds of the step.
        """
        task, checked = self.task, []
        with _only_whole_numbers("(first_lane, cp_size, sequences)"):
            for packs in rounds:
                joined = [self._checked_pack(*pack) for pack in packs]
                joined.sort(key=lambda pack: (-pack.cp_size, pack.first_lane))
                checked.append(Round(tuple(joined)))
        check_rounds(checked, setting=task.setting, lengths=task.lengths)
        time = self.offer(tuple(checked))
        return task.table.seconds(time) / task.setting.shares.whole

    def _checked_pack(self, first_lane: int, cp_size: int, sequences: Iterable[int]) -> Pack:
        numbers = tuple(index(number) for number in sequences)
        last = len(self.task.lengths) - 1
        for number in numbers:
            if not 0 <= number <= last:
                raise ValueError(
                    f"there is no sequence {number}; sequences are numbered 0 to {last}"
                )
        self._check_legal(index(cp_size))
        return make_pack(self.task.table, index(first_lane), index(cp_size), numbers)

    def _check_legal(self, cp_size: int) -> None:
        if cp_size not in self.task.cp_sizes:
            legal = ", ".join(map(str, self.task.cp_sizes))
            raise ValueError(f"CP size {cp_size} is not legal; legal are {legal}")

    @property
    def is_small(self) -> bool:
        """Whether everything offered to a pipeline is arranged as well as what is kept."""
        return len(self.task.lengths) <= SMALL_STEP

    def settle(self) -> Rounds:
        """The fastest rounds; for a pipeline in the best order and cut where that helps."""
        if self.task.setting.pp > 1 and not self.is_small:
            self.rounds = self._arranged(self.rounds)
        return self.rounds

    def _arranged(self, rounds: Rounds) -> Rounds:
        pp, vpp = self.task.setting.pp, self.task.setting.vpp
        return arrange(rounds, self.task.columns, pp=pp, vpp=vpp, may_split=self.may_split)

    def is_good(self) -> bool:
        """Whether a pipeline's plan is so near to its bound that other policies are not tried."""
        if self.is_small or self.time is None or self.task.setting.pp == 1:
            return False
        return self.time <= self.task.bound * GOOD_PIPELINE

    def could_gain(self, least: int) -> bool:
        """Whether a plan of at least this many quanta could be faster than the best."""
        return self.time is None or least * self.task.setting.shares.whole < self.time


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
            function(task, choice)
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
        choice.offer_rounds(task.rounds)
        return
    table = task.given_table()
    order = np.argsort(-table.cost[:, 0], kind="stable")
    members = [task.packs[i] for i in order]
    limits = _limits(task, lanes=task.setting.lanes, max_items=1, sole=True)
    table = table.part(order, table.sizes)
    _run(choice, Problem(table, limits, tokenwise=task.tokenwise), members)


for _policy in (
    Policy("mixed", mixed, about="a lane may hold packs of different CP sizes in one round"),
    Policy(
        "dynamic",
        dynamic,
        about="a CP size for each pack, at most one pack per lane and round",
        one_pack_per_lane=True,
    ),
    Policy(
        "balanced",
        balanced,
        about="one CP size for all, packs balanced by cost",
        one_cp_size=True,
        one_pack_per_lane=True,
    ),
    Policy(
        "static",
        static,
        about="one CP size for all, packs filled in the order of arrival",
        one_cp_size=True,
        fixed_packs=True,
        one_pack_per_lane=True,
    ),
    Policy(
        "padded",
        padded,
        about="one sequence per lane and round, padded to the longest",
        one_cp_size=True,
        fixed_packs=True,
        pads_to_longest=True,
        one_pack_per_lane=True,
    ),
    Policy(
        "given",
        given,
        about="your own packs, assigned to lanes and rounds; or your own rounds",
        fixed_packs=True,
        needs_packs=True,
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
                choice.offer(_to_rounds(task, draft.blocks(), members))
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
    choice.offer(_to_rounds(task, draft.blocks(), members))


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


def _to_rounds(task: Task, blocks: Iterable[BlockItems], members: Seq[tuple[int, ...]]) -> Rounds:
    ordered = sorted(blocks, key=lambda b: (b.round, -b.cp_size, b.first_lane))
    rounds: list[list[Pack]] = [[] for _ in range(ordered[-1].round + 1)]
    for number, first_lane, cp_size, items in ordered:
        sequences = tuple(i for item in items for i in members[item])
        rounds[number].append(make_pack(task.table, first_lane, cp_size, sequences))
    return tuple(Round(tuple(packs)) for packs in rounds)


def _lay_out(
    task: Task, problem: Problem, draft: Draft, members: Seq[tuple[int, ...]], *, join: bool
) -> list[BlockItems]:
    """Cuts one round of unbounded capacity into rounds, larger CP sizes first.

    Lanes of a nested group have spent the same before it, so they meet without waiting. With `join`
    a pack goes into its lanes' last round where it fits, which saves rounds but makes lanes joined
    that way end together.
    """
    used = [[0, 0] for _ in range(task.setting.lanes)]
    last = [-1] * task.setting.lanes
    blocks: list[BlockItems] = []
    for block in sorted(draft.blocks(), key=lambda b: (-b.cp_size, b.first_lane)):
        lanes = range(block.first_lane, block.first_lane + block.cp_size)
        tokens = problem.table.tokens[:, problem.sizes.index(block.cp_size)]
        for number, part in enumerate(_parts(task, block.items, tokens, members)):
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
            blocks.append(block._replace(round=round_, items=part))
    return blocks


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
        rounds[-1].append(make_pack(task.table, first_lane, cp_size, tuple(sequences)))
    return tuple(Round(tuple(packs)) for packs in rounds)
