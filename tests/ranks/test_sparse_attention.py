"""DeepSeek-V4's attention over lanes: exact, whatever lanes share, and nothing leaks."""

import pytest
from tests.ranks.spine import VOCAB, exact
from tests.ranks.test_exactness import check, several_packs

from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.rope import RopeConfig, YarnScaling
from longshore.arch.sparse_attention import IndexConfig, SparseAttentionConfig
from longshore.plan import make_plan

LENGTHS = [1, 3, 4, 5, 33, 90, 17]
FAR = RopeConfig(theta=1000.0, scaling=YarnScaling(factor=4.0, original_length=16))
COMMON = {"heads": 4, "head_dim": 8, "rope_dim": 4, "q_rank": 8, "o_groups": 2, "o_rank": 6}
WINDOW = SparseAttentionConfig(**COMMON, window=5, rope=RopeConfig())
CHOSEN = SparseAttentionConfig(
    **COMMON, window=3, ratio=4, index=IndexConfig(heads=3, head_dim=6, top_k=3), rope=FAR
)
ALL = SparseAttentionConfig(**COMMON, window=2, ratio=8, rope=FAR)


def of(*mixers) -> DecoderConfig:
    layers = tuple(LayerConfig(mixer, MLPConfig(width=16)) for mixer in mixers)
    return DecoderConfig(vocab_size=VOCAB, width=24, layers=layers, init_std=0.3)


MODEL = of(WINDOW, CHOSEN, ALL)


@pytest.mark.fuzz
@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_any_plan_as_alone(lanes: int, is_fuzz: bool) -> None:
    if lanes != 3 and not is_fuzz:
        pytest.skip("in `make fuzz`")
    static = make_plan(
        LENGTHS, lanes=lanes, capacity=240, policy="static", cp_size=lanes, cp_sizes="any"
    )
    mixed = make_plan(LENGTHS, lanes=lanes, capacity=120 // lanes + 8, cp_sizes="any")
    assert {pack.cp_size for _, pack in static.packs()} == {lanes}
    check(
        lanes,
        [
            (MODEL, static, exact(mode="zero3")),
            (MODEL, mixed, exact(mode="zero2", recompute="blocks")),
            (MODEL, static, exact(mode="none")),
        ],
    )


def test_several_packs_in_a_micro_batch_and_lanes_without_work() -> None:
    check(4, [(MODEL, several_packs(), exact(mode="zero3", recompute="blocks"))])
