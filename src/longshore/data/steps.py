"""Optimizer steps: from a source to a rank's micro-batches, one step after another.

In: a source, the size of a batch, and a planner. Out: Steps, each with its plan and this rank's
micro-batches. Two ways to own the data give the same micro-batches:

- IndexedSteps: every rank knows all lengths, makes the same plan and reads only its own sequences;
- StreamedSteps: each lane draws from its own iterator, and sequences are exchanged.

A controller that has planned already needs neither: cut_shards and pack_step are enough. With 4
lanes and a batch of 10 sequences the lanes of StreamedSteps draw 3, 3, 2 and 2.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from longshore.batch import Counts, MicroBatch, TableMaker
from longshore.data.batches import ORDER, Batches, BatchSize, Place
from longshore.data.exchange import Parcels, cut_parcels, deliver, open_parcels
from longshore.data.fields import Field
from longshore.data.lane_broadcast import (
    LaneShape,
    broadcast_step,
    for_stage,
    zero_batches,
)
from longshore.data.lengths import StepLengths, gather_lengths, length_rows
from longshore.data.pack import pack_step
from longshore.data.shard import Shards, cut_shards, lane_cuts
from longshore.data.source import IndexedSource, TokenizedSample, source_digest
from longshore.distributed.agreement import agreed, same_on_all_ranks
from longshore.distributed.collectives import gather
from longshore.distributed.topology import Groups, Topology
from longshore.plan.check import check_step
from longshore.plan.cost import Ints
from longshore.plan.layout import Layout, StageInputs
from longshore.plan.types import Plan, Sequence

Planner = Callable[[Seq[Sequence]], Plan]
"""make_plan with all arguments but the sequences bound, or any other; its plans are checked."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One optimizer step for one rank."""

    plan: Plan
    """Of all lanes."""
    batches: list[MicroBatch]
    """This rank's, one for each round."""
    place: Place
    """Its position in the training run."""
    wait_seconds: float = 0.0
    """How long the consumer waited for it."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How a lane's sequences become micro-batches; the same on all ranks."""

    depths: int = 0
    """Of multi-token prediction."""
    buckets: tuple[int, ...] = ()
    """Token totals that a lane's micro-batch is rounded up to; without any, a multiple of align."""
    pad_id: int = 0
    """The token id at padding."""
    tables: tuple[TableMaker, ...] = ()
    """What makes the tables of each pack that the model needs, on the host: see
    model/host_tables.py."""
    layout: Layout | None = None
    """Of the pipeline, which says what each rank needs; None without a pipeline."""


DEFAULT_PACKING = Packing()
Finish = Callable[[Step], Step]


def unchanged(step: Step) -> Step:
    return step


class Steps(Protocol):
    """Makes steps from a place on, and checks whether a saved run can be resumed with them.

    finish: called by each rank for each step (to pin its memory, for example). Work that may fail
    on one rank runs inside `agreed`, so that no rank waits forever in the next collective.
    """

    def from_place(
        self, place: Place, stop: Callable[[], bool], finish: Finish = unchanged
    ) -> Iterator[Step]: ...
    def check_can_resume(self, state: dict[str, object]) -> None: ...
    def describe(self) -> dict[str, object]: ...
    def close(self) -> None: ...


def _inputs_by_rank(packing: Packing, pp: int) -> tuple[StageInputs, ...]:
    """What each pipeline rank needs of a micro-batch."""
    layout = packing.layout
    if layout is None and pp == 1:
        return (StageInputs(),)
    if layout is None or layout.pp != pp or layout.depths != packing.depths:
        has = "no layout" if layout is None else f"one of {layout.pp} ranks, {layout.depths} depths"
        raise ValueError(
            f"a pipeline of {pp} ranks, with {packing.depths} depths of multi-token prediction, "
            f"needs a layout for them; Packing has {has}"
        )
    return tuple(map(layout.inputs, range(pp)))


class _Rank:
    """This rank's part in making steps: its lane, its stage, and groups for background work."""

    def __init__(self, topology: Topology | None, packing: Packing) -> None:
        self.lane = topology.lane if topology else 0
        self.lanes = topology.lanes if topology else 1
        self.is_first_of_lane = topology.is_first_of_lane if topology else True
        self.stages = _inputs_by_rank(packing, topology.pp if topology else 1)
        self.stage = self.stages[topology.pp_rank if topology else 0]
        self.packing = packing
        self.groups: Groups | None = topology.host_groups() if topology else None

    def agreed(self) -> AbstractContextManager[None]:
        """A block that fails on all ranks if it fails on one."""
        return agreed(self.groups) if self.groups else nullcontext()

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; all ranks get the same answer at the same step."""
        if self.groups is None:
            return flag
        return bool(gather(torch.tensor([flag]), self.groups.world).any())

    def make_plan(self, planner: Planner, sequences: Seq[Sequence]) -> tuple[Plan, str]:
        """A checked plan, and a digest that must be the same on all ranks.

        The check is for users' own planners, which may leave a sequence out or use a lane that does
        not exist. The digest covers the packs too, because plan.digest is only what the planner
        claims; tuples of integers hash alike on all ranks.
        """
        plan = planner(sequences)
        check_step(plan, sequences, lanes=self.lanes)
        packs = [(at, p.first_lane, p.cp_size, *p.sequences) for at, p in plan.packs()]
        return plan, f"{plan.digest} {hash(tuple(packs))}"

    def check_same(self, digest: str) -> None:
        if self.groups:
            same_on_all_ranks(digest, self.groups)

    def shape(self, fields: tuple[Field, ...]) -> LaneShape:
        packing = self.packing
        return LaneShape(self.lane, packing.depths, fields, packing.buckets, packing.tables)

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
        )

    def close(self) -> None:
        if self.groups:
            self.groups.close()


class IndexedSteps:
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
    ) -> None:
        self.source = source
        self.planner = planner
        self.seed = seed
        self.batches = Batches(source.lengths, batch, seed=seed, shuffle=shuffle)
        self.digest = source_digest(source)
        self.rank = _Rank(topology, packing)

    def from_place(
        self, place: Place, stop: Callable[[], bool], finish: Finish = unchanged
    ) -> Iterator[Step]:
        order = self.batches.from_place(place)
        while not self.rank.any_rank(stop()):
            with self.rank.agreed():
                place, places = next(order)
                plan, digest = self.rank.make_plan(self.planner, self._sequences(places))
                step = finish(Step(plan, self._batches(plan, places), place))
            self.rank.check_same(digest)
            yield step

    def _sequences(self, places: Ints) -> list[Sequence]:
        lengths, labels = self.source.lengths[places], self.source.loss_tokens[places]
        rows = zip(places.tolist(), lengths.tolist(), labels.tolist(), strict=True)
        return [Sequence(*row) for row in rows]

    def _batches(self, plan: Plan, places: Ints) -> list[MicroBatch]:
        """This lane's micro-batches, from the sequences it has a part in."""
        depths = self.rank.packing.depths
        counts = self._counts(plan, places)
        if not self.rank.stage.any:
            shape = self.rank.shape(self.source.fields)
            return zero_batches(plan, shape, counts, self.rank.stage)
        cuts = lane_cuts(plan, self.rank.lane)
        wanted = dict.fromkeys(cut.sequence for cut in cuts)
        samples = {i: self.source[int(places[i])] for i in wanted}
        shards = cut_shards(plan, samples, cuts, depths=depths, fields=self.source.fields)
        batches = self.rank.pack(plan, shards, counts)
        return [for_stage(self.rank.stage, batch) for batch in batches]

    def _counts(self, plan: Plan, places: Ints) -> Counts:
        """Depth d has no targets among the first d + 1 tokens: nothing predicts them there."""
        depths = self.rank.packing.depths
        main = sum(sequence.loss_tokens for sequence in plan.sequences)
        early = np.zeros(depths, dtype=np.int64)
        for i in places.tolist() if depths else ():
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
        }

    def check_can_resume(self, state: dict[str, object]) -> None:
        for name, value in self.describe().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the run to resume had {name} {state.get(name)!r}, and now it is {value!r}; "
                    "the order of sequences would change: set it as it was, or start a new run"
                )

    def close(self) -> None:
        self.rank.close()


class StreamedSteps:
    """Steps from one iterator a lane, given to its first rank or, with `everywhere`, to all ranks.

    The steps end when no lane has a sequence left; lanes may run out at different times.
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
    ) -> None:
        self.rank = _Rank(topology, packing)
        if (samples is None) == (everywhere or self.rank.is_first_of_lane):
            who = "every rank" if everywhere else "only the first rank of each lane"
            raise ValueError(
                f"rank {topology.rank}: `samples` is {'None' if samples is None else 'given'}, but "
                f"with everywhere={everywhere} {who} takes an iterator"
            )
        self.samples = samples if samples is not None else iter(())
        self.planner = planner
        self.batch = batch
        self.fields = fields
        self.everywhere = everywhere

    def from_place(
        self, place: Place, stop: Callable[[], bool], finish: Finish = unchanged
    ) -> Iterator[Step]:
        if place != Place():
            raise ValueError("an iterator can only start at its first step; use an indexed source")
        groups = self.rank.groups
        assert groups is not None
        while not self.rank.any_rank(stop()):
            with self.rank.agreed():
                drawn = list(self._draw())
                rows = length_rows(drawn, self.rank.packing.depths)
            lengths = gather_lengths(rows, groups, room=self._room(), everywhere=self.everywhere)
            if not lengths.owners:
                return
            with self.rank.agreed():
                plan, digest = self.rank.make_plan(self.planner, lengths.sequences())
                parcels = self._parcels(plan, lengths, drawn)
            self.rank.check_same(digest)
            yield self._step(plan, lengths, parcels, place=place, finish=finish)
            place = place.following

    def _room(self) -> int:
        """How many sequences a lane usually draws at most."""
        return -(-self.batch.amount // self.rank.lanes) if self.batch.unit == "sequences" else 64

    def _draw(self) -> Iterator[TokenizedSample]:
        """This lane's part of a step: its share of the sequences, or of the tokens."""
        share, more = divmod(self.batch.amount, self.rank.lanes)
        wanted = share + (self.rank.lane < more)
        while wanted > 0:
            sample = next(self.samples, None)
            if sample is None:
                return
            wanted -= sample.length if self.batch.unit == "tokens" else 1
            yield sample

    def _parcels(
        self, plan: Plan, lengths: StepLengths, drawn: list[TokenizedSample]
    ) -> Parcels | None:
        """What this rank sends to other lanes; None where it takes no part in that."""
        rank, groups = self.rank, self.rank.groups
        assert groups is not None
        if not (rank.is_first_of_lane or (self.everywhere and rank.stage.any)):
            return None
        own = dict(zip(lengths.places_of(rank.lane), drawn, strict=True))
        return cut_parcels(
            plan,
            lengths.owners,
            own,
            groups.lanes,
            depths=rank.packing.depths,
            fields=self.fields,
        )

    def _step(
        self,
        plan: Plan,
        lengths: StepLengths,
        parcels: Parcels | None,
        *,
        place: Place,
        finish: Finish,
    ) -> Step:
        """The step of this rank, after the exchange of sequences."""
        rank, groups = self.rank, self.rank.groups
        assert groups is not None
        delivered = None if parcels is None else deliver(parcels, groups.lanes)
        is_broadcast = not self.everywhere and groups.tp.size() * groups.pp.size() > 1
        with rank.agreed():
            counts, shape = lengths.counts(), rank.shape(self.fields)
            batches = None
            if parcels is not None and delivered is not None:
                batches = rank.pack(plan, open_parcels(parcels, delivered), counts)
            if not is_broadcast:
                return finish(Step(plan, self._of_stage(plan, batches, shape, counts), place))
        received = broadcast_step(plan, batches, groups, rank.stages, shape=shape, counts=counts)
        with rank.agreed():
            return finish(Step(plan, received, place))

    def _of_stage(
        self, plan: Plan, batches: list[MicroBatch] | None, shape: LaneShape, counts: Counts
    ) -> list[MicroBatch]:
        """This rank's part of its lane's micro-batches, where all ranks of a lane have them."""
        if batches is None:
            return zero_batches(plan, shape, counts, self.rank.stage)
        return [for_stage(self.rank.stage, batch) for batch in batches]

    def describe(self) -> dict[str, object]:
        raise ValueError(
            "the position of an iterator cannot be saved, so this run cannot be resumed; "
            "use an indexed source, such as a prepared folder"
        )

    def check_can_resume(self, state: dict[str, object]) -> None:
        self.describe()

    def close(self) -> None:
        self.rank.close()
