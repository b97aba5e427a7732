import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from tests.ranks.exchanged import count
from tests.ranks.harness import run_ranks

from longshore.parallel.shift import Route, shift, shift_left, shift_right, shift_rows
from longshore.plan.shapes import shard_positions

DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.complex128,
]  # fmt: skip


def cumulative(lengths):
    return [0, *np.cumsum(lengths, dtype=int).tolist()]


def naive(pack, lengths, spaces, fill):
    """The shift of a whole pack, one sequence after the other."""
    shifted = torch.full_like(pack, fill)
    start = 0
    for length, space in zip(lengths, spaces, strict=True):
        shifted[start : start + max(length - 1, 0)] = pack[start + 1 : start + length]
        start += space
    return shifted


def naive_gradient(grad, lengths, spaces):
    """Each position's gradient goes to the one after it."""
    back = torch.zeros_like(grad)
    start = 0
    for length, space in zip(lengths, spaces, strict=True):
        back[start + 1 : start + length] = grad[start : start + max(length - 1, 0)]
        start += space
    return back


def shard_of(pack, spaces, cp_rank, cp_size):
    """A lane's rows of a pack, by the layout's own definition."""
    local = shard_positions(np.array(spaces, dtype=np.int64), cp_rank=cp_rank, cp_size=cp_size)
    held = [space // cp_size for space in spaces]
    return pack[local + np.repeat(cumulative(spaces)[:-1], held)]


def exchange(rows, sent, swapped=False):
    """What each lane receives if these are the rows each sends: an all-to-all in one process."""
    parts = [
        torch.split(heads, list(plan.receives if swapped else plan.sends))
        for plan, heads in zip(rows, sent, strict=True)
    ]
    return [torch.cat([part[lane] for part in parts]) for lane in range(len(rows))]


@st.composite
def packs(draw):
    """(cp_size, real lengths, padded lengths), with extra padding and empty sequences."""
    cp_size = draw(st.integers(1, 8))
    step = 1 if cp_size == 1 else 2 * cp_size
    chunks = draw(st.lists(st.integers(0, 5), max_size=6))
    lengths = [draw(st.integers(0, step * chunk)) for chunk in chunks]
    return cp_size, lengths, [step * chunk for chunk in chunks]


@pytest.mark.property
@given(pack=packs(), fill=st.integers(-100, 3))
@example(pack=(2, [8], [8]), fill=0)
@example(pack=(1, [3, 2], [3, 2]), fill=0)
@example(pack=(1, [3, 0], [3, 9]), fill=-100)
@example(pack=(4, [1, 2, 9], [8, 8, 16]), fill=7)
def test_shards_shift_as_the_whole_pack(pack, fill):
    cp_size, lengths, spaces = pack
    whole = torch.arange(1, 1 + 2 * sum(spaces), dtype=torch.float64).view(-1, 2)
    rows = [
        shift_rows(cumulative(lengths), cumulative(spaces), cp_rank=rank, cp_size=cp_size)
        for rank in range(cp_size)
    ]
    routes = [Route(plan, torch.device("cpu"), None) for plan in rows]
    shards = [shard_of(whole, spaces, rank, cp_size) for rank in range(cp_size)]
    heads = exchange(rows, [x[route.sent] for x, route in zip(shards, routes, strict=True)])
    wanted = naive(whole, lengths, spaces, fill)
    for rank, (shard, route) in enumerate(zip(shards, routes, strict=True)):
        got = shift_left(shard, route, fill, heads[rank])
        assert torch.equal(got, shard_of(wanted, spaces, rank, cp_size))
    heads = exchange(rows, [x[r.received] for x, r in zip(shards, routes, strict=True)], True)
    wanted = naive_gradient(whole, lengths, spaces)
    for rank, (shard, route) in enumerate(zip(shards, routes, strict=True)):
        got = shift_right(shard, route, heads[rank])
        assert torch.equal(got, shard_of(wanted, spaces, rank, cp_size))


@pytest.mark.property
@given(pack=packs())
def test_lanes_expect_what_others_send_and_padding_stays(pack):
    cp_size, lengths, spaces = pack
    rows = [
        shift_rows(cumulative(lengths), cumulative(spaces), cp_rank=rank, cp_size=cp_size)
        for rank in range(cp_size)
    ]
    sends = np.array([plan.sends for plan in rows])
    assert (sends == np.array([plan.receives for plan in rows]).T).all()
    for rank, plan in enumerate(rows):
        assert all(abs(other - rank) == 1 for other in np.flatnonzero(plan.sends))
        assert not set(plan.filled) & set(plan.received)
    # A real token that starts a chunk crosses, unless both chunks lie on the last lane.
    heads = [
        number
        for length, space in zip(lengths, spaces, strict=True)
        for number in range(1, 2 * cp_size)
        if number != cp_size and number * (space // (2 * cp_size)) < length
    ]
    assert sends.sum() == (len(heads) if cp_size > 1 else 0)


def test_without_cp_each_sequence_shifts_left_and_ends_in_the_fill():
    shifted, total = shift(torch.tensor([1, 2, 3, 4, 5]), real=[0, 3, 5], padded=[0, 3, 5])
    assert shifted.tolist() == [2, 3, 0, 5, 0]
    assert total.item() == 10
    padded = torch.tensor([1, 2, 9, 9, 4, 5])
    shifted, total = shift(padded, real=(0, 2, 4), padded=(0, 4, 6), fill=-100)
    assert shifted.tolist() == [2, -100, -100, -100, 5, -100]
    assert total.item() == 7 - 400


def test_boundaries_may_be_tensors_and_the_input_stays():
    x = torch.arange(6.0).view(3, 2).T
    before = x.clone()
    shifted, _ = shift(x, real=torch.tensor([0, 2]), padded=torch.tensor([0, 2]))
    assert shifted.tolist() == [[1, 3, 5], [0, 0, 0]]
    assert torch.equal(x, before)


@pytest.mark.parametrize("rows", [0, 1])
def test_short_packs(rows):
    shifted, total = shift(torch.ones(rows, 2), real=[0, rows], padded=[0, rows])
    assert torch.equal(shifted, torch.zeros(rows, 2))
    assert total == 0


def test_float64_gradients_of_one_lane():
    x = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    boundaries = {"real": [0, 3, 5], "padded": [0, 5, 7]}
    assert torch.autograd.gradcheck(lambda x: shift(x, **boundaries), x)
    assert torch.autograd.gradgradcheck(lambda x: shift(x, **boundaries)[0] ** 2, x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"padded": [0, 6]}, "5 rows, but the padded boundaries give each of 1 lanes 6"),
        ({"padded": [0, 3, 5]}, "2 real and 3 padded boundaries"),
        ({"real": [0, 6]}, "sequence 0 has 6 real tokens, but is padded to only 5"),
        ({"real": [1, 5]}, "the real boundaries must start at 0 and never decrease"),
        ({"padded": [0, 7, 5], "real": [0, 1, 2]}, "the padded boundaries must start at 0"),
        ({"real": [0, 2.5]}, "the real boundaries must be integers"),
        ({"real": []}, "the real boundaries must be integers in one row"),
        ({"real": [[0, 5]]}, "the real boundaries must be integers in one row"),
        ({"padded": torch.tensor([0, 5], device="meta")}, "are on meta; give them on the CPU"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        shift(torch.ones(5), **{"real": [0, 5], "padded": [0, 5], **arguments})


def test_padding_that_does_not_split_is_refused():
    with pytest.raises(
        ValueError, match="padded to 6 tokens; at CP size 2 it must be a multiple of 4"
    ):
        shift_rows([0, 3, 9], [0, 4, 10], cp_rank=0, cp_size=2)


def whole_pack(spaces, dtype):
    made = torch.Generator().manual_seed(len(spaces))
    numbers = torch.randint(-9, 9, (sum(spaces), 3), generator=made)
    return (numbers > 0) if dtype == torch.bool else numbers.to(dtype)


def shift_on_rank(lengths, spaces):
    rank, size = dist.get_rank(), dist.get_world_size()
    boundaries = {"real": cumulative(lengths), "padded": cumulative(spaces)}
    for dtype in DTYPES:
        whole = whole_pack(spaces, dtype)
        shard = shard_of(whole, spaces, rank, size)
        got, total = shift(shard, **boundaries, group=dist.group.WORLD, fill=1)
        wanted = shard_of(naive(whole, lengths, spaces, 1), spaces, rank, size)
        assert got.dtype == dtype
        assert torch.equal(got, wanted), dtype
        torch.testing.assert_close(total, wanted.sum())


PACKS = [
    (2, [8], [8]),
    (2, [7, 1, 2, 12], [8, 4, 4, 16]),
    (3, [6, 1, 17, 0], [6, 6, 18, 6]),
    (4, [32, 3, 8, 21], [32, 8, 8, 24]),
]


@pytest.mark.parametrize(("ranks", "lengths", "spaces"), PACKS)
def test_every_dtype_shifts_over_ranks(ranks, lengths, spaces):
    run_ranks(ranks, shift_on_rank, lengths, spaces)


def weights(rank, rows):
    return torch.randn(rows, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def differentiate(lengths, spaces):
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = whole_pack(spaces, torch.float64)
    x = shard_of(whole, spaces, rank, size).requires_grad_()
    weight = weights(rank, len(x)).requires_grad_()
    boundaries = {"real": cumulative(lengths), "padded": cumulative(spaces)}
    with count() as counts:
        shifted, total = shift(x, **boundaries, group=dist.group.WORLD, fill=0)
        loss = (shifted * weight).sum() + 10 * total
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (again,) = torch.autograd.grad((grad * x.detach()).sum(), weight)
    assert torch.equal(again, shifted)
    return grad.detach(), counts.calls("all_to_all"), counts.calls()


@pytest.mark.parametrize(("ranks", "lengths", "spaces"), PACKS)
def test_float64_gradients_over_ranks(ranks, lengths, spaces):
    rows = sum(spaces) // ranks
    places = torch.arange(sum(spaces)).view(-1, 1)
    weight = torch.empty(sum(spaces), 3, dtype=torch.float64)
    for rank in range(ranks):
        weight[shard_of(places, spaces, rank, ranks).flatten()] = weights(rank, rows) + 10
    wanted = naive_gradient(weight, lengths, spaces)
    for rank, (grad, exchanges, calls) in enumerate(
        run_ranks(ranks, differentiate, lengths, spaces)
    ):
        assert torch.equal(grad, shard_of(wanted, spaces, rank, ranks))
        assert exchanges == calls == 3


def count_exchanges(sequences):
    lengths = [16 - number % 2 for number in range(sequences)]
    spaces = [16] * sequences
    shard = torch.ones(4 * sequences, 2, dtype=torch.int64)
    boundaries = {"real": cumulative(lengths), "padded": cumulative(spaces)}
    with count() as counts:
        shift(shard, **boundaries, group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"1023 rows, but .* each of 4 lanes 1024"):
        shift(shard[1:], **boundaries, group=dist.group.WORLD)
    return counts.calls(), counts.bytes()


def test_256_sequences_at_cp_4_take_one_exchange():
    found = run_ranks(4, count_exchanges, 256)
    # Of a sequence's 8 heads, all real, the first has no taker and the fifth stays on lane 3. Each
    # has 16 bytes; the lanes at the two ends take from one side only.
    assert found == [(1, 256 * 16), (1, 2 * 256 * 16), (1, 2 * 256 * 16), (1, 256 * 16)]
