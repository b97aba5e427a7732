"""The data path on several ranks: regimes, stages, resuming, and what happens when one fails."""

import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from tests.data.stage_batch import only
from tests.ranks.exchanged import count
from tests.ranks.harness import RankError, run_ranks

from longshore.batch import Counts
from longshore.data.exchange import send_back
from longshore.data.pack import count_targets, cut_shards, lane_cuts, merge, pack_step, unpack
from longshore.data.source import BatchSize, Field, Place, TokenizedSample
from longshore.data.steps import (
    IndexedSteps,
    Loader,
    Packing,
    StepLengths,
    StreamedSteps,
    gather_rows_of_lanes,
    length_rows,
)
from longshore.distributed.topology import make_topology
from longshore.plan import make_plan
from longshore.plan.layout import parse_layout

FIELDS = (
    Field("advantage", "token", "float32"),
    Field("old_logp", "target", "float64"),
    Field("sample", "sequence", "int64"),
)
DEPTHS = 2
CAPACITY = 64


@dataclass
class RandomSource:
    """Short sequences and some that need several lanes, from a seed."""

    count: int
    longest: int
    fields = FIELDS

    def __post_init__(self):
        draw = np.random.default_rng(5)
        self.lengths = np.where(
            draw.random(self.count) < 0.2,
            draw.integers(1, self.longest + 1, self.count),
            draw.integers(1, 12, self.count),
        )
        self.loss_tokens = np.array([self[i].loss_tokens for i in range(self.count)])

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = np.random.default_rng([7, index])
        n = int(self.lengths[index])
        return TokenizedSample(
            index,
            draw.integers(1, 1000, n).astype(np.int32),
            draw.random(n) < 0.6,
            {
                "advantage": draw.random(n).astype(np.float32),
                "old_logp": draw.random(n),
                "sample": np.array(index),
            },
        )

    def mask_head(self, index, count):
        return self[index].loss_mask[:count]


def planner(lanes, policy="mixed", **options):
    return partial(make_plan, lanes=lanes, capacity=CAPACITY, policy=policy, **options)


PACKING = Packing(depths=DEPTHS, buckets=(32, 64), pad_id=3)
LAYOUTS = {1: "EttmmL", 2: "Et|tmmL", 3: "E|tt|mmL"}


def packing(pp):
    layout = parse_layout(LAYOUTS[pp], pp=pp, layers=2, depths=DEPTHS)
    return replace(PACKING, layout=layout)


def take(steps, number):
    with Loader(steps, prefetch=2) as loader:
        return [next(loader) for _ in range(number)]


def contents(step):
    return [batch.to_tensors() for batch in step.batches]


def assert_same(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        for path in mine:
            assert torch.equal(mine[path], theirs[path]), path


def indexed(topology, source, policy="mixed"):
    return IndexedSteps(
        source,
        planner=planner(topology.lanes, policy),
        batch=BatchSize("sequences", 24),
        seed=1,
        topology=topology,
        packing=packing(topology.pp),
    )


def lane_stream(source, lanes, lane, steps, batch=24):
    """The sequences that IndexedSteps takes, in blocks for the lanes of StreamedSteps."""
    order = IndexedSteps(
        source, planner=None, batch=BatchSize("sequences", batch), seed=1
    ).batches.from_place(Place())
    for _ in range(steps):
        _, places = next(order)
        sizes = [batch // lanes + (i < batch % lanes) for i in range(lanes)]
        first = sum(sizes[:lane])
        for place in places[first : first + sizes[lane]]:
            yield source[int(place)]


def regimes_agree(lanes, tp, pp, policy):
    topology = make_topology(lanes=lanes, tp=tp, pp=pp, device="cpu")
    source = RandomSource(72, longest=lanes * CAPACITY // 2)
    reference = take(indexed(topology, source, policy), 3)

    for everywhere in (False, True):
        draws = everywhere or topology.is_first_of_lane
        streamed = StreamedSteps(
            lane_stream(source, lanes, topology.lane, 3) if draws else None,
            planner=planner(lanes, policy),
            batch=BatchSize("sequences", 24),
            topology=topology,
            fields=FIELDS,
            everywhere=everywhere,
            packing=packing(pp),
        )
        for mine, theirs in zip(take(streamed, 3), reference, strict=True):
            assert mine.plan.digest == theirs.plan.digest
            assert_same(contents(mine), contents(theirs))
    for step in reference:
        assert_given_is_the_same(step, source, topology)
    topology.groups.close()


def assert_given_is_the_same(step, source, topology):
    """A controller that planned needs cut_shards and pack_step only."""
    plan = step.plan
    samples = {i: source[sequence.id] for i, sequence in enumerate(plan.sequences)}
    each = [count_targets(s.loss_mask, DEPTHS) for s in samples.values()]
    main, *mtp = np.sum(each, axis=0).tolist()
    ahead = [sum(len(s.tokens[d:]) for s in samples.values()) for d in range(DEPTHS + 1)]
    counts = Counts(main, tuple(mtp), ahead[0], len(samples), tuple(ahead[1:]))
    cuts = lane_cuts(plan, topology.lane)
    shards = cut_shards(plan, samples, cuts, depths=DEPTHS, fields=FIELDS)
    whole = pack_step(plan, topology.lane, shards, counts=counts, buckets=(32, 64), pad_id=3)
    inputs = packing(topology.pp).layout.inputs(topology.pp_rank)
    views = [only(batch, inputs) for batch in whole]
    assert [batch.counts for batch in step.batches] == [counts] * len(views)
    assert_same([view.to_tensors() for view in views], contents(step))


@pytest.mark.parametrize(
    ("lanes", "tp", "pp", "policy"),
    [
        (1, 1, 1, "mixed"),
        (3, 1, 1, "mixed"),
        (4, 1, 1, "dynamic"),
        (6, 1, 1, "padded"),
        (8, 1, 1, "mixed"),
        (2, 2, 2, "mixed"),
        (1, 1, 3, "static"),
    ],
)
def test_all_regimes_give_the_same_micro_batches(lanes, tp, pp, policy):
    run_ranks(lanes * tp * pp, regimes_agree, lanes, tp, pp, policy)


def one_exchange(lanes):
    topology = make_topology(lanes=lanes, device="cpu")
    source = RandomSource(24, longest=100)
    own = list(lane_stream(source, lanes, topology.lane, 1))
    with count() as gathered:
        gather_rows_of_lanes(length_rows(own, 1), topology.groups, usual=8, everywhere=False)
    topology.groups.close()
    return gathered.calls()


def test_lengths_are_gathered_with_one_collective():
    assert run_ranks(3, one_exchange, 3) == [1, 1, 1]


def round_trip(lanes, policy):
    """Each lane's outputs return to the owner of the sequence, in the original order."""
    topology = make_topology(lanes=lanes, device="cpu")
    source = RandomSource(48, longest=lanes * CAPACITY // 2)
    own = list(lane_stream(source, lanes, topology.lane, 1))
    rows = gather_rows_of_lanes(length_rows(own), topology.groups, usual=24, everywhere=False)
    found = StepLengths.of(rows)
    steps = StreamedSteps(
        iter(own),
        planner=planner(lanes, policy),
        batch=BatchSize("sequences", 24),
        topology=topology,
        fields=FIELDS,
    )
    step = take(steps, 1)[0]
    pieces = [
        piece
        for batch in step.batches
        for piece in unpack(batch.ctx, torch.stack([batch.token_ids, batch.ctx.positions], dim=1))
    ]
    like = torch.empty(0, 2, dtype=torch.int64)
    back = send_back(step.plan, found.owners, pieces, topology.groups.lanes, like=like)
    assert list(back) == list(found.indices_of(topology.lane))
    for place, sample in zip(back, own, strict=True):
        assert back[place][:, 0].tolist() == sample.tokens.tolist()
        assert back[place][:, 1].tolist() == list(range(sample.length))
    topology.groups.close()
    return sum(len(values) for values in back.values())


@pytest.mark.parametrize("policy", ["mixed", "padded", "static"])
def test_outputs_return_to_their_owner_in_order(policy):
    assert sum(run_ranks(4, round_trip, 4, policy)) > 0


def whole_steps(lanes, state, number):
    """What all lanes hold of each step, unsharded, and the state after each."""
    topology = make_topology(lanes=lanes, device="cpu")
    source = RandomSource(60, longest=CAPACITY)
    seen, states = [], []
    with Loader(indexed(topology, source), prefetch=3) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(number):
            step = next(loader)
            pieces = [
                (step.plan.sequences[p.sequence].id, p.start, p.values.tolist())
                for batch in step.batches
                for p in unpack(batch.ctx, batch.token_ids)
            ]
            seen.append(pieces)
            states.append(loader.state_dict())
    topology.groups.close()
    return seen, states


def steps_of(results):
    """For each step, the tokens of each sequence, from all lanes' pieces."""
    steps = []
    for lanes_pieces in zip(*(seen for seen, _ in results), strict=True):
        tokens = {}
        for sequence, start, values in sorted(chain.from_iterable(lanes_pieces)):
            assert len(tokens.setdefault(sequence, [])) == start
            tokens[sequence] += values
        steps.append(tokens)
    return steps


def test_resuming_at_every_step_also_on_other_lanes_repeats_and_loses_nothing():
    source = RandomSource(60, longest=CAPACITY)
    results = run_ranks(2, whole_steps, 2, None, 6)
    whole = steps_of(results)
    # 60 sequences in steps of 24: three steps an epoch, the last of 12.
    for epoch in (whole[:3], whole[3:]):
        union = {sequence: tokens for step in epoch for sequence, tokens in step.items()}
        assert sum(map(len, epoch)) == len(union) == 60
        assert all(union[i] == source[i].tokens.tolist() for i in range(60))
    states = results[0][1]
    for at in range(1, 6):
        lanes = 2 if at % 2 else 3
        again = steps_of(run_ranks(lanes, whole_steps, lanes, states[at - 1], 6 - at))
        assert again == whole[at:]


def plans_differ():
    topology = make_topology(lanes=2, device="cpu")
    policy = "static" if topology.rank else "mixed"
    with pytest.raises(RuntimeError, match=r"2 different versions of the plan: rank 0"):
        take(indexed(topology, RandomSource(24, longest=100), policy), 1)


def test_plans_that_differ_between_ranks_are_noticed():
    run_ranks(2, plans_differ)


def streams_differ():
    topology = make_topology(lanes=1, tp=2, device="cpu")
    source = RandomSource(24, longest=20)
    samples = list(lane_stream(source, 1, 0, 1))
    if topology.rank:
        samples[3] = TokenizedSample(
            3, samples[3].tokens + 1, samples[3].loss_mask, samples[3].fields
        )
    steps = StreamedSteps(
        iter(samples),
        planner=planner(1),
        batch=BatchSize("sequences", 24),
        topology=topology,
        fields=FIELDS,
        everywhere=True,
    )
    with pytest.raises(RuntimeError, match="different versions of the data of a lane"):
        take(steps, 1)


def test_iterators_of_one_lane_that_disagree_are_noticed():
    run_ranks(2, streams_differ)


def uneven_streams():
    topology = make_topology(lanes=3, device="cpu")
    source = RandomSource(30, longest=20)
    mine = [
        source[i] for i in range(30) if (i % 3 == topology.lane) and i < 10 * (topology.lane + 1)
    ]
    steps = StreamedSteps(
        iter(mine),
        planner=planner(3),
        batch=BatchSize("tokens", 60),
        topology=topology,
        fields=FIELDS,
    )
    with Loader(steps) as loader:
        seen = sum(step.batches[0].counts.sequences for step in loader)
        with pytest.raises(ValueError, match="the position of an iterator cannot be saved"):
            loader.state_dict()
        with pytest.raises(StopIteration):
            next(loader)
    topology.groups.close()
    return seen, len(mine)


def test_lanes_may_run_out_at_different_times():
    results = run_ranks(3, uneven_streams)
    assert {seen for seen, _ in results} == {sum(own for _, own in results)}


def leave_early():
    topology = make_topology(lanes=2, device="cpu")
    for prefetch in (1, 3):
        with Loader(indexed(topology, RandomSource(48, longest=30)), prefetch=prefetch) as loader:
            next(loader)
            if topology.rank:
                time.sleep(0.3)  # this rank's thread is elsewhere when the other closes
    topology.groups.close()
    return torch.distributed.distributed_c10d._world.pg_map.__len__()


def test_closing_in_the_middle_neither_hangs_nor_leaks():
    assert run_ranks(2, leave_early, timeout=30) == [1, 1]


def test_a_resume_with_another_order_is_refused():
    source = RandomSource(30, longest=20)
    make = partial(IndexedSteps, source, planner=planner(1), batch=BatchSize("sequences", 8))
    loader = Loader(make(seed=1))
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"had seed 1, and now it is 2"):
        Loader(make(seed=2)).load_state_dict(state)
    with pytest.raises(ValueError, match="at least 1 step"):
        Loader(make(seed=1), prefetch=0)


def test_one_process_needs_no_groups():
    source = RandomSource(30, longest=20)
    steps = IndexedSteps(
        source, planner=planner(1), batch=BatchSize("tokens", 100), seed=1, packing=PACKING
    )
    step = take(steps, 2)[1]
    tokens = merge(step.plan, [p for b in step.batches for p in unpack(b.ctx, b.token_ids)])
    for place, values in tokens.items():
        sample = source[step.plan.sequences[place].id]
        assert values.tolist() == sample.tokens.tolist()


def test_a_failing_test_would_be_noticed():
    with pytest.raises(RankError, match="ZeroDivisionError"):
        run_ranks(2, divide_by_zero)


def divide_by_zero():
    return 1 // 0
