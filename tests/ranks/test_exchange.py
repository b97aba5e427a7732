"""What attention sends, calls and bytes counted; and that no mixer sends anything at CP size 1."""

from functools import partial

import pytest
from tests.ranks.exchanged import Calls, exchanged
from tests.ranks.harness import run_ranks
from tests.ranks.spine import dense
from tests.ranks.test_mla import LATENT
from tests.ranks.test_scan import hybrid

FLOAT = 8
LAYERS, HEADS, WIDTH = 2, 8, 4


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_gather_brings_keys_and_values_twice_and_their_gradients_once(kv_heads: int) -> None:
    for rows, forward, backward in run_ranks(
        4, partial(exchanged, attention="gather"), dense(kv_heads), 4
    ):
        others = 3 * rows * 2 * kv_heads * WIDTH * FLOAT
        assert forward == [("gather", others)] * LAYERS
        assert backward == [("gather", others), ("reduce_scatter", others)] * LAYERS


def test_heads_take_two_exchanges_each_way() -> None:
    for rows, forward, backward in run_ranks(4, partial(exchanged, attention="heads"), dense(4), 4):
        there = 3 * rows * (HEADS + 2 * 4) // 4 * WIDTH * FLOAT
        back = 3 * rows * HEADS // 4 * WIDTH * FLOAT
        assert forward == [("all_to_all", there), ("all_to_all", back)] * LAYERS
        assert backward == [("all_to_all", back), ("all_to_all", there)] * LAYERS


def test_recomputation_repeats_the_forward_exchange() -> None:
    again = partial(exchanged, attention="gather", recompute="blocks")
    for _, forward, backward in run_ranks(2, again, dense(8), 2):
        assert [name for name, _ in forward] == ["gather"] * LAYERS
        assert [name for name, _ in backward] == ["gather", "gather", "reduce_scatter"] * LAYERS


def at_cp_size_1() -> list[tuple[int, Calls, Calls]]:
    cases = [(dense(8), {"attention": way}) for way in ("auto", "gather", "heads")]
    cases += [(hybrid(), {"scan": way}) for way in ("auto", "heads", "states")]
    return [exchanged(config, 1, **way) for config, way in [*cases, (LATENT, {})]]


def test_nothing_is_exchanged_at_cp_size_1() -> None:
    for calls in run_ranks(2, at_cp_size_1, timeout=120):
        assert calls == [(0, [], [])] * 7


def first_calls() -> dict[int, list[str]]:
    """By KV heads, what is called first at CP sizes 2, 4 and 8."""
    calls: dict[int, list[str]] = {}
    for kv_heads in (8, 4, 2):
        logs = [exchanged(dense(kv_heads), cp_size)[1] for cp_size in (2, 4, 8)]
        calls[kv_heads] = [log[0][0] if log else "idle" for log in logs]
    return calls


@pytest.mark.long
def test_auto_takes_the_one_that_sends_less() -> None:
    # 8 heads: gather brings 3·(c−1)·2K, heads 2·(1−1/c)·(16 + 2K).
    calls = run_ranks(8, first_calls, timeout=120)[0]
    assert calls[8] == ["all_to_all"] * 3
    assert calls[4] == ["gather", "all_to_all", "gather"]
    assert calls[2] == ["gather"] * 3


def illegal() -> str:
    try:
        exchanged(dense(2), 4, attention="heads")
    except ValueError as error:
        return str(error)
    return ""


def test_a_cp_size_that_does_not_divide_the_heads_is_refused() -> None:
    message = "CP size 4 does not divide the 2 KV heads; plan with heads=2, or use parallel"
    assert message in run_ranks(4, illegal)[0]
