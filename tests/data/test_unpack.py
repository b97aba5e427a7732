import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.plans import any_plans, make_samples, pack_all, plan_of

from longshore.data.lane_context import lane_context
from longshore.data.pack import Piece, merge, unpack
from longshore.plan import Pack, Plan, Round
from longshore.plan.shapes import make_buckets

PLAN = plan_of([7, 3], [Round((Pack(0, 2, (0,), 4), Pack(1, 1, (1,), 3)))], lanes=2, align=8)


def pieces_by_hand() -> list[Piece]:
    contexts = [lane_context(PLAN, 0, lane) for lane in range(2)]
    return [piece for ctx in contexts for piece in unpack(ctx, ctx.positions * 10)]


def test_by_hand() -> None:
    found = [(p.sequence, p.start, p.values.tolist()) for p in pieces_by_hand()]
    assert found == [
        (0, 0, [0, 10]),
        (0, 6, [60]),
        (0, 2, [20, 30, 40, 50]),
        (1, 0, [0, 10, 20]),
    ]
    merged = merge(PLAN, pieces_by_hand())
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
    contexts = [lane_context(PLAN, 0, lane) for lane in range(2)]
    outputs = [torch.ones(ctx.tokens, requires_grad=True) for ctx in contexts]
    pieces = [p for ctx, out in zip(contexts, outputs, strict=True) for p in unpack(ctx, out)]
    sum(values.sum() for values in merge(PLAN, pieces).values()).backward()
    for ctx, out in zip(contexts, outputs, strict=True):
        assert torch.equal(out.grad, ctx.is_real.float())


def test_refuses_values_of_another_length() -> None:
    ctx = lane_context(PLAN, 0, 0)
    for wrong in (torch.zeros(7), torch.zeros(())):
        with pytest.raises(
            ValueError, match="the first dimension must be the micro-batch's 8 tokens"
        ):
            unpack(ctx, wrong)


def test_refuses_pieces_that_do_not_make_a_sequence() -> None:
    pieces = pieces_by_hand()
    with pytest.raises(ValueError, match="sequence 0: positions 2 to 5 are missing"):
        merge(PLAN, pieces[:2] + pieces[3:])
    with pytest.raises(ValueError, match="sequence 0: positions 2 to 5 came twice"):
        merge(PLAN, [*pieces, pieces[2]])
    with pytest.raises(ValueError, match="sequence 0: 6 of its 7 positions came back"):
        merge(PLAN, pieces[:1] + pieces[2:])
    with pytest.raises(ValueError, match="there is no sequence 2 in the plan"):
        merge(PLAN, [Piece(2, 0, torch.zeros(1))])
