"""The mixer of DeepSeek-V4 against transformers, in float64; the index's loss by hand."""

import pytest
import torch
from tests.model.deepseek_v4 import (
    CONFIGS,
    KINDS,
    WIDTH,
    in_float64,
    our_attention,
    run_theirs,
    their_attention,
    to_ours,
)

from longshore.batch import whole_context
from longshore.model.interface import with_loss
from longshore.model.rope import rope_tables

LENGTHS = (1, 3, 4, 5, 127, 128, 129, 700)


def run_ours(mixer, x_TC, lengths):
    """The output, and the loss or None."""
    ctx = whole_context(lengths)
    return with_loss(mixer(x_TC, ctx, rope_tables(mixer.config.ropes, ctx, x_TC.dtype)))


def rows(lengths, seed=2):
    return torch.randn(
        sum(lengths), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def assert_close(ours, want, what=""):
    assert ours.shape == want.shape, what
    assert want.abs().max() > 1e-12, what
    assert (ours - want).abs().max() <= 1e-9 * want.abs().max(), what


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_transformers(monkeypatch, kind):
    """All lengths in one pack, against each sequence alone."""
    in_float64(monkeypatch)
    theirs = their_attention(kind)
    ours = our_attention(CONFIGS[kind], theirs)
    x_TC = rows(LENGTHS).requires_grad_()
    weight_TC = rows(LENGTHS, seed=3)
    want = torch.cat([run_theirs(theirs, x) for x in x_TC.split(LENGTHS)])
    (want * weight_TC).sum().backward()
    expected_x, x_TC.grad = x_TC.grad, None
    got, _ = run_ours(ours, x_TC, LENGTHS)
    (got * weight_TC).sum().backward()
    for part, wanted in zip(got.split(LENGTHS), want.split(LENGTHS), strict=True):
        assert_close(part, wanted)
    assert_close(x_TC.grad, expected_x)
    trained = [name for name, parameter in ours.named_parameters() if parameter.grad is not None]
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected = to_ours(grads, CONFIGS[kind], [name for name in trained if "index" not in name])
    for name, wanted in expected.items():
        assert_close(ours.get_parameter(name).grad, wanted, name)
    untrained = [name for name in dict(ours.named_parameters()) if name not in expected]
    assert all("index" in name for name in untrained)
