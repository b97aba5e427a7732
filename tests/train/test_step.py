"""A step hands the model its labels: of a plain loss only those that count, as one sum."""

from types import SimpleNamespace

import pytest
import torch
from tests.ranks.hybrids import deepseek
from tests.ranks.spine import MTP_WEIGHT, batches_of, make_samples

from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder
from longshore.parallel import pipeline as executor
from longshore.plan import make_plan
from longshore.train import step
from longshore.train.loss import Loss, LossCall, without_uncounted_labels
from longshore.train.losses import make_loss
from longshore.train.step import Stepper


@pytest.fixture(autouse=True)
def no_fsdp(monkeypatch):
    monkeypatch.setattr(executor, "begin_round", lambda model, **options: None)


def stepper_of(loss, dtype=torch.float64, config=None):
    model = Decoder(config or deepseek()).to(dtype)
    init_decoder(model, seed=3)
    here = SimpleNamespace(device=torch.device("cpu"), tp=1)
    return Stepper(model, None, here, "none", loss, 0.0, MTP_WEIGHT)


def rounds():
    plan = make_plan([9, 5, 3, 12], lanes=1, capacity=16)
    return batches_of(plan, make_samples(plan), 0, 2)


def calls_of(stepper, batches):
    calls = []
    stepper.model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    stepper.gradients(batches, batches[0].counts.main)
    return calls


def test_of_a_plain_loss_only_labels_that_count_are_summed():
    batches = rounds()
    calls = calls_of(stepper_of(make_loss()), batches)
    assert len(calls) == len(batches) > 1
    for ((_, _, labels, mtp), kwargs), batch in zip(calls, batches, strict=True):
        assert kwargs == {"summed": True}
        given = [labels, *(depth.targets.labels for depth in mtp)]
        packed = [batch.targets, *(depth.targets for depth in batch.mtp)]
        for now, targets in zip(given, packed, strict=True):
            assert (now[~targets.loss_mask] == -100).all()
            assert torch.equal(now[targets.loss_mask], targets.labels[targets.loss_mask])
    assert any((~b.targets.loss_mask & (b.targets.labels != -100)).any() for b in batches)


def test_a_users_loss_gets_every_label():
    batches, loss = rounds(), make_loss()
    own = Loss(LossCall(lambda nll, batch: nll * 2), loss.divisor)
    for ((_, _, labels, mtp), kwargs), batch in zip(
        calls_of(stepper_of(own), batches), batches, strict=True
    ):
        assert kwargs == {"summed": False}
        assert torch.equal(labels, batch.targets.labels)
        assert mtp is not None
        for depth, other in zip(mtp, batch.mtp, strict=True):
            assert torch.equal(depth.targets.labels, other.targets.labels)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_labels_that_do_not_count_change_no_gradient(dtype, monkeypatch):
    """Not in bits: their rows had the gradient 0 before."""
    batches, gradients, losses = rounds(), [], []
    for change in (without_uncounted_labels, lambda batch: batch):
        monkeypatch.setattr(step, "without_uncounted_labels", change)
        stepper = stepper_of(make_loss(), dtype)
        total, _, _ = stepper.gradients(batches, batches[0].counts.main)
        losses.append(total)
        gradients.append({name: p.grad for name, p in stepper.model.named_parameters()})
    assert torch.equal(*losses)
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name
