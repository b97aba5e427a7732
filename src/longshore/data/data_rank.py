"""Data rank: what one rank knows and checks when it makes steps, however the data is owned.

In: the topology and how sequences are packed. Out: which tensors this rank's stages read, checked
plans, micro-batches from shards, and blocks of work that fail on all ranks if they fail on one.

With pp 4 and one stage a rank, ranks of the two middle stages read no tensors, and their
micro-batches follow from the plan alone.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

from longshore.batch import Counts, MicroBatch, TableMaker
from longshore.data.fields import Field
from longshore.data.pack import LaneShape, pack_step, zero_batches
from longshore.data.shard import Shards
from longshore.distributed.agreement import agreed, on_any_rank, same_on_all_ranks
from longshore.distributed.topology import Groups, Topology
from longshore.plan.check import check_step
from longshore.plan.layout import Layout, StageInputs
from longshore.plan.types import Plan, Sequence

Planner = Callable[[Seq[Sequence]], Plan]
"""make_plan with all arguments but the sequences bound, or any other; its plans are checked."""


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
    model/registry.py."""
    max_sequences: int = 0
    """Of CUDA graphs: to so many the boundaries of a whole pack are padded; 0: no graphs."""
    layout: Layout | None = None
    """Of the pipeline, which says what each rank needs; None without a pipeline."""


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


class DataRank:
    """A rank's lane, what its stages read, and process groups for background work."""

    def __init__(self, topology: Topology | None, packing: Packing) -> None:
        self.lane = topology.lane if topology else 0
        self.lanes = topology.lanes if topology else 1
        self.is_first_of_lane = topology.is_first_of_lane if topology else True
        self.pp = topology.pp if topology else 1
        self.pp_rank = topology.pp_rank if topology else 0
        self.packing = packing
        self.groups: Groups | None = topology.host_groups() if topology else None

    @cached_property
    def stages(self) -> tuple[StageInputs, ...]:
        """What each pipeline rank reads; raises if the layout does not fit."""
        return _inputs_by_rank(self.packing, self.pp)

    @property
    def inputs(self) -> StageInputs:
        """What this rank's stages read."""
        return self.stages[self.pp_rank]

    def describe(self) -> str:
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

    def check_settings(self, settings: str) -> None:
        """Raises on all ranks if these differ: the sizes of messages follow from them."""
        if self.groups:
            same_on_all_ranks(settings, self.groups, what="data settings")

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; all ranks get the same answer at the same step."""
        if self.groups is None:
            return flag
        return on_any_rank([flag], self.groups.world)[0]

    def make_plan(self, planner: Planner, sequences: Seq[Sequence]) -> tuple[Plan, str]:
        """A checked plan, and a digest that must be the same on all ranks.

        The check is for users' own planners, which may leave a sequence out or use a lane that does
        not exist. The digest covers all that shapes depend on, because plan.digest is only what the
        planner claims; tuples of integers hash alike on all ranks. And the cost profile, which a
        run may refine: ranks whose profiles differ would soon differ in plans.
        """
        plan = planner(sequences)
        check_step(plan, sequences, lanes=self.lanes)
        lengths = tuple(sequence.length for sequence in plan.sequences)
        packs = [
            (at, p.first_lane, p.cp_size, p.tokens_per_lane, *p.sequences) for at, p in plan.packs()
        ]
        shapes = hash((lengths, len(plan.rounds), plan.setting.buckets, *packs))
        setting = plan.setting
        return plan, f"{plan.digest} {setting.policy} {setting.align} {shapes} {setting.profile}"

    def check_same(self, digest: str) -> None:
        if self.groups:
            same_on_all_ranks(digest, self.groups)

    def without_data(
        self, plan: Plan, fields: tuple[Field, ...], counts: Counts
    ) -> list[MicroBatch]:
        """The micro-batches of a rank whose stages read no tokens, from the plan alone."""
        packing = self.packing
        shape = LaneShape(self.lane, packing.depths, fields, packing.buckets, packing.tables)
        return zero_batches(plan, shape, counts, self.inputs)

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
