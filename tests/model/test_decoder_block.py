import pytest
import torch
from tests.model.exact import assert_close

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.part import Norm
from longshore.batch import whole_context
from longshore.model.decoder import Block
from longshore.model.norm_rope import rope_tables
from longshore.model.registry import make_feed_forward, make_mixer

ATTENTION = AttentionConfig(heads=2, kv_heads=1, head_dim=4)
FEED_FORWARD = MLPConfig(width=12)
CTX = whole_context((1, 4))
TABLES = rope_tables(ATTENTION.ropes, CTX, torch.float64)


def block_and_input(layer):
    torch.manual_seed(0)
    return Block(layer, 6, norm=Norm(1e-6)).double(), torch.randn(5, 6, dtype=torch.float64)


def test_each_part_is_added_behind_its_norm():
    block, x_TC = block_and_input(LayerConfig(ATTENTION, FEED_FORWARD))
    torch.nn.init.uniform_(block.mlp_norm.weight)
    middle_TC = x_TC + block.mixer(block.mixer_norm(x_TC), CTX, TABLES)
    want_TC = middle_TC + block.mlp(block.mlp_norm(middle_TC), CTX)[0]
    assert_close(block(x_TC, CTX, TABLES).values, want_TC)


@pytest.mark.parametrize("layer", [LayerConfig(ATTENTION, None), LayerConfig(None, FEED_FORWARD)])
def test_what_is_left_out_has_no_parameters(layer):
    block, x_TC = block_and_input(layer)
    assert sum(p.numel() for p in block.parameters()) == layer.parameters(6)
    for end in (block.mixer and block.mixer.o_proj, block.mlp and block.mlp.down_proj):
        if end is not None:
            torch.nn.init.zeros_(end.weight)
    assert torch.equal(block(x_TC, CTX, TABLES).values, x_TC)


def test_unknown_parts():
    with pytest.raises(ValueError, match="no module is registered for MLPConfig; known"):
        make_mixer(FEED_FORWARD, 6, norm=Norm(1e-6))
    with pytest.raises(ValueError, match="no module is registered for AttentionConfig; known"):
        make_feed_forward(ATTENTION, 6, norm=Norm(1e-6))
