"""Costs of compressed sparse attention, each against what is counted."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.arch.test_costs_memory import saved_bytes
from torch.utils.flop_counter import FlopCounterMode

from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.part import Norm, Sharing
from longshore.arch.rope import DynamicScaling, RopeConfig
from longshore.arch.sparse_attention import IndexConfig, SparseAttentionConfig, entry_pairs
from longshore.batch import whole_context
from longshore.model.interface import with_loss
from longshore.model.norm_rope import rope_tables
from longshore.model.sparse_attention import EntryKind, EntryTables, SparseAttention, entry_tables
from longshore.ops import pointwise as norm

WIDTH = 12
WINDOW = SparseAttentionConfig(
    heads=4, head_dim=10, rope_dim=4, q_rank=7, window=9, o_groups=2, o_rank=3
)
HCA = replace(WINDOW, ratio=16)
CSA = replace(WINDOW, ratio=4, index=IndexConfig(heads=3, head_dim=6, top_k=5))
CONFIGS = {"window": WINDOW, "hca": HCA, "csa": CSA}


def mixer(config):
    return SparseAttention(config, WIDTH, norm=Norm(1e-6))


@given(st.integers(0, 300), st.integers(1, 40), st.none() | st.integers(1, 20))
def test_entry_pairs(length, ratio, most):
    seen = [(place + 1) // ratio for place in range(length)]
    assert entry_pairs(length, ratio=ratio, most=most) == sum(
        count if most is None else min(count, most) for count in seen
    )
    assert entry_pairs(length, ratio=0) == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters(name):
    config = CONFIGS[name]
    assert config.parameters(WIDTH) == sum(p.numel() for p in mixer(config).parameters())


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_flops_are_those_of_the_products_and_of_the_pairs_in_the_tables(name):
    config, lengths = CONFIGS[name], (1, 3, 8, 9, 70)
    ctx = whole_context(lengths)
    module, rows = mixer(config), torch.randn(ctx.tokens, WIDTH)
    with FlopCounterMode(display=False) as counter:
        _, kept = module.before(rows, rope_tables(config.ropes, ctx, rows.dtype))
        module.after(torch.randn(ctx.tokens, config.heads, config.head_dim), *kept)
    plain = counter.get_total_flops()
    assert plain == ctx.tokens * sum(product.flops for product in config.products(WIDTH))
    ranges = entry_tables(ctx.packs[0], EntryKind.of(config), rows.device).ranges
    visible = ranges.entry_count.sum()
    attended, scored = visible, 0
    if config.index is not None:
        attended = ranges.entry_count.clamp(max=config.index.top_k).sum()
        scored = config.index.heads * config.index.head_dim * (visible + attended)
    near = (ranges.near_stop - ranges.near_first).sum()
    core = 4 * config.heads * config.head_dim * (near + attended) + 2 * scored
    assert sum(config.flops(WIDTH, length) for length in lengths) == plain + core


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_is_what_autograd_keeps(name, monkeypatch):
    """Exactly, but for rows that norms copy on the CPU, indices of 4 bytes, and rounding up."""
    config = replace(CONFIGS[name], head_dim=16, rope_dim=4)
    if config.index is not None:
        config = replace(config, index=replace(config.index, head_dim=8))
    module, ctx, copies, plain = mixer(config).double(), whole_context((64, 32)), [], norm._rms_norm
    rows = torch.randn(ctx.tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    tables = rope_tables(config.ropes, ctx, rows.dtype)

    def counted(*given):
        normed = plain(*given)
        copies.append(normed.nbytes)
        return normed

    def run():
        """Makes the tables of the pack, which layers share, and the float32 parameters."""
        copies.clear()
        return with_loss(module(rows, ctx, tables))[0]

    monkeypatch.setattr(norm, "_rms_norm", counted)
    apart = module.biases(rows)
    monkeypatch.setattr(module, "apart", lambda x: apart)
    run()
    shared = [rows, *apart, *(t for pair in tables.values() for t in pair), ctx.is_real]
    for table in ctx.packs[0].padded.tables.values():
        shared += [table.rows] if isinstance(table, EntryTables) else list(table)
    holder = SimpleNamespace(parameters=lambda: [*module.parameters(), *shared])
    measured = saved_bytes(holder, run)
    saved = config.saved(WIDTH)
    expected = ctx.tokens * 8 * (saved.values + saved.stats) + sum(copies)
    if config.index is not None:
        # Chosen entries, rows of two overlapping groups; and copies of the biases.
        expected -= ctx.tokens * 4 * (config.index.top_k + 4)
        expected += sum(bias.nbytes for bias in apart[1:])
    norms = bool(config.ratio) + (config.index is not None)
    expected -= norms * 8 * (ctx.tokens - ctx.tokens // max(config.ratio, 1))
    assert measured == expected


def test_a_long_sequence_costs_what_it_sees():
    """Attention grows linearly with a window and top k; the index alone scores every entry."""
    attention = replace(CSA, index=replace(CSA.index, heads=1, head_dim=4))

    def core(length):
        plain = length * sum(product.flops for product in attention.products(WIDTH))
        return attention.flops(WIDTH, length) - plain

    scored = 2 * 4 * (entry_pairs(8000, ratio=4) - 2 * entry_pairs(4000, ratio=4))
    assert core(8000) - 2 * core(4000) - scored < core(50)
    assert WINDOW.flops(WIDTH, 8000) - 2 * WINDOW.flops(WIDTH, 4000) < WINDOW.flops(WIDTH, 50)


def test_gathered_are_entries_and_keys():
    assert WINDOW.gathered() == 0
    assert HCA.gathered() == 1  # 10 numbers of an entry of 16 tokens
    assert CSA.gathered() == 4  # 10 + 6 numbers of an entry of 4 tokens
    assert CSA.shared_heads(Sharing("gather", "auto")) == ()


def test_json():
    layers = tuple(LayerConfig(config, None) for config in CONFIGS.values())
    decoder = DecoderConfig(vocab_size=3, width=WIDTH, layers=layers)
    assert config_from_json(config_to_json(decoder)) == decoder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio": 0}, "index is given, but ratio is 0"),
        ({"ratio": -1}, "ratio is -1; it must be a whole number"),
        ({"rope_dim": 8}, "rope_dim is 8; the narrowest head has 6 dims"),
        ({"o_groups": 3}, "o_groups is 3; it must divide heads, 4"),
        ({"window": 0}, "window is 0; it must be a whole number"),
        (
            {"rope": RopeConfig(scaling=DynamicScaling(factor=2.0, original_length=8))},
            "rope has DynamicScaling",
        ),
    ],
)
def test_wrong_numbers_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(CSA, **changes)
    with pytest.raises(ValueError, match="loss_weight is -1"):
        replace(CSA.index, loss_weight=-1)
