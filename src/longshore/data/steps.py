"""Optimizer steps: from a source to a rank's micro-batches, one step after another.

In: a source, the size of a batch, and a planner. Out: Steps, each with its plan and this rank's
micro-batches. Two ways to own the data give the same micro-batches:

- IndexedSteps: every rank knows all lengths, makes the same plan and reads only its own sequences;
- StreamedSteps: each lane draws from its own iterator, lengths are gathered (with what divides the
  loss terms), and sequences are exchanged. With 4 lanes and a batch of 10 sequences the lanes draw
  3, 3, 2 and 2. Iterators of a TextStream (stream.py) save their positions, so that a run resumes.

A controller that has planned already needs neither: `pack_lane` is enough. A Loader makes steps
ahead, in one background thread whose collectives have process groups of their own:

    loader = Loader(IndexedSteps(source, batch=BatchSize("sequences", 256), ...), prefetch=2)
    for step in loader: ...          # step.batches, step.plan, step.wait_seconds
    state = loader.state_dict()      # {..., "epoch": 0, "step_in_epoch": 7, "step": 7}
"""

import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from longshore.batch import Counts, MicroBatch, TableMaker
from longshore.data.exchange import (
    ShardExchange,
    ShardRoutes,
    exchange_shards,
    make_shard_exchange,
    read_shards,
)
from longshore.data.pack import (
    Shards,
    context_batches,
    count_targets,
    cut_shards,
    lane_cuts,
    pack_step,
)
from longshore.data.source import (
    ORDER,
    Batches,
    BatchSize,
    Field,
    IndexedSource,
    Place,
    TokenizedSample,
    source_digest,
)
from longshore.data.stream import LaneStream, TextStream
from longshore.distributed.collectives import (
    agreed,
    broadcast_over_lane,
    gather_rows,
    on_any_rank,
    same_on_all_ranks,
)
from longshore.distributed.topology import Groups, Topology
from longshore.plan.check import check_step
from longshore.plan.cost import Ints
from longshore.plan.layout import NO_INPUTS, Layout, StageInputs
from longshore.plan.types import Plan, Sequence

Planner = Callable[[Seq[Sequence]], Plan]
"""make_plan with all arguments but the sequences bound, or any other; its plans are checked."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a lane's sequences become micro-batches; the same on all ranks."""

    depths: int = 0
    """How many modules of multi-token prediction the model has."""
    buckets: tuple[int, ...] = ()
    """Token totals that a lane's micro-batch is rounded up to; without any, a multiple of align."""
    pad_id: int = 0
    """The token id at padding."""
    tables: tuple[TableMaker, ...] = ()
    """Make the tables of each pack that the model needs, on the host (model/registry.py)."""
    max_sequences: int = 0
    """What CUDA graphs pad the boundaries of a pack to; 0 without graphs."""
    layout: Layout | None = None
    """The pipeline's layout, which says what each rank reads; None without a pipeline."""


FIRST_LABELS = 2
"""The first column with a count of labels, after length and checksum."""


@dataclass(frozen=True, slots=True, eq=False)
class StepLengths:
    """What all ranks know of a step's sequences, which are numbered lane after lane.

    With sequences of 5 and 7 tokens on lane 0 and one of 9 on lane 1, their indices in the plan are
    0, 1, 2, lengths 5 7 9, owners 0 0 1.
    """

    owners: tuple[int, ...]
    """The lane of each sequence."""
    rows: Ints
    """(sequences, 3 + depths): length, checksum, labels in the main loss and at each depth."""

    @classmethod
    def of(cls, by_lane: Seq[Tensor]) -> "StepLengths":
        """From the rows of each lane."""
        owners = tuple(lane for lane, rows in enumerate(by_lane) for _ in range(len(rows)))
        return cls(owners, torch.cat(list(by_lane)).numpy())

    def sequences(self) -> list[Sequence]:
        """What the planner takes; a sequence's id is its index."""
        columns = self.rows[:, [0, FIRST_LABELS]].tolist()
        return [Sequence(index, length, labels) for index, (length, labels) in enumerate(columns)]

    def counts(self) -> Counts:
        return Counts.of(self.rows[:, FIRST_LABELS:].sum(axis=0).tolist(), self.rows[:, 0].tolist())

    def indices_of(self, lane: int) -> range:
        """The indices of a lane's own sequences."""
        first = self.owners.index(lane) if lane in self.owners else 0
        return range(first, first + self.owners.count(lane))


def length_rows(samples: Seq[TokenizedSample], depths: int = 0) -> Tensor:
    """A row for each sequence, as it is gathered; a broken sequence raises here."""
    rows = []
    for sample in samples:
        checksum = 0
        for array in (sample.tokens, sample.loss_mask, *sample.fields.values()):
            checksum = zlib.crc32(array.tobytes(), checksum)
        rows.append([sample.length, checksum, *count_targets(sample.loss_mask, depths)])
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, FIRST_LABELS + 1 + depths)


def gather_rows_of_lanes(
    mine: Tensor, groups: Groups, *, usual: int, everywhere: bool
) -> list[Tensor]:
    """Each lane's rows of lengths on every rank. All ranks call it together.

    everywhere: each rank drew the sequences of its lane itself, and an error names ranks that drew
    different ones; otherwise only the first rank of a lane did, and the others pass no rows.
    usual: how many rows a lane has at most; if one has more, it takes one more collective.
    """
    is_source = everywhere or (groups.tp.rank() == 0 and groups.pp.rank() == 0)
    by_lane = gather_rows(mine, groups.lanes, expected=usual) if is_source else []
    if not everywhere:
        return _broadcast_in_lane(by_lane, groups, columns=mine.shape[1])
    with agreed(groups):
        text = str([rows.tolist() for rows in by_lane])
    same_on_all_ranks(text, groups, what="data of a lane")
    return by_lane


def _broadcast_in_lane(by_lane: list[Tensor], groups: Groups, *, columns: int) -> list[Tensor]:
    """What the first rank of the lane gathered, on all ranks of the lane."""
    if groups.tp.size() == groups.pp.size() == 1:
        return by_lane
    with agreed(groups):
        numbers = torch.tensor([len(rows) for rows in by_lane] or [0] * groups.lanes.size())
    broadcast_over_lane(numbers, groups)
    with agreed(groups):
        rows = torch.empty(int(numbers.sum()), columns, dtype=torch.int64)
        rows = torch.cat(by_lane) if by_lane else rows
    broadcast_over_lane(rows, groups)
    with agreed(groups):
        return list(torch.split(rows, numbers.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One optimizer step for one rank."""

    plan: Plan
    """The plan of all lanes."""
    batches: list[MicroBatch]
    """This rank's micro-batches, one for each round."""
    place: Place
    """The step's position in the training run."""
    wait_seconds: float = 0.0
    """How long the consumer waited for it."""
    after: Mapping[str, object] = field(default_factory=dict)
    """What the loader saves besides the place, to resume after this step."""


POSITIONS = "positions"
DEFAULT_PACKING = Packing()
Finish = Callable[[Step], Step]
BeforePlan = Callable[[int, Groups | None], None]
"""Called with the number of the step that is planned next, from 1, by all ranks together; it may
communicate over the groups, which are those of the thread that plans."""


def unchanged(step: Step) -> Step:
    return step


class Steps:
    """Makes steps from a place on, and checks whether a saved run can be resumed with them.

    It has the rank's lane, what its stages read, and process groups for background work. Work that
    may fail on one rank runs inside `agreed`, so that no rank waits forever in the next collective.
    """

    def __init__(
        self,
        topology: Topology | None,
        packing: Packing,
        *,
        planner: Planner,
        before_plan: BeforePlan | None,
    ) -> None:
        self.lane = topology.lane if topology else 0
        self.lanes = topology.lanes if topology else 1
        self.is_first_of_lane = topology.is_first_of_lane if topology else True
        self.pp = topology.pp if topology else 1
        self.pp_rank = topology.pp_rank if topology else 0
        self.packing = packing
        self.planner = planner
        self.before_plan = before_plan
        self.groups: Groups | None = topology.host_groups() if topology else None

    def from_place(
        self, place: Place, stop: Callable[[], bool], finish: Finish = unchanged
    ) -> Iterator[Step]:
        """The steps from a place on, until `stop` is true on a rank.

        finish: called by each rank for each step (to pin its memory, for example).
        """
        raise NotImplementedError

    def describe(self) -> dict[str, object]:
        """All that decides the order of sequences, for a checkpoint."""
        raise NotImplementedError

    def check_can_resume(self, state: dict[str, object]) -> None:
        """Refuses a saved run whose sequences would come in another order."""
        for name, value in self.describe().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the run to resume had {name} {state.get(name)!r}, and now it is {value!r}; "
                    "the order of sequences would change: set it as it was, or start a new run"
                )

    @cached_property
    def stages(self) -> tuple[StageInputs, ...]:
        """What each pipeline rank reads; raises if the layout does not fit."""
        layout, depths = self.packing.layout, self.packing.depths
        if layout is None and self.pp == 1:
            return (StageInputs(),)
        if layout is None or layout.pp != self.pp or layout.depths != depths:
            has = f"one of {layout.pp} ranks, {layout.depths} depths" if layout else "no layout"
            raise ValueError(
                f"a pipeline of {self.pp} ranks, with {depths} depths of multi-token prediction, "
                f"needs a layout for them; Packing has {has}"
            )
        return tuple(map(layout.inputs, range(self.pp)))

    @property
    def inputs(self) -> StageInputs:
        """What this rank's stages read."""
        return self.stages[self.pp_rank]

    @property
    def shared_settings(self) -> str:
        """What has to be the same on all ranks; raises if the layout does not fit."""
        packing = self.packing
        return f"{self.stages} {packing.layout} {packing.depths} {packing.buckets}"

    def agreed(self) -> AbstractContextManager[None]:
        """A block that fails on all ranks if it fails on one."""
        return agreed(self.groups) if self.groups else nullcontext()

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """For work before the first step."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def check_same(self, digest: str, what: str = "plan") -> None:
        """Raises on all ranks if the digest differs on one."""
        if self.groups:
            same_on_all_ranks(digest, self.groups, what=what)

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; all ranks get the same answer at the same step."""
        if self.groups is None:
            return flag
        return on_any_rank([flag], self.groups.world)[0]

    def make_plan(self, sequences: Seq[Sequence]) -> tuple[Plan, str]:
        """A checked plan, and a digest that must be the same on all ranks.

        The check is for users' own planners, which may leave a sequence out or use a lane that does
        not exist. The digest covers all that shapes depend on, because plan.digest is only what the
        planner claims (tuples of integers hash alike on all ranks), and the cost profile, which a
        run may refine: ranks whose profiles differ would soon differ in plans.
        """
        plan = self.planner(sequences)
        check_step(plan, sequences, lanes=self.lanes)
        lengths = tuple(sequence.length for sequence in plan.sequences)
        packs = [
            (at, p.first_lane, p.cp_size, p.tokens_per_lane, *p.sequences) for at, p in plan.packs()
        ]
        shapes = hash((lengths, len(plan.rounds), plan.setting.buckets, *packs))
        setting = plan.setting
        return plan, f"{plan.digest} {setting.policy} {setting.align} {shapes} {setting.profile}"

    def without_data(self, plan: Plan, counts: Counts) -> list[MicroBatch]:
        """The micro-batches of a rank whose stages read no tokens, from the plan alone."""
        packing = self.packing
        return context_batches(
            plan, self.lane, counts=counts, buckets=packing.buckets, tables=packing.tables
        )

    def pack(self, plan: Plan, shards: Shards, counts: Counts) -> list[MicroBatch]:
        packing = self.packing
        return pack_step(
            plan,
            self.lane,
            shards,
            counts=counts,
            buckets=packing.buckets,
            pad_id=packing.pad_id,
            tables=packing.tables,
            max_sequences=packing.max_sequences,
        )

    def close(self) -> None:
        if self.groups:
            self.groups.close()


class IndexedSteps(Steps):
    """Steps from a source whose lengths every rank knows: no sequence is exchanged."""

    def __init__(
        self,
        source: IndexedSource,
        *,
        planner: Planner,
        batch: BatchSize,
        seed: int,
        shuffle: bool = True,
        topology: Topology | None = None,
        packing: Packing = DEFAULT_PACKING,
        before_plan: BeforePlan | None = None,
        groups: Ints | None = None,
    ) -> None:
        """groups: a number for each sequence, the same for those that share a step (Batches)."""
        self.source = source
        self.seed = seed
        super().__init__(topology, packing, planner=planner, before_plan=before_plan)
        with self.closed_on_error():
            with self.agreed():
                self.batches = Batches(
                    source.lengths, batch, seed=seed, shuffle=shuffle, groups=groups
                )
                self.digest = source_digest(source)
                settings = f"{self.shared_settings} {self.describe()} {source.fields}"
            self.check_same(settings, "data settings")

    def from_place(
        self, place: Place, stop: Callable[[], bool], finish: Finish = unchanged
    ) -> Iterator[Step]:
        order, number = self.batches.from_place(place), place.step
        while not self.any_rank(stop()):
            number += 1
            if self.before_plan is not None:
                self.before_plan(number, self.groups)
            with self.agreed():
                place, indices = next(order)
                plan, digest = self.make_plan(self._sequences(indices))
                step = finish(Step(plan, self._batches(plan, indices), place))
            self.check_same(digest)
            yield step

    def _sequences(self, indices: Ints) -> list[Sequence]:
        lengths, labels = self.source.lengths[indices], self.source.loss_tokens[indices]
        rows = zip(indices.tolist(), lengths.tolist(), labels.tolist(), strict=True)
        return [Sequence(*row) for row in rows]

    def _batches(self, plan: Plan, indices: Ints) -> list[MicroBatch]:
        """This rank's micro-batches, from the sequences its lane has a part in."""
        counts, inputs = self._counts(plan, indices), self.inputs
        if inputs == NO_INPUTS:
            return self.without_data(plan, counts)
        cuts = lane_cuts(plan, self.lane)
        wanted = dict.fromkeys(cut.sequence for cut in cuts)
        samples = {i: self.source[int(indices[i])] for i in wanted}
        depths, fields = self.packing.depths, self.source.fields
        shards = cut_shards(plan, samples, cuts, depths=depths, fields=fields, inputs=inputs)
        return self.pack(plan, shards, counts)

    def _counts(self, plan: Plan, indices: Ints) -> Counts:
        """Depth d has no targets among the first d + 1 tokens: nothing predicts them there."""
        depths = self.packing.depths
        main = sum(sequence.loss_tokens for sequence in plan.sequences)
        early = np.zeros(depths, dtype=np.int64)
        for i in indices.tolist() if depths else ():
            head = self.source.mask_head(i, depths + 1)[1:]
            early += np.cumsum(np.pad(head, (0, depths - len(head))))
        lengths = [sequence.length for sequence in plan.sequences]
        return Counts.of([main, *(main - early).tolist()], lengths)

    def describe(self) -> dict[str, object]:
        size = self.batches.size
        return {
            "sequences": len(self.source.lengths),
            "data": self.digest,
            "batch": f"{size.amount} {size.unit}",
            "seed": self.seed,
            "shuffle": self.batches.shuffle,
            **({"order": ORDER} if self.batches.shuffle else {}),
            **({"grouped": True} if self.batches.groups is not None else {}),
        }


class StreamedSteps(Steps):
    """Steps from one iterator a lane, given to its first rank or, with `everywhere`, to all ranks.

    The steps end when no lane has a sequence left; lanes may run out at different times.
    stream: where the iterators come from, on all ranks; their positions are saved with the run.
    """

    def __init__(
        self,
        samples: Iterator[TokenizedSample] | None,
        *,
        planner: Planner,
        batch: BatchSize,
        topology: Topology,
        fields: tuple[Field, ...] = (),
        everywhere: bool = False,
        packing: Packing = DEFAULT_PACKING,
        before_plan: BeforePlan | None = None,
        stream: TextStream | None = None,
    ) -> None:
        super().__init__(topology, packing, planner=planner, before_plan=before_plan)
        self.stream = stream
        self._start: list[list[int]] = []
        with self.closed_on_error():
            with self.agreed():
                if (samples is None) == (everywhere or self.is_first_of_lane):
                    who = "every rank" if everywhere else "only the first rank of each lane"
                    raise ValueError(
                        f"rank {topology.rank}: `samples` is "
                        f"{'None' if samples is None else 'given'}, but with "
                        f"everywhere={everywhere} {who} takes an iterator"
                    )
                digest = stream.digest if stream is not None else ""
                settings = f"{self.shared_settings} {batch} {fields} {everywhere} {digest}"
            self.check_same(settings, "data settings")
        self.samples = samples if samples is not None else iter(())
        self.batch = batch
        self.fields = fields
        self.everywhere = everywhere

    def from_place(
        self, place: Place, stop: Callable[[], bool], finish: Finish = unchanged
    ) -> Iterator[Step]:
        groups = self.groups
        assert groups is not None
        with self.agreed():
            self._go_to(place)
        while not self.any_rank(stop()):
            if self.before_plan is not None:
                self.before_plan(place.step + 1, groups)
            with self.agreed():
                by_count = self.batch.unit == "sequences"
                usual = -(-self.batch.amount // self.lanes) if by_count else 64
                drawn = list(self._draw())
                rows, mine = length_rows(drawn, self.packing.depths), self._position()
            by_lane = gather_rows_of_lanes(rows, groups, usual=usual, everywhere=self.everywhere)
            positions = []
            if self.stream is not None:
                positions = gather_rows_of_lanes(mine, groups, usual=1, everywhere=self.everywhere)
            with self.agreed():
                lengths = StepLengths.of(by_lane)
                if not lengths.owners:
                    return  # on all ranks: no lane drew a sequence
                plan, digest = self.make_plan(lengths.sequences())
                exchange = self._shard_exchange(plan, lengths, drawn)
            self.check_same(digest)
            received = None if exchange is None else exchange_shards(exchange, groups)
            with self.agreed():
                if exchange is None or received is None:
                    batches = self.without_data(plan, lengths.counts())
                else:
                    shards = read_shards(exchange.expected, received)
                    batches = self.pack(plan, shards, lengths.counts())
                by_row = [row for lane_rows in positions for row in lane_rows.tolist()]
                after = {POSITIONS: by_row} if positions else {}
                step = finish(Step(plan, batches, place, after=after))
                place = place.following
            yield step

    def _go_to(self, place: Place) -> None:
        """Moves this lane's iterator from its start to where the run resumes."""
        if place == Place():
            return
        if not self._start:
            raise ValueError("an iterator can only start at its first step; use an indexed source")
        if isinstance(self.samples, LaneStream):
            self.samples.skip_to(self._start[self.lane])

    def _position(self) -> Tensor:
        """A row with the numbers of this lane's position, on the ranks that draw."""
        numbers = self.stream.numbers if self.stream is not None else 0
        if not isinstance(self.samples, LaneStream):
            return torch.empty(0, numbers, dtype=torch.int64)
        return torch.tensor([self.samples.position], dtype=torch.int64)

    def _draw(self) -> Iterator[TokenizedSample]:
        """This lane's part of a step: its share of the sequences, or of the tokens."""
        share, more = divmod(self.batch.amount, self.lanes)
        wanted = share + (self.lane < more)
        while wanted > 0:
            sample = next(self.samples, None)
            if sample is None:
                return
            wanted -= sample.length if self.batch.unit == "tokens" else 1
            yield sample

    def _shard_exchange(
        self, plan: Plan, lengths: StepLengths, drawn: list[TokenizedSample]
    ) -> ShardExchange | None:
        """What this rank sends and receives to get its shards; None where it needs none."""
        assert self.groups is not None
        if self.inputs == NO_INPUTS:
            return None
        depths = self.packing.depths
        routes = ShardRoutes(plan, lengths.owners, self.lane, depths=depths, fields=self.fields)
        indices = lengths.indices_of(self.lane) if drawn else ()
        own = dict(zip(indices, drawn, strict=True))
        everywhere = self.everywhere
        return make_shard_exchange(routes, own, self.groups, self.stages, everywhere=everywhere)

    def describe(self) -> dict[str, object]:
        if self.stream is None:
            raise ValueError(
                "the position of an iterator cannot be saved, so this run cannot be resumed; "
                "use an indexed source, such as a prepared folder"
            )
        return {
            "sequences": "an unknown number of",
            "data": self.stream.digest,
            "batch": f"{self.batch.amount} {self.batch.unit}",
            "lanes": self.lanes,
        }

    def check_can_resume(self, state: dict[str, object]) -> None:
        super().check_can_resume(state)
        positions = state.get(POSITIONS)
        if state.get("step") and not isinstance(positions, list):
            raise ValueError("the run to resume has no position of a stream; start a new run")
        self._start = positions if isinstance(positions, list) else []


class Loader:
    """Steps, made ahead by a background thread.

    pin: put the micro-batches into page-locked memory, so that copies to a GPU are asynchronous.
    The state counts consumed steps, not prefetched ones. End it with `close()` or use it in a
    `with` block; all ranks do so together.
    """

    def __init__(self, steps: Steps, *, prefetch: int = 2, pin: bool = False) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch is {prefetch}; the thread makes at least 1 step ahead")
        self.steps = steps
        self.prefetch = prefetch
        self.pin = pin
        self._next = Place()
        self._after: Mapping[str, object] = {}
        self._ready: queue.Queue[Step | BaseException | None] = queue.Queue(prefetch)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="longshore-loader", daemon=True)
            self._thread.start()
        started = time.perf_counter()
        item = self._ready.get()
        waited = time.perf_counter() - started
        if isinstance(item, Step):
            self._next, self._after = item.place.following, item.after
            return replace(item, wait_seconds=waited)
        self._ready.put(item)  # the next call gets the same answer
        if item is None:
            raise StopIteration
        raise item

    def _run(self) -> None:
        try:
            finish = _pinned if self.pin else unchanged
            for step in self.steps.from_place(self._next, self._stop.is_set, finish):
                self._put(step)
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Step | BaseException | None) -> None:
        """Queues an item when the queue is not full, or drops it once the loader is being closed.

        The thread continues after a drop until all ranks stop at the same step: a rank that stopped
        alone would leave the others waiting in a collective.
        """
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def state_dict(self) -> dict[str, object]:
        """The place of the next step, and all that decides the order; plain numbers and text."""
        return {**self.steps.describe(), **self._after, **asdict(self._next)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Resumes from a saved state; but for streams, also one of another number of lanes."""
        if self._thread is not None:
            raise RuntimeError("the loader has begun; load its state before the first step")
        self.steps.check_can_resume(state)
        self._after = {name: state[name] for name in (POSITIONS,) if name in state}
        self._next = Place(*(int(str(state[name])) for name in ("epoch", "step_in_epoch", "step")))

    def close(self) -> None:
        """Ends the thread and destroys its process groups."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.steps.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pinned(step: Step) -> Step:
    return replace(step, batches=[batch.pin_memory() for batch in step.batches])
