"""A mixer's own loss: from its core into the step's loss, by real tokens, at every depth."""

import json
from dataclasses import replace

import pytest
import torch
from tests.parallel.own_loss import WEIGHT, OwnLossConfig
from tests.ranks.spine import VOCAB, alone, batches_of, make_samples
from tests.train.test_metrics import METRICS
from tests.train.test_step import no_fsdp, stepper_of  # noqa: F401 - the fixture is used

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.batch import whole_context
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder
from longshore.plan import make_plan
from longshore.train.losses import make_loss


def config(*, depths: int = 1) -> DecoderConfig:
    mlp = MLPConfig(width=16)
    own = LayerConfig(OwnLossConfig(), mlp)
    plain = LayerConfig(AttentionConfig(heads=4, kv_heads=4, head_dim=4), mlp)
    return DecoderConfig(
        vocab_size=VOCAB, width=16, layers=(own, plain, own), mtp=(own,) * depths, init_std=0.3
    )


def test_a_step_adds_it_divided_by_the_tokens_that_its_depth_sees() -> None:
    stepper = stepper_of(make_loss(), config=config())
    plan = make_plan([9, 5, 3, 1, 12], lanes=1, capacity=16)
    samples = make_samples(plan)
    batches = batches_of(plan, samples, 0, 1)
    assert len(batches) > 1
    losses, _, _ = stepper.gradients(batches, batches[0].counts.main)
    want = alone(config(), samples)
    assert stepper.weighted(losses).item() == pytest.approx(want.loss, rel=1e-12)
    assert losses[2] > 0
    for name, parameter in stepper.model.named_parameters():
        difference = (parameter.grad - want.gradients[name]).abs().max()
        assert difference <= 1e-9 * want.gradients[name].abs().max(), name


@pytest.mark.parametrize("recomputed", [False, True])
def test_of_each_layer_and_depth_in_their_order(recomputed: bool) -> None:
    """By hand, from what the mixer puts out; recomputation returns the same."""
    model = Decoder(config(depths=0)).double()
    init_decoder(model, seed=0)
    rows = []
    for index in ("0", "2"):
        model.layers[index].mixer.register_forward_hook(lambda m, args, out: rows.append(out[0]))
    ids, ctx = torch.arange(8), whole_context([5, 3])
    for block in model.blocks():
        block.recompute = recomputed
    out = model(ids, ctx, ids)
    want = [WEIGHT * mixed_TC.square().sum() for mixed_TC in rows]
    assert [loss.depth for loss in out.mixer_losses] == [0, 0]
    for loss, total in zip(out.mixer_losses, want, strict=True):
        assert torch.equal(loss.total, total)
    sum(loss.total for loss in out.mixer_losses).backward()
    assert model.layers["2"].mixer.in_proj.weight.grad.abs().max() > 0


def test_the_metric() -> None:
    assert json.loads(replace(METRICS, index_loss=0.25).to_json())["index_loss"] == 0.25
    assert "index_loss" not in json.loads(METRICS.to_json())
