import pytest

from longshore.arch.costs import forward_flops
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.presets import preset
from longshore.arch.stages import embed_flops, head_flops, layer_flops, make_layout
from longshore.errors import SettingError

MLP = LayerConfig(None, MLPConfig(width=8))


def decoder(layers: int, *, vocab_size: int, depths: int = 0) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size, width=4, layers=(MLP,) * layers, mtp=(MLP,) * depths
    )


def test_the_head_counts():
    # A layer takes 2·3·4·8 = 192 FLOPs a token, a head of 48 rows 2·4·48 = 384.
    assert str(make_layout(decoder(4, vocab_size=48), pp=2, vpp=1)) == "Ettt|tL"
    assert str(make_layout(decoder(4, vocab_size=1), pp=2, vpp=1)) == "Ett|ttL"
    assert str(make_layout(decoder(6, vocab_size=96), pp=2, vpp=2)) == "Ett|tt|tt|L"


def test_depths_count_and_make_the_head_more_expensive():
    # A depth takes 192 + 2·2·4·4 = 256 a token, the head of 24 rows 192 for each of two streams.
    assert str(make_layout(decoder(3, vocab_size=24, depths=1), pp=3, vpp=1)) == "Ett|tm|L"


@pytest.mark.parametrize("name", ["qwen3-8b", "tiny-llama"])
def test_parts_make_up_the_whole(name: str):
    config = preset(name)
    parts = [*layer_flops(config, 100), head_flops(config, 100)]
    assert sum(parts) == forward_flops(config, 100)
    assert 0 < embed_flops(config, 100) < min(parts)


def test_by_hand():
    config = decoder(4, vocab_size=48)
    assert str(make_layout(config, pp=2, vpp=2, text="Et|t|tt|L")) == "Et|t|tt|L"
    with pytest.raises(SettingError, match=r"2 stages for each of 2 .* set vpp to 2"):
        make_layout(config, pp=2, vpp=1, text="Et|t|tt|L")
