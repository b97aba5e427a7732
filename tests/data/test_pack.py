"""Shards become micro-batches, and a model's outputs become sequences."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.plans import (
    FIELDS,
    PAD,
    Sample,
    any_plans,
    counts_of,
    make_samples,
    pack_all,
    plan_of,
    twin_layout,
)
from tests.data.stage_batch import only

from longshore.batch import IGNORE, Counts, MicroBatch
from longshore.data.pack import (
    Piece,
    Shards,
    context_batches,
    cut_shards,
    lane_context,
    lane_cuts,
    merge,
    pack_step,
    unpack,
)
from longshore.plan import Pack, Plan, Round, make_plan
from longshore.plan.layout import StageInputs
from longshore.plan.shapes import lane_tokens, make_buckets

TWO_LANES = [Round((Pack(0, 2, (0,), 4), Pack(0, 1, (1,), 3))), Round((Pack(1, 1, (2,), 1),))]
Held = list[tuple[int, int]]


def two_lanes() -> tuple[Plan, dict[int, Sample]]:
    plan = plan_of([7, 3, 1], TWO_LANES, lanes=2, capacity=8, align=4)
    tokens = ([5, 6, 7, 8, 9, 4, 3], [20, 21, 22], [30])
    masks = ([0, 0, 1, 1, 1, 1, 1], [1, 0, 1], [1])
    return plan, {
        i: Sample(np.array(t), np.array(m, dtype=bool))
        for i, (t, m) in enumerate(zip(tokens, masks, strict=True))
    }


def pack_lane(plan: Plan, samples: dict[int, Sample], lane: int, depths: int) -> list[MicroBatch]:
    shards = cut_shards(plan, samples, lane_cuts(plan, lane), depths=depths)
    return pack_step(plan, lane, shards, counts=counts_of(samples, depths), pad_id=0)


def test_by_hand() -> None:
    plan, samples = two_lanes()
    first, second = pack_lane(plan, samples, 0, 1)
    assert first.token_ids.tolist() == [5, 6, 3, 0, 20, 21, 22, 0]
    assert first.targets.labels.tolist() == [6, 7, -100, -100, 21, 22, -100, -100]
    assert first.targets.loss_mask.tolist() == [
        False,
        True,
        False,
        False,
        False,
        True,
        False,
        False,
    ]
    (depth,) = first.mtp
    assert depth.token_ids.tolist() == [6, 7, 0, 0, 21, 22, 0, 0]
    assert depth.targets.labels.tolist() == [7, 8, -100, -100, 22, -100, -100, -100]
    assert depth.targets.loss_mask.tolist() == [True, True, *[False] * 2, True, *[False] * 3]
    assert second.token_ids.tolist() == [0] * 8
    assert (first.lane, first.round, first.rounds, first.is_last) == (0, 0, 2, False)
    assert second.is_last
    counts = Counts(main=6, mtp=(6,), tokens=11, sequences=3, mtp_tokens=(8,))
    assert first.counts == second.counts == counts
    assert counts == Counts.of([6, 6], [7, 3, 1])
    other, last = pack_lane(plan, samples, 1, 1)
    assert other.token_ids.tolist() == [7, 8, 9, 4]
    assert other.targets.labels.tolist() == [8, 9, 4, 3]
    assert last.token_ids.tolist() == [30, 0, 0, 0]
    assert last.targets.labels.tolist() == [-100] * 4
    assert not last.targets.loss_mask.any()


def at(samples: dict[int, Sample], held: Held, ahead: int, fill: int) -> list[int]:
    """The token `ahead` places on from each held position, or `fill` past its sequence's end."""
    ids = [samples[place].tokens.tolist()[position + ahead :] for place, position in held]
    return [rest[0] if rest else fill for rest in ids]


def masked(samples: dict[int, Sample], held: Held, ahead: int) -> list[bool]:
    rest = [samples[place].loss_mask.tolist()[position + ahead :] for place, position in held]
    return [bool(found and found[0]) for found in rest]


def check_fields(batch: MicroBatch, samples: dict[int, Sample], held: Held) -> None:
    weight, advantage = batch.token_fields["weight"], batch.token_fields["advantage"]
    assert (weight.dtype, advantage.dtype) == (torch.float64, torch.float32)
    for row in range(batch.ctx.tokens):
        place, position = held[row] if row < len(held) else (-1, 0)
        length = len(samples[place].tokens) if place >= 0 else 0
        own = samples[place].fields["weight"][position].tolist() if position < length else [0, 0]
        assert weight[row].tolist() == own
        has_next = position + 1 < length
        target = samples[place].fields["advantage"][position + 1] if has_next else 0
        assert advantage[row].item() == target
    ids = [samples[place].fields["sample_id"] for place in batch.ctx.sequences]
    assert batch.sequence_fields["sample_id"].tolist() == [*ids, 0]


@pytest.mark.slow
@pytest.mark.property
@given(any_plans(), st.integers(0, 3), st.integers(0, 8))
def test_every_lane_holds_what_the_twin_says(plan: Plan, depths: int, count: int) -> None:
    samples = make_samples(plan)
    capacity, align = plan.setting.capacity, plan.setting.align
    buckets = make_buckets(capacity, align=align, count=count) if count else ()
    seen: list[tuple[int, int]] = []
    totals = torch.zeros(depths + 1, dtype=torch.int64)
    for lane, batches in enumerate(pack_all(plan, samples, depths=depths, buckets=buckets)):
        assert len(batches) == len(plan.rounds)
        for number, batch in enumerate(batches):
            held = twin_layout(plan, number, lane)
            tokens = lane_tokens(plan, number, lane, buckets=buckets)
            extra = tokens - len(held)
            assert extra >= 0
            assert not buckets or tokens in buckets
            assert batch.token_ids.tolist() == at(samples, held, 0, PAD) + [PAD] * extra
            targets = [batch.targets, *(depth.targets for depth in batch.mtp)]
            ids = [batch.token_ids, *(depth.token_ids for depth in batch.mtp)]
            for d in range(depths + 1):
                labels, mask = targets[d].labels, targets[d].loss_mask
                assert ids[d].tolist() == at(samples, held, d, PAD) + [PAD] * extra
                assert labels.tolist() == at(samples, held, d + 1, IGNORE) + [IGNORE] * extra
                assert mask.tolist() == masked(samples, held, d + 1) + [False] * extra
                assert (labels[mask] != IGNORE).all()
                totals[d] += mask.sum()
            check_fields(batch, samples, held)
            seen += [(place, p) for place, p in held if p < plan.sequences[place].length]
    packed = {place for _, pack in plan.packs() for place in pack.sequences}
    every = [(place, p) for place in packed for p in range(plan.sequences[place].length)]
    assert sorted(seen) == sorted(every)
    if len(packed) == len(samples):
        counts = counts_of(samples, depths)
        assert totals.tolist() == [counts.main, *counts.mtp]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_the_same_sequences_at_every_cp_size(size: int) -> None:
    lengths = [1, 2, 3, 29, 64, 97]
    plan = make_plan(
        lengths,
        lanes=24 // size * size,
        capacity=200,
        policy="static",
        cp_size=size,
        cp_sizes="any",
    )
    samples = make_samples(plan)
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for batch in (batch for batches in pack_all(plan, samples) for batch in batches):
        ctx = batch.ctx
        for row in ctx.is_real.nonzero()[:, 0].tolist():
            place = ctx.sequences[ctx.sequence_index[row]]
            key = (place, int(ctx.positions[row]))
            assert key not in found
            found[key] = (int(batch.token_ids[row]), int(batch.targets.labels[row]))
    for place, sample in samples.items():
        tokens = sample.tokens.tolist()
        pairs = [found.pop((place, p)) for p in range(len(tokens))]
        assert pairs == list(zip(tokens, [*tokens[1:], IGNORE], strict=True))
    assert not found


def test_a_lane_without_work_has_masked_tokens_of_every_kind() -> None:
    plan, samples = plan_of([5], [Round((Pack(0, 1, (0,), 5),))], lanes=3, align=4), {}
    shards = cut_shards(plan, samples, lane_cuts(plan, 2), depths=2, fields=FIELDS)
    (batch,) = pack_step(plan, 2, shards, counts=Counts.of([4, 3, 2], [5]), pad_id=PAD)
    assert batch.token_ids.tolist() == [PAD] * 16
    assert batch.ctx.sequences == ()
    for part in (batch.targets, *(depth.targets for depth in batch.mtp)):
        assert part.labels.tolist() == [IGNORE] * 16
        assert part.loss_mask.tolist() == [False] * 16
    assert batch.token_fields["weight"].shape == (16, 2)
    assert batch.token_fields["weight"].dtype == torch.float64
    assert batch.sequence_fields["sample_id"].tolist() == [0]
    assert batch.sequence_fields["sample_id"].dtype == torch.int64


def reordered(shards: Shards, order: list[int]) -> Shards:
    """The same shards as they may arrive from several lanes."""
    first = np.cumsum(shards.tokens) - shards.tokens
    rows = [r for i in order for r in range(first[i], first[i] + shards.tokens[i])]
    return Shards(
        sequences=shards.sequences[order],
        tokens=shards.tokens[order],
        ids=shards.ids[rows],
        mask=shards.mask[rows],
        token_fields={name: values[rows] for name, values in shards.token_fields.items()},
        sequence_fields={name: values[order] for name, values in shards.sequence_fields.items()},
        depths=shards.depths,
    )


@pytest.mark.property
@given(any_plans(), st.builds(StageInputs, *[st.booleans()] * 6), st.integers(0, 2))
def test_what_is_not_needed_is_neither_cut_nor_packed(
    plan: Plan, inputs: StageInputs, depths: int
) -> None:
    """The micro-batches are the full ones without it; the plan alone gives those without data."""
    samples = make_samples(plan)
    counts = counts_of(samples, depths)
    lane = plan.setting.lanes - 1
    cuts = lane_cuts(plan, lane)
    shards = cut_shards(plan, samples, cuts, depths=depths, fields=FIELDS, inputs=inputs)
    ahead = {0} if inputs.token_ids else set()
    for depth in range(depths + 1):
        ahead |= {depth} if depth and inputs.depth_ids else set()
        ahead |= {depth + 1} if (inputs.depth_targets if depth else inputs.targets) else set()
    assert shards.ids.shape[1] == len(ahead)
    assert shards.mask.shape[1] == inputs.targets + depths * inputs.depth_targets
    packed = pack_step(plan, lane, shards, counts=counts, pad_id=PAD)
    full = pack_all(plan, samples, depths=depths)[lane]
    bare = context_batches(plan, lane, counts=counts)
    for a, b, context in zip(packed, full, bare, strict=True):
        ours, theirs = a.to_tensors(), only(b, inputs).to_tensors()
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        assert len(a.mtp) == (depths if inputs.depth_ids or inputs.depth_targets else 0)
        without = only(b, StageInputs(*[False] * 6)).to_tensors()
        alone = context.to_tensors()
        assert list(alone) == list(without)
        assert all(torch.equal(alone[name], without[name]) for name in alone)
        assert a.counts == context.counts


@pytest.mark.slow
@pytest.mark.property
@given(any_plans(), st.randoms(use_true_random=False))
def test_shards_may_come_in_any_order(plan: Plan, random: object) -> None:
    samples = make_samples(plan)
    for lane in range(plan.setting.lanes):
        cuts = lane_cuts(plan, lane)
        shards = cut_shards(plan, samples, cuts, depths=1, fields=FIELDS)
        order = list(range(len(cuts)))
        random.shuffle(order)
        counts = counts_of(samples, 1)
        want = pack_step(plan, lane, shards, counts=counts)
        got = pack_step(plan, lane, reordered(shards, order), counts=counts)
        for a, b in zip(want, got, strict=True):
            ours, theirs = a.to_tensors(), b.to_tensors()
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_refuses_shards_that_are_not_the_lanes() -> None:
    plan, samples = two_lanes()
    counts = counts_of(samples, 0)
    shards = cut_shards(plan, samples, lane_cuts(plan, 0))
    with pytest.raises(ValueError, match="lane 0: the shards have a sequence twice"):
        pack_step(plan, 0, reordered(shards, [0, 1, 1]), counts=counts)
    with pytest.raises(ValueError, match="lane 0: the shard of sequence 1 is missing"):
        pack_step(plan, 0, reordered(shards, [0]), counts=counts)
    with pytest.raises(ValueError, match=r"lane 1: the shard of sequence 2 is missing"):
        pack_step(plan, 1, shards, counts=counts)
    extra = cut_shards(plan, samples, [*lane_cuts(plan, 0), lane_cuts(plan, 1)[1]])
    with pytest.raises(ValueError, match="lane 0: there is a shard of sequence 2, which the plan"):
        pack_step(plan, 0, extra, counts=counts)
    other_rank = cut_shards(plan, samples, [lane_cuts(plan, 1)[0], lane_cuts(plan, 0)[1]])
    with pytest.raises(ValueError, match="sequence 0 has 4 tokens; at rank 0 of CP size 2 it must"):
        pack_step(plan, 0, other_rank, counts=counts)
    deeper = cut_shards(plan, samples, lane_cuts(plan, 0), depths=1)
    with pytest.raises(ValueError, match=r"counts have 0 depths .*, and the shards 1"):
        pack_step(plan, 0, deeper, counts=counts)


def test_refuses_a_plan_without_rounds_and_an_empty_pack() -> None:
    plan, samples = two_lanes()
    shards, counts = cut_shards(plan, samples, lane_cuts(plan, 0)), counts_of(samples, 0)
    with pytest.raises(ValueError, match="the plan has no rounds"):
        pack_step(replace(plan, rounds=()), 0, shards, counts=counts)
    first, *others = plan.rounds
    empty = replace(first, packs=(*first.packs, Pack(1, 1, (), 0)))
    plan, shards = (
        replace(plan, rounds=(empty, *others)),
        cut_shards(plan, samples, lane_cuts(plan, 1)),
    )
    with pytest.raises(ValueError, match="round 0, lane 1: a pack of CP size 1 has no sequences"):
        pack_step(plan, 1, shards, counts=counts)


UNPACKED_PLAN = plan_of(
    [7, 3], [Round((Pack(0, 2, (0,), 4), Pack(1, 1, (1,), 3)))], lanes=2, align=8
)


def pieces_by_hand() -> list[Piece]:
    contexts = [lane_context(UNPACKED_PLAN, 0, lane) for lane in range(2)]
    return [piece for ctx in contexts for piece in unpack(ctx, ctx.positions * 10)]


def test_unpack_by_hand() -> None:
    found = [(p.sequence, p.start, p.values.tolist()) for p in pieces_by_hand()]
    assert found == [
        (0, 0, [0, 10]),
        (0, 6, [60]),
        (0, 2, [20, 30, 40, 50]),
        (1, 0, [0, 10, 20]),
    ]
    merged = merge(UNPACKED_PLAN, pieces_by_hand())
    assert {i: values.tolist() for i, values in merged.items()} == {
        0: [0, 10, 20, 30, 40, 50, 60],
        1: [0, 10, 20],
    }


@pytest.mark.property
@given(any_plans(), st.integers(0, 8), st.randoms(use_true_random=False))
def test_pack_then_unpack_is_the_identity(plan: Plan, count: int, random: object) -> None:
    setting = plan.setting
    buckets = make_buckets(setting.capacity, align=setting.align, count=count) if count else ()
    samples = make_samples(plan)
    ids, weights = [], []
    for batch in (b for lane in pack_all(plan, samples, buckets=buckets) for b in lane):
        ids += unpack(batch.ctx, batch.token_ids)
        weights += unpack(batch.ctx, batch.token_fields["weight"])
    random.shuffle(ids)
    random.shuffle(weights)
    tokens, values = merge(plan, ids), merge(plan, weights)
    assert list(tokens) == sorted(place for _, pack in plan.packs() for place in pack.sequences)
    for place, found in tokens.items():
        assert found.tolist() == samples[place].tokens.tolist()
        assert values[place].tolist() == samples[place].fields["weight"].tolist()


def test_gradients_flow_through() -> None:
    contexts = [lane_context(UNPACKED_PLAN, 0, lane) for lane in range(2)]
    outputs = [torch.ones(ctx.tokens, requires_grad=True) for ctx in contexts]
    pieces = [p for ctx, out in zip(contexts, outputs, strict=True) for p in unpack(ctx, out)]
    sum(values.sum() for values in merge(UNPACKED_PLAN, pieces).values()).backward()
    for ctx, out in zip(contexts, outputs, strict=True):
        assert torch.equal(out.grad, ctx.is_real.float())


def test_refuses_values_of_another_length() -> None:
    ctx = lane_context(UNPACKED_PLAN, 0, 0)
    for wrong in (torch.zeros(7), torch.zeros(())):
        with pytest.raises(
            ValueError, match="the first dimension must be the micro-batch's 8 tokens"
        ):
            unpack(ctx, wrong)


def test_refuses_pieces_that_do_not_make_a_sequence() -> None:
    pieces = pieces_by_hand()
    with pytest.raises(ValueError, match="sequence 0: positions 2 to 5 are missing"):
        merge(UNPACKED_PLAN, pieces[:2] + pieces[3:])
    with pytest.raises(ValueError, match="sequence 0: positions 2 to 5 came twice"):
        merge(UNPACKED_PLAN, [*pieces, pieces[2]])
    with pytest.raises(ValueError, match="sequence 0: 6 of its 7 positions came back"):
        merge(UNPACKED_PLAN, pieces[:1] + pieces[2:])
    with pytest.raises(ValueError, match="there is no sequence 2 in the plan"):
        merge(UNPACKED_PLAN, [Piece(2, 0, torch.zeros(1))])
