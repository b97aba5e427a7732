"""What each core of attention sends: bytes and calls, counted; nothing at CP size 1."""

import pytest
from tests.ranks.harness import run_ranks
from tests.ranks.spine import batches_of, dense, exact, lanes_of, make_samples, sharded

from longshore.distributed.collectives import count
from longshore.plan import make_plan

FLOAT = 8
LAYERS, HEADS, WIDTH = 2, 8, 4


def exchanged(lanes: int, kv_heads: int, attention: str, cp_size: int, recompute: str):
    plan = make_plan([50, 3], lanes=lanes, capacity=128, policy="static", cp_size=cp_size)
    samples = make_samples(plan)
    with lanes_of(lanes) as (topology, groups):
        choices = exact(mode="none", attention=attention, recompute=recompute)
        model = sharded(dense(kv_heads), topology, groups, choices)
        (batch,) = batches_of(plan, samples, topology.lane)
        with count() as forward:
            nll = model(batch.token_ids, batch.ctx, batch.targets.labels).values
        with count() as backward:
            nll.sum().backward()
        rows = sum(pack.stop - pack.start for pack in batch.ctx.packs if pack.group.cp_size > 1)
        return (
            rows,
            [(call.name, call.bytes) for call in forward.log],
            [(call.name, call.bytes) for call in backward.log],
        )


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_gather_brings_keys_and_values_twice_and_their_gradients_once(kv_heads: int) -> None:
    for rows, forward, backward in run_ranks(4, exchanged, 4, kv_heads, "gather", 4, "none"):
        others = 3 * rows * 2 * kv_heads * WIDTH * FLOAT
        assert forward == [("gather", others)] * LAYERS
        assert backward == [("gather", others), ("reduce_scatter", others)] * LAYERS


def test_heads_take_two_exchanges_each_way() -> None:
    for rows, forward, backward in run_ranks(4, exchanged, 4, 4, "heads", 4, "none"):
        there = 3 * rows * (HEADS + 2 * 4) // 4 * WIDTH * FLOAT
        back = 3 * rows * HEADS // 4 * WIDTH * FLOAT
        assert forward == [("all_to_all", there), ("all_to_all", back)] * LAYERS
        assert backward == [("all_to_all", back), ("all_to_all", there)] * LAYERS


def test_recomputation_repeats_the_forward_exchange() -> None:
    for _, forward, backward in run_ranks(2, exchanged, 2, 8, "gather", 2, "blocks"):
        assert [name for name, _ in forward] == ["gather"] * LAYERS
        assert [name for name, _ in backward] == ["gather", "gather", "reduce_scatter"] * LAYERS


@pytest.mark.parametrize("attention", ["auto", "gather", "heads"])
def test_nothing_is_exchanged_at_cp_size_1(attention: str) -> None:
    for _, forward, backward in run_ranks(2, exchanged, 2, 8, attention, 1, "none"):
        assert (forward, backward) == ([], [])


def ways(kv_heads: int) -> list[str]:
    found = []
    for cp_size in (2, 4, 8):
        _, forward, _ = exchanged(8, kv_heads, "auto", cp_size, "none")
        found.append(forward[0][0] if forward else "idle")
    return found


def test_auto_takes_the_one_that_sends_less() -> None:
    # 8 heads: gather brings 3·(c−1)·2K, heads 2·(1−1/c)·(16 + 2K).
    assert run_ranks(8, ways, 8)[0] == ["all_to_all"] * 3
    assert run_ranks(8, ways, 4)[0] == ["gather", "all_to_all", "gather"]
    assert run_ranks(8, ways, 2)[0] == ["gather"] * 3


def illegal() -> str:
    try:
        exchanged(4, 2, "heads", 4, "none")
    except ValueError as error:
        return str(error)
    return ""


def test_a_cp_size_that_does_not_divide_the_heads_is_refused() -> None:
    message = "CP size 4 does not divide the 2 KV heads; plan with heads=2, or use parallel"
    assert message in run_ranks(4, illegal)[0]
