"""The mixer of DeepSeek-V4 against transformers, in float64; the index's loss by hand."""

from dataclasses import replace

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
from longshore.model.interface import Exchange, Exchanges, with_loss
from longshore.model.norm_rope import rope_tables

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


@pytest.mark.slow
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


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_no_sequence_sees_another(monkeypatch, kind):
    """A changed token changes no bit of another sequence, and no earlier row of its own."""
    in_float64(monkeypatch)
    mixer, lengths = our_attention(CONFIGS[kind], their_attention(kind)), (5, 140, 3, 150, 1)
    x_TC = rows(lengths)
    before, _ = run_ours(mixer, x_TC, lengths)
    for changed in (4, 5, 144, 150, 297, 298):
        moved = x_TC.clone()
        moved[changed] += 1
        after, _ = run_ours(mixer, moved, lengths)
        bounds = torch.tensor(lengths).cumsum(0)
        stop = int(bounds[bounds > changed][0])
        differs = (before != after).any(1).nonzero()[:, 0].tolist()
        assert differs[0] == changed
        assert differs[-1] < stop


def loss_by_hand(module, x_TC, config):
    """Of one sequence: from the scores of their index and their attention's probabilities."""
    kept = []
    hook = module.compressor.indexer.scorer.register_forward_hook(
        lambda scorer, given, scores: kept.append(scores[0])
    )
    _, probs_HTM = run_theirs(module, x_TC, weights=True)
    hook.remove()
    (scores_TE,) = kept
    loss = x_TC.new_zeros(())
    for place in range(len(x_TC)):
        visible = (place + 1) // config.ratio
        if not visible:
            continue
        ranked = scores_TE[place, :visible].sort(descending=True, stable=True).indices
        chosen = ranked[: config.index.top_k]
        mass = probs_HTM[:, place, len(x_TC) + chosen].sum(0).detach()
        target = mass / mass.sum()
        predicted = scores_TE[place, chosen].log_softmax(0)
        loss = loss + (target * (target.log() - predicted)).sum()
    return loss


def test_the_loss_of_the_index_is_that_by_hand_and_trains_the_index_alone(monkeypatch):
    in_float64(monkeypatch)
    kind, lengths = "compressed_sparse_attention", (1, 3, 4, 5, 90)
    config, theirs = CONFIGS[kind], their_attention(kind)
    ours = our_attention(config, theirs)
    x_TC = rows(lengths)
    want = sum(loss_by_hand(theirs, x, config) for x in x_TC.split(lengths))
    want.backward()
    x_TC.requires_grad_()
    output_TC, loss = run_ours(ours, x_TC, lengths)
    loss.backward(retain_graph=True)
    assert_close(loss, want)
    assert x_TC.grad is None or not x_TC.grad.any()
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    names = [name for name, _ in ours.named_parameters()]
    of_index = [name for name in names if "index" in name]
    assert len(of_index) == 6
    for name, wanted in to_ours(grads, config, of_index).items():
        assert_close(ours.get_parameter(name).grad, wanted, name)
    assert not any(_has_gradient(ours, name) for name in names if name not in of_index)
    ours.zero_grad()
    output_TC.sum().backward()
    assert [name for name in names if not _has_gradient(ours, name)] == of_index


def _has_gradient(mixer, name):
    grad = mixer.get_parameter(name).grad
    return grad is not None and bool(grad.any())


def test_padding_does_not_count_in_the_loss_and_its_weight_does(monkeypatch):
    in_float64(monkeypatch)
    kind = "compressed_sparse_attention"
    config, theirs = CONFIGS[kind], their_attention(kind)
    x_TC, lengths = rows((30, 20)), (30, 20)
    _, alone = run_ours(our_attention(config, theirs), x_TC[:30], lengths[:1])
    half = replace(config, index=replace(config.index, loss_weight=0.5))
    ctx = whole_context(lengths)
    ctx = replace(ctx, is_real=torch.arange(50) < 30)
    tables = rope_tables(config.ropes, ctx, x_TC.dtype)
    _, loss = our_attention(half, theirs)(x_TC, ctx, tables)
    assert_close(loss, alone / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient_where_there_are_no_entries(monkeypatch, kind):
    in_float64(monkeypatch)
    mixer = our_attention(CONFIGS[kind], their_attention(kind))
    output_TC, loss = run_ours(mixer, rows((1, 3)), (1, 3))
    (output_TC.sum() + (0 if loss is None else loss)).backward()
    for name, parameter in mixer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


class Exchanging(Exchanges):
    """Lets shared packs pass, as those of parallel/ do."""

    def of(self, pack):
        return Exchange(pack)
