"""The collectives against a reference in one process, and the harness the ranks run in."""

import errno
import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.ranks.exchanged import count
from tests.ranks.harness import RankError, run_ranks

from longshore.distributed import collectives
from longshore.distributed import collectives as agreement
from longshore.distributed.topology import make_topology

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip


def world():
    return dist.group.WORLD


def random(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# The harness.


def add(x):
    total = torch.tensor(x + dist.get_rank())
    dist.all_reduce(total)
    return total.item(), torch.get_num_threads()


def test_run_ranks_returns_what_each_rank_returns():
    assert run_ranks(3, add, 10) == [(33, 1)] * 3
    assert run_ranks(1, add, 10) == [(10, 1)]


def fail_on(rank):
    if dist.get_rank() == rank:
        raise KeyError("the real error")
    dist.barrier()


def test_the_error_of_a_rank_comes_first_with_its_traceback():
    with pytest.raises(
        RankError, match=r"(?s)^a run on ranks failed\s+rank 1 failed: .*fail_on"
    ) as e:
        run_ranks(3, fail_on, 1)
    assert "KeyError: 'the real error'" in str(e.value)


def stick(rank):
    if dist.get_rank() == rank:
        time.sleep(1000)
    dist.barrier()


def test_ranks_that_hang_are_killed_and_show_where_they_were():
    with pytest.raises(RankError, match=r"(?s)not done after 1\.5 s: ranks \[0, 1\]") as error:
        run_ranks(2, stick, 1, timeout=1.5)
    assert "in stick" in str(error.value)
    assert "rank0 wrote:" in str(error.value)
    assert "rank1 wrote:" in str(error.value)


def die(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_dies_is_named():
    with pytest.raises(RankError, match=r"rank 1 failed: died with exit code -9"):
        run_ranks(2, die, 1)


def warn():
    warnings.warn("careful", stacklevel=1)


def test_warnings_are_errors_on_ranks():
    with pytest.raises(RankError, match="UserWarning: careful"):
        run_ranks(1, warn)


# Differentiable collectives: each is linear, so its value and the value of its adjoint prove it.


def both_ways(function, x, weight):
    """The output, the gradient of sum(output · weight), and that gradient's own gradient."""
    x.requires_grad_()
    weight.requires_grad_()
    out = function(x)
    (grad,) = torch.autograd.grad((out * weight).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad((grad * x.detach()).sum(), weight)
    return out.detach(), grad.detach(), again


def run_gather(rows):
    rank, size = dist.get_rank(), dist.get_world_size()
    with count() as counts:
        found = both_ways(
            lambda x: collectives.gather(x, world()),
            random(rank, rows, 3),
            random(100 + rank, size * rows, 3),
        )
    return found, counts.log


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gather_and_its_gradients(ranks):
    whole = torch.cat([random(rank, 2, 3) for rank in range(ranks)])
    weights = sum(random(100 + rank, 2 * ranks, 3) for rank in range(ranks))
    for rank, ((out, grad, again), log) in enumerate(run_ranks(ranks, run_gather, 2)):
        assert torch.equal(out, whole)
        torch.testing.assert_close(grad, weights[2 * rank :][:2], rtol=1e-13, atol=1e-13)
        assert torch.equal(again, whole)
        moved = (ranks - 1) * 2 * 3 * 8
        assert log == [("gather", moved), ("reduce_scatter", moved), ("gather", moved)]


def run_reduce_scatter(rows):
    rank, size = dist.get_rank(), dist.get_world_size()
    # A gradient that is expanded and not contiguous, as .sum() and .T make them.
    weight = random(100 + rank, 3, 1).expand(3, rows).T
    x = random(rank, size * rows, 3)
    out, grad, _ = both_ways(lambda x: collectives.reduce_scatter(x, world()), x, weight.clone())
    same = torch.autograd.grad(collectives.reduce_scatter(x, world()), x, weight)[0]
    assert torch.equal(grad, same)
    return out, grad


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_reduce_scatter_and_its_gradients(ranks):
    total = sum(random(rank, 2 * ranks, 3) for rank in range(ranks))
    weights = torch.cat([random(100 + r, 3, 1).expand(3, 2).T for r in range(ranks)])
    for rank, (out, grad) in enumerate(run_ranks(ranks, run_reduce_scatter, 2)):
        torch.testing.assert_close(out, total[2 * rank :][:2], rtol=1e-13, atol=1e-13)
        assert torch.equal(grad, weights)


def run_all_to_all(matrix):
    rank = dist.get_rank()
    sends, receives = matrix[rank], [row[rank] for row in matrix]
    with count() as counts:
        found = both_ways(
            lambda x: collectives.all_to_all(x, world(), sends=sends, receives=receives),
            random(rank, sum(sends), 2),
            random(100 + rank, sum(receives), 2),
        )
    return found, counts.log


def split(rows, sizes):
    return list(torch.split(rows, sizes))


@pytest.mark.parametrize(
    "matrix",
    [
        [[0, 2], [1, 1]],
        [[0, 0], [0, 0]],
        [[3, 0, 1], [0, 0, 0], [5, 2, 0]],
        [[1, 2, 3, 4], [0, 1, 0, 0], [7, 0, 0, 1], [0, 0, 0, 0]],
    ],
)
def test_all_to_all_and_its_gradients(matrix):
    ranks = len(matrix)
    columns = [[row[rank] for row in matrix] for rank in range(ranks)]
    pieces = [split(random(rank, sum(matrix[rank]), 2), matrix[rank]) for rank in range(ranks)]
    back = [split(random(100 + r, sum(columns[r]), 2), columns[r]) for r in range(ranks)]
    for rank, ((out, grad, again), log) in enumerate(run_ranks(ranks, run_all_to_all, matrix)):
        assert torch.equal(out, torch.cat([pieces[other][rank] for other in range(ranks)]))
        assert torch.equal(grad, torch.cat([back[other][rank] for other in range(ranks)]))
        assert torch.equal(again, out)
        coming = (sum(columns[rank]) - matrix[rank][rank]) * 2 * 8
        going = (sum(matrix[rank]) - matrix[rank][rank]) * 2 * 8
        assert log == [("all_to_all", b) for b in (coming, going, coming)]


def bits(dtype):
    """A different small number at each place of each of three ranks."""
    numbers = torch.arange(36, dtype=torch.uint8).view(3, 3, 4)
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype)


def move():
    rank = dist.get_rank()
    sends = [3 * int(other == (rank + 1) % 3) for other in range(3)]
    receives = [3 * int(other == (rank - 1) % 3) for other in range(3)]
    for dtype in DTYPES:
        sent = bits(dtype)
        x = sent[rank]
        whole = collectives.gather(x, world())
        moved = collectives.all_to_all(x, world(), sends=sends, receives=receives)
        told = collectives.broadcast(x.clone(), world(), source=1)
        for got, wanted in ((whole, sent.flatten(0, 1)), (moved, sent[rank - 1]), (told, sent[1])):
            assert got.dtype == dtype
            assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), dtype


def test_every_dtype_moves():
    run_ranks(3, move)


def stay_alone():
    x = torch.ones(2, requires_grad=True)
    with count() as counts:
        assert collectives.gather(x, world()) is x
        assert collectives.reduce_scatter(x, world()) is x
        assert collectives.all_to_all(x, world(), sends=[2], receives=[2]) is x
        assert collectives.broadcast(x, world()) is x
    return counts.calls(), counts.bytes()


def test_one_rank_alone_sends_nothing():
    assert run_ranks(1, stay_alone) == [(0, 0)]


def refuse():
    x = torch.ones(3)
    for sends, receives, message in [
        ([3], [1, 1], "2 ranks need as many sends and receives"),
        ([1, 1], [1, 1], "must add up to the tensor's 3 rows"),
        ([4, -1], [1, 1], "none may be negative"),
        ([2, 1] if dist.get_rank() else [1, 2], [0, 0], "sends itself other rows than it expects"),
    ]:
        with pytest.raises(AssertionError, match=message):
            collectives.all_to_all(x, world(), sends=sends, receives=receives)
    with pytest.raises(AssertionError, match="3 rows cannot be scattered evenly over 2 ranks"):
        collectives.reduce_scatter(x, world())
    with pytest.raises(AssertionError, match="in place"):
        collectives.broadcast(torch.ones(2, 3).T, world())
    with pytest.raises(AssertionError, match="int64"):
        collectives.gather_rows(x, world(), expected=1)


def test_wrong_arguments_are_refused_before_anything_is_sent():
    run_ranks(2, refuse)


# Bookkeeping.


def gather_lengths(numbers, room):
    rank = dist.get_rank()
    rows = torch.arange(numbers[rank] * 2).view(-1, 2) + 100 * rank
    with count() as counts:
        found = collectives.gather_rows(rows, world(), expected=room)
    return [part.tolist() for part in found], counts.calls(), counts.bytes()


@pytest.mark.parametrize(
    ("numbers", "room", "calls", "sent_rows"),
    [([2, 0, 3], 3, 1, 4), ([0, 0], 0, 1, 1), ([1, 5], 2, 2, 3 + 6), ([4], 2, 0, 0)],
)
def test_rows_are_gathered_with_one_collective_if_they_have_room(numbers, room, calls, sent_rows):
    wanted = [
        (torch.arange(number * 2).view(-1, 2) + 100 * rank).tolist()
        for rank, number in enumerate(numbers)
    ]
    ranks = len(numbers)
    for found in run_ranks(ranks, gather_lengths, numbers, room):
        assert found == (wanted, calls, (ranks - 1) * sent_rows * 2 * 8)


def tell_lane():
    topology = make_topology(lanes=2, tp=2, pp=2, device="cpu")
    told = torch.tensor([topology.rank], dtype=torch.int16)
    collectives.broadcast_over_lane(told, topology.groups)
    return told.item(), topology.rank_at(lane=topology.lane)


def test_a_lane_hears_its_first_rank():
    for told, first in run_ranks(8, tell_lane):
        assert told == first


def compare(digests):
    topology = make_topology(lanes=len(digests), device="cpu")
    with count() as counts:
        agreement.same_on_all_ranks("same", topology.groups)
    assert counts.calls() == 1
    try:
        agreement.same_on_all_ranks(digests[topology.rank], topology.groups, what="plan of step 7")
    except RuntimeError as error:
        return str(error)


def test_ranks_that_differ_are_named_on_all_ranks():
    for message in run_ranks(4, compare, ["a", "b", "a", "a"]):
        assert message.startswith(
            "the ranks have 2 different versions of the plan of step 7: ranks 0, 2 and 3 against "
            "rank 1. Their inputs differ"
        )


def agree_on(errors):
    topology = make_topology(lanes=len(errors), device="cpu")
    with count() as counts, agreement.agreed(topology.groups):
        pass
    assert counts.calls() == int(len(errors) > 1)
    try:
        with agreement.agreed(topology.groups):
            if (error := errors[topology.rank]) is not None:
                raise KeyError(error)
    except (KeyError, RuntimeError) as error:
        return f"rank {topology.rank}: {error}" if isinstance(error, KeyError) else str(error)


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ([None, None, "disk full: /data ÿ"], "rank 2 failed: KeyError: 'disk full: /data ÿ'"),
        ([None, "first", ""], "rank 1 failed: KeyError: 'first' (rank 2 failed too)"),
        (["", None], "rank 0 failed: KeyError: ''"),
        ([None, None], None),
        (["alone"], None),
    ],
)
def test_every_rank_learns_of_the_first_error(errors, message):
    first = next((rank for rank, error in enumerate(errors) if error is not None), None)
    expected = [message] * len(errors)
    if first is not None:
        expected[first] = f"rank {first}: {errors[first]!r}"
    assert run_ranks(len(errors), agree_on, errors) == expected


def load_shard(broken):
    topology = make_topology(lanes=3, device="cpu")
    try:
        with agreement.agreed(topology.groups):
            if topology.rank in broken:
                raise OSError(f"shard {topology.rank} is corrupt")
    except Exception as error:
        return type(error).__name__, str(error), repr(error.__cause__)


def test_work_that_fails_on_a_rank_fails_on_all():
    quoted = "rank 1 failed: OSError: shard 1 is corrupt"
    assert run_ranks(3, load_shard, [1]) == [
        ("PeerError", quoted, "None"),
        ("OSError", "shard 1 is corrupt", "None"),
        ("PeerError", quoted, "None"),
    ]
    also = f"{quoted} (rank 2 failed too)"
    assert run_ranks(3, load_shard, [1, 2]) == [
        ("PeerError", also, "None"),
        ("OSError", "shard 1 is corrupt", "None"),
        ("PeerError", also, "OSError('shard 2 is corrupt')"),
    ]
    assert run_ranks(3, load_shard, []) == [None] * 3


def fill_disk():
    """What rank 0 learns of two ranks that failed, the first of them with too long a text."""
    topology = make_topology(lanes=3, device="cpu")
    try:
        with agreement.agreed(topology.groups):
            if topology.rank:
                raise OSError(errno.ENOSPC, "no room" * 10_000, "a\udcff{b}")
    except Exception as error:
        return error


def test_an_error_of_another_rank_is_known_as_data():
    error, *_ = run_ranks(3, fill_disk)
    assert isinstance(error, agreement.PeerError)
    assert (error.rank, error.kind, error.also) == (1, "OSError", (2,))
    assert error.message.startswith("[Errno 28] no roomno room")
    assert error.as_os_error().errno == errno.ENOSPC
    assert error.as_os_error().strerror == ("no room" * 10_000)[: agreement.LONGEST_ERROR]
    assert agreement.PeerError("why", rank=0, kind="KeyError").as_os_error() is None
