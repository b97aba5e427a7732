"""Mamba2 and gated delta net over lanes, both ways: exact, nothing leaks, and what is sent."""

from functools import partial

import numpy as np
import pytest
import torch
from tests.ranks.exchanged import exchanged
from tests.ranks.harness import run_ranks
from tests.ranks.spine import VOCAB, batches_of, exact, make_samples
from tests.ranks.test_exactness import LENGTHS, check, several_packs

from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.batch import whole_context
from longshore.model.decoder import Decoder
from longshore.model.recurrent import ScanInputs, over_heads
from longshore.parallel.context import halo_route
from longshore.plan import make_plan

WIDTH = 12
FLOAT = 8


def hybrid(heads: int = 4, groups: int = 2) -> DecoderConfig:
    """Mamba2, then gated delta net; its key heads are as many as the groups."""
    mamba = Mamba2Config(heads=heads, head_dim=3, state_dim=5, groups=groups)
    delta = DeltaNetConfig(key_heads=groups, value_heads=heads, key_dim=3, value_dim=4, kernel=3)
    layers = (LayerConfig(mamba, MLPConfig(width=8)), LayerConfig(delta, None))
    return DecoderConfig(vocab_size=VOCAB, width=WIDTH, layers=layers, init_std=0.3)


@pytest.mark.parametrize("lanes", [2, 4])
def test_any_plan(lanes: int) -> None:
    mixed = make_plan(LENGTHS, lanes=lanes, capacity=200 // lanes + 8, policy="mixed")
    static = make_plan(LENGTHS, lanes=lanes, capacity=128, policy="static", cp_size=lanes)
    cases = []
    for way, mode, recompute in [("heads", "zero3", "none"), ("states", "zero2", "blocks")]:
        cases.append((hybrid(), mixed, exact(mode=mode, scan=way, recompute=recompute)))
        cases.append((hybrid(groups=1), static, exact(mode="none", scan=way)))
    check(lanes, cases)


def test_several_packs_in_a_micro_batch_and_lanes_without_work() -> None:
    choices = [exact(mode="zero3", scan=way, recompute="blocks") for way in ("heads", "states")]
    check(4, [(hybrid(), several_packs(), choice) for choice in choices])


def test_cp_size_3() -> None:
    plan = make_plan([1, 40, 3, 100, 2, 11], lanes=3, capacity=40, cp_sizes="any")
    assert 3 in {pack.cp_size for _, pack in plan.packs()}
    settings = [(6, 6, "heads"), (6, 1, "heads"), (4, 2, "auto"), (5, 1, "states")]
    check(3, [(hybrid(h, g), plan, exact(mode="zero2", scan=way)) for h, g, way in settings])


def test_heads_take_two_exchanges_a_layer() -> None:
    for rows, forward, backward in run_ranks(2, partial(exchanged, scan="heads"), hybrid(), 2):
        # Half of x, B, C and dt, then of y; half of q, k, v, b and a, then of o.
        sizes = [32 + 4, 12, 12 + 16 + 8, 16]
        calls = [("all_to_all", rows * size // 2 * FLOAT) for size in sizes]
        assert (forward, backward) == (calls, calls[::-1])


def test_states_do_not_grow_with_the_tokens() -> None:
    for _, forward, backward in run_ranks(2, partial(exchanged, scan="states"), hybrid(), 2):
        # Two sequences of two chunks: transitions 1 and 3·3 a head, states 3·5 and 3·4.
        states = [4 * 4 * (1 + 15) * FLOAT, 4 * 4 * (9 + 12) * FLOAT]
        assert [name for name, _ in forward] == ["all_to_all", "gather"] * 2
        assert [name for name, _ in backward] == ["reduce_scatter", "all_to_all"] * 2
        assert [size for name, size in forward if name == "gather"] == states
        assert all(size <= 4 * 3 * 32 * FLOAT for name, size in forward if name == "all_to_all")


def headed(heads: int, groups: int) -> ScanInputs:
    none = torch.zeros(0, heads)
    return ScanInputs(none, ((heads, 3), (groups, 5), (groups, 5)), (none,), none, None, ())


@pytest.mark.parametrize(
    ("heads", "groups", "legal"),
    [(8, 8, [2, 4, 8]), (8, 2, [2, 4, 8]), (8, 1, [2, 4, 8]), (12, 4, [2, 4, 12]), (5, 1, [5])],
)
def test_auto_takes_heads_where_it_can(heads: int, groups: int, legal: list[int]) -> None:
    inputs = headed(heads, groups)
    assert [size for size in range(2, 13) if over_heads(inputs, size, kind="auto")] == legal


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    message = (
        "CP size 4 cannot split 6 heads with parts of 6, 2, 2 heads; plan with other CP "
        "sizes, or use parallel.scan='states'"
    )
    with pytest.raises(ValueError, match=message):
        over_heads(headed(6, 2), 4, kind="heads")


def test_a_model_that_was_not_made_ready_refuses_shared_packs() -> None:
    plan = make_plan([50, 3], lanes=2, capacity=128, policy="static", cp_size=2)
    (batch,) = batches_of(plan, make_samples(plan), 0)
    with pytest.raises(ValueError, match="a pack is shared by 2 lanes"):
        Decoder(hybrid())(batch.token_ids, batch.ctx)
    assert Decoder(hybrid())(torch.arange(3), whole_context((3,))).values.shape == (3, VOCAB)


@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize("halo", [1, 3, 20])
def test_halos_as_looked_up(cp_size: int, halo: int) -> None:
    """All lanes together, by positions, for chunks of 1, 2 and 7 tokens."""
    padded = np.array([1, 2, 7]) * 2 * cp_size
    lanes = range(cp_size)
    shards = [
        [
            (i, p)
            for i, n in enumerate(padded)
            for c in (lane, 2 * cp_size - 1 - lane)
            for p in range(c * n // (2 * cp_size), (c + 1) * n // (2 * cp_size))
        ]
        for lane in lanes
    ]
    routes = [halo_route(padded, halo, cp_rank=lane, cp_size=cp_size) for lane in lanes]
    sent = []
    for shard, (taken, _, sends, _) in zip(shards, routes, strict=True):
        stops = np.cumsum(sends)
        rows = [shard[row] for row in taken]
        sent.append([rows[b - n : b] for n, b in zip(sends, stops, strict=True)])
    for lane, (_, received, _, receives) in enumerate(routes):
        got = [row for source in lanes for row in sent[source][lane]]
        assert [len(sent[source][lane]) for source in lanes] == list(receives)
        found = dict(zip(received.tolist(), got, strict=True))
        for i, n in enumerate(padded):
            for late, c in enumerate((lane, 2 * cp_size - 1 - lane)):
                for j in range(halo):
                    position = c * n // (2 * cp_size) - halo + j
                    want = (i, position) if position >= 0 else None
                    assert found.get((2 * i + late) * halo + j) == want
