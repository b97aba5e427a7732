"""Which part of each tensor a TP rank has: the modules in model/ agree, and nothing is missing."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from tests.arch.tp_parts import WIDTH, parts_on_ranks

from longshore.arch.attention import AttentionConfig
from longshore.arch.cuts import Span, TensorCut, TPRank
from longshore.arch.decoder import DecoderConfig, LayerConfig, check_tp, decoder_on_tp_rank
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.part import Norm
from longshore.arch.presets import preset
from longshore.arch.scan import Mamba2Config
from longshore.model.registry import make_feed_forward, make_mixer

THREE = AttentionConfig(heads=6, kv_heads=3, head_dim=8)


def shapes_of(part):
    make = make_feed_forward if isinstance(part, MLPConfig) else make_mixer
    with torch.device("meta"):
        module = make(part, WIDTH, norm=Norm(1e-6))
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


@given(parts_on_ranks())
def test_the_modules_agree(part_and_tp):
    part, tp = part_and_tp
    whole, local = shapes_of(part), shapes_of(part.on_tp_rank(tp))
    assert whole.keys() == local.keys()
    for rank in range(tp):
        cuts = part.tp_cuts(WIDTH, TPRank(tp, rank))
        assert cuts.keys() <= whole.keys()
        for name, shape in whole.items():
            if name not in cuts:
                assert local[name] == shape, name
                continue
            cut = cuts[name]
            assert cut.size == shape[cut.dim], name
            assert cut.whole_shape(local[name]) == shape, name
            size = sum(span.stop - span.start for span in cut.spans)
            assert size == local[name][cut.dim] or not cut.spans, name


@given(parts_on_ranks())
def test_every_index_is_there_as_often_as_said(part_and_tp):
    part, tp = part_and_tp
    ranks = [part.tp_cuts(WIDTH, TPRank(tp, rank)) for rank in range(tp)]
    for name, first in ranks[0].items():
        at = Counter(
            (index, span.copies, span.copy)
            for cuts in ranks
            for span in cuts[name].spans
            for index in range(span.start, span.stop)
        )
        copies = {index: number for index, number, _ in at}
        assert sorted(copies) == list(range(first.size)), name
        every = {(index, n, copy) for index, n in copies.items() for copy in range(n)}
        assert at == Counter(every), name


def test_the_docstrings_examples():
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=16)
    cuts = attention.tp_cuts(64, TPRank(2, 1))
    assert cuts["q_proj.weight"] == TensorCut(0, 64, (Span(32, 64),))
    assert cuts["k_proj.weight"] == TensorCut(0, 32, (Span(16, 32),))
    assert cuts["o_proj.weight"] == TensorCut(1, 64, (Span(32, 64),))
    mamba = Mamba2Config(heads=4, head_dim=8, state_dim=16, groups=1)
    spans = mamba.tp_cuts(64, TPRank(2, 1))["in_proj.weight"].spans
    shared = Span(64, 80, 1, 2), Span(80, 96, 1, 2)
    assert spans == (Span(16, 32), Span(48, 64), *shared, Span(98, 100))


def test_a_vocabulary_is_cut_as_evenly_as_can_be():
    cuts = [TPRank(4, rank).vocabulary(61) for rank in range(4)]
    assert [cut.spans[0] for cut in cuts] == [Span(0, 15), Span(15, 30), Span(30, 45), Span(45, 61)]
    assert {cut.size for cut in cuts} == {61}


def test_what_ranks_do_not_split_stays_as_it_is():
    experts = MoEConfig(experts=4, top_k=2, width=8)
    assert not experts.tp_units()
    assert experts.on_tp_rank(2) is experts
    assert experts.tp_cuts(16, TPRank(2, 1)) == {}
    config = preset("tiny-qwen3-moe")
    local = decoder_on_tp_rank(config, 2)
    assert [layer.mlp for layer in local.layers] == [layer.mlp for layer in config.layers]
    assert local.layers[0].mixer.heads * 2 == config.layers[0].mixer.heads


@pytest.mark.parametrize(
    ("part", "tp", "message"),
    [
        (THREE, 4, "parallel.tp is 4, which does not divide the 6 attention heads; use one of 1, "),
        (THREE, 2, "parallel.tp is 2, which does not divide the 3 KV heads; use one of 1, 3, 6"),
        (MLPConfig(width=6), 4, "does not divide the 6 channels of a feed-forward part"),
    ],
)
def test_refused_with_what_works(part, tp, message):
    is_mlp = isinstance(part, MLPConfig)
    layer = LayerConfig(None, part) if is_mlp else LayerConfig(part, None)
    decoder = DecoderConfig(vocab_size=8, width=64, layers=(layer,))
    with pytest.raises(ValueError, match=r"^parallel\.tp is") as caught:
        check_tp(decoder, tp)
    assert message in str(caught.value)


def test_a_decoder_is_refused_with_what_works_for_all_its_parts():
    layer = LayerConfig(AttentionConfig(heads=12, kv_heads=2, head_dim=8), MLPConfig(width=18))
    decoder = DecoderConfig(vocab_size=64, width=96, layers=(layer,))
    for tp, problem in ((3, "2 KV heads"), (4, "18 channels of a feed-forward part")):
        with pytest.raises(ValueError, match=f"does not divide the {problem}; use one of 1, 2, 6$"):
            decoder_on_tp_rank(decoder, tp)
    assert decoder_on_tp_rank(decoder, 6).layers[0].mixer.kv_heads == 1
