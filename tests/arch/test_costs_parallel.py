"""Memory of a rank under tensor and expert parallelism."""

from dataclasses import replace

import pytest
import torch

from longshore.arch.costs import auto_capacity, logits_bytes, make_layout, model_bytes, token_bytes
from longshore.arch.cuts import TPRank
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.memory import (
    ALONE,
    INPUT_BYTES,
    RankSetting,
    block_saved,
    stage_parameters,
    whole_model,
)
from longshore.arch.part import Sharing
from longshore.arch.presets import preset
from longshore.model.decoder import Decoder
from longshore.plan.layout import Layout
from longshore.plan.types import Axes
from longshore.settings import ShardMode

GIB = 1 << 30


def capacity_of(config: DecoderConfig, memory: int, layout: Layout | None = None, **axes: int):
    how = RankSetting(
        axes=Axes(shard="zero3", **axes),
        recompute=True,
        layout=layout,
        sharing=Sharing("gather", "auto"),
    )
    return auto_capacity(config, how, memory_bytes=memory, cp_sizes=(1, 2))


def counted(config: DecoderConfig, tp: int, ep: int) -> tuple[int, int]:
    """Parameters of TP rank 0: those of the modules, cut as arch/cuts.py says; experts apart."""
    with torch.device("meta"):
        model = Decoder(config)
    cuts = dict.fromkeys(
        ("embed.weight", "head.weight"), TPRank(tp, 0).vocabulary(config.vocab_size)
    )
    blocks = {f"layers.{i}": layer for i, layer in enumerate(config.layers)}
    blocks |= {f"mtp.{i}.block": layer for i, layer in enumerate(config.mtp)}
    for prefix, layer in blocks.items():
        for kind, part in (("mixer", layer.mixer), ("mlp", layer.mlp)):
            if part is not None:
                own = part.tp_cuts(config.width, TPRank(tp, 0))
                cuts |= {f"{prefix}.{kind}.{name}": cut for name, cut in own.items()}
    common = experts = 0
    for name, parameter in model.named_parameters():
        count, cut = parameter.numel(), cuts.pop(name, None)
        if cut is not None:
            kept = sum(span.stop - span.start for span in cut.spans)
            count = count // cut.size * kept
        if ".experts." in name:
            experts += count // ep
        else:
            common += count
    assert not [name for name in cuts if name != "head.weight"], "all names are of parameters"
    return common, experts


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-deepseek-v3", "tiny-qwen3-next"])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 4), (2, 4), (4, 2)])
def test_parameters_are_those_of_the_cuts(name: str, tp: int, ep: int):
    config = preset(name)
    parameters = stage_parameters(
        config, whole_model(config).stages[0], Axes(lanes=ep, tp=tp, ep=ep)
    )
    assert (parameters.common, parameters.experts) == counted(config, tp, ep)


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-nemotron-h"])
def test_parameters_of_recurrent_mixers(name: str):
    config = preset(name)
    parameters = stage_parameters(config, whole_model(config).stages[0], Axes(lanes=1, tp=2))
    assert (parameters.common, parameters.experts) == counted(config, 2, 1)


def test_experts_are_sharded_over_the_ranks_that_have_the_same():
    """Experts of 3·4·8 values each, 8 of them; router 4·8, norms 4, tables 10·4 each."""
    moe = LayerConfig(None, MoEConfig(experts=8, top_k=2, width=8))
    config = DecoderConfig(vocab_size=10, width=4, layers=(moe,))
    common, routed = 4 * 8 + 2 * 4, 8 * 3 * 4 * 8
    tables = 2 * 10 * 4

    def sharded(lanes: int, shard: ShardMode, **split: int) -> int:
        how = RankSetting(axes=Axes(lanes=lanes, shard=shard, **split), dtype="float32")
        return model_bytes(config, how).optimizer // 8

    assert sharded(2, "none", ep=4, tp=2) == common + tables // 2 + routed // 4
    # 8 lanes of 2 TP ranks: each 1/4 of the experts is on 4 ranks.
    assert sharded(8, "zero3", tp=2, ep=4) == (common + tables // 2) // 8 + routed // 4 // 4
    assert sharded(8, "zero2", tp=2, ep=4) == sharded(8, "zero3", tp=2, ep=4)
    # With as many EP ranks as there are, every expert is on one.
    assert sharded(2, "zero3", tp=2, ep=4) == (common + tables // 2) // 2 + routed // 4
    assert sharded(8, "zero3") == (common + tables + routed) // 8


def test_what_a_split_block_saves_by_hand():
    """Width 64, an MLP of 192: norm's input and output 64 each, 4·192 inside; float32."""
    mlp = LayerConfig(None, MLPConfig(width=192))
    local = LayerConfig(None, MLPConfig(width=96))
    whole = block_saved(mlp, 64, item=4, axes=ALONE)
    assert whole == 4 * (2 * 64 + 4 * 192 + 1)
    # The norm's input and statistic are of half the rows; the MLP reads all rows.
    split = block_saved(local, 64, item=4, axes=Axes(lanes=1, tp=2))
    assert split == 4 * (64 + 1) // 2 + 4 * (64 + 4 * 96)


def test_experts_save_their_own_rows_and_those_that_come():
    part = MoEConfig(experts=8, top_k=2, width=32)
    moe = LayerConfig(None, part)
    whole, tp2, ep8, both = (
        block_saved(moe, 64, item=2, axes=axes)
        for axes in (Axes(lanes=8, tp=tp, ep=ep) for ep in (1, 8) for tp in (1, 2))
    )
    assert tp2 == -(-whole // 2)
    # Of two rows that come, weights, ids and where copies are; of two copies, eight numbers each.
    assert ep8 == whole + 4 * (2 * 4 + 8) * 2
    assert both == -(-ep8 // 2)


def test_recomputed_blocks_save_a_rank_s_own_rows():
    config = preset("qwen3-8b")
    one, four = (
        token_bytes(config, RankSetting(axes=Axes(lanes=1, tp=tp), recompute=True)).saved
        for tp in (1, 4)
    )
    layers, width, tables = 36, 4096, 128 * 4
    head = (2 * width + 4) + (2 * width + 4)
    assert one == INPUT_BYTES + tables + layers * width * 2 + head
    assert four == INPUT_BYTES + tables + layers * width * 2 // 4 + head // 2 + head // 8


def test_the_vocabulary_is_split():
    config = replace(preset("qwen3-8b"), vocab_size=4 * 1001 - 1)
    assert logits_bytes(config, 1000, dtype="float64", tp=4) == logits_bytes(
        replace(config, vocab_size=1001), 1000, dtype="float64"
    )


def test_capacity_grows_with_the_ranks_of_a_lane():
    config = preset("qwen3-8b")
    memory = 80 * GIB
    capacities = []
    for tp in (1, 2, 4, 8):
        capacity, lines = capacity_of(config, memory, lanes=8, tp=tp)
        capacities.append(capacity)
    assert capacities == sorted(set(capacities))
    assert "with zero3 over 8 lanes, tp 8, ep 1:" in lines[1]
    layout = make_layout(config, pp=2, vpp=1)
    piped, _ = capacity_of(config, memory, layout, lanes=8, tp=2)
    assert piped > capacity_of(config, memory, layout, lanes=8)[0]


def test_experts_over_ranks_make_a_large_model_fit():
    config = preset("deepseek-v3")
    with pytest.raises(ValueError, match="not even 256 tokens fit"):
        capacity_of(config, 139 * GIB, lanes=32)
    capacity, lines = capacity_of(config, 139 * GIB, lanes=32, tp=8, ep=64)
    assert capacity >= 4096
    assert "tp 8, ep 64" in lines[1]
