"""The loss of a batch, and losses of users: what they do at masked tokens must not count."""

from types import SimpleNamespace

import pytest
import torch
from tests.data.plans import FIELDS, counts_of, make_samples

from longshore.data.pack import pack_step
from longshore.data.shard import cut_shards, lane_cuts
from longshore.errors import SettingError
from longshore.plan import make_plan
from longshore.train.loss import make_loss, masked_values


def a_batch(*lengths):
    plan = make_plan(lengths or [5, 3], lanes=1, capacity=32)
    samples = make_samples(plan)
    shards = cut_shards(plan, samples, lane_cuts(plan, 0), fields=FIELDS)
    (batch,) = pack_step(plan, 0, shards, counts=counts_of(samples, 0))
    return batch


def test_the_usual_loss_is_the_mean_over_loss_tokens() -> None:
    batch, loss = a_batch(), make_loss()
    nll = torch.arange(8.0)
    assert loss.summed(nll, batch) == (nll[batch.targets.loss_mask].sum(), None)
    assert loss.divisor([batch], None) == batch.counts.main == int(batch.targets.loss_mask.sum())
    assert make_loss(count="sequences").divisor([batch], None) == 2


def test_padding_cannot_pass_even_as_nan() -> None:
    batch, loss = a_batch(), make_loss()
    nll = torch.where(batch.targets.loss_mask, 1.0, torch.nan).requires_grad_()
    summed, _ = loss.summed(nll, batch)
    summed.backward()
    assert summed == batch.counts.main
    assert torch.equal(nll.grad, batch.targets.loss_mask.float())


@pytest.mark.parametrize(
    ("name", "got"), [("mean_of_batch", r"\(\)"), ("nothing_returned", "NoneType")]
)
def test_a_loss_function_must_say_a_value_for_each_token(name: str, got: str) -> None:
    loss = make_loss(f"tests.train.losses:{name}")
    with pytest.raises(ValueError, match=f"returned {got} for 8 tokens; it must return one value"):
        loss.summed(torch.ones(8), a_batch())


def test_a_count_that_is_not_finite_is_named() -> None:
    loss = make_loss(count="tests.train.losses:not_finite")
    alone = SimpleNamespace(size=lambda: 1)
    one_rank = SimpleNamespace(device="cpu", lanes=alone, pp=alone)
    with pytest.raises(ValueError, match=r"train.loss_count=tests.train.losses:not_finite: .* nan"):
        loss.divisor([a_batch()], one_rank)


def test_a_wrong_name_is_an_error_about_its_setting() -> None:
    with pytest.raises(SettingError, match=r"^loss: there is no module nowhere"):
        make_loss("nowhere:f")
    with pytest.raises(SettingError, match=r"^loss_count: tests.train.losses has no nothing"):
        make_loss(count="tests.train.losses:nothing")


BATCH = a_batch(9, 6, 1, 5)
MASK = BATCH.targets.loss_mask
LAST = int(MASK.nonzero()[-1])
SEQUENCE = BATCH.ctx.sequence_index
WEIGHT = torch.where(MASK, torch.linspace(0.5, 2.0, len(MASK)), 0.0).double()


def by_sequence(nll):
    return torch.zeros(5, dtype=nll.dtype).index_add(0, SEQUENCE, nll)


LOSSES = {
    "divides": lambda nll, batch: nll / WEIGHT,
    "divides before it sums": lambda nll, batch: (
        nll * by_sequence((nll / WEIGHT).nan_to_num()).sum()
    ),
    "divides what it has summed": lambda nll, batch: by_sequence(nll)[SEQUENCE] / WEIGHT,
    "log of the weight": lambda nll, batch: nll * WEIGHT.log(),
    "log": lambda nll, batch: nll * nll.log(),
    "root": lambda nll, batch: nll.sqrt() / WEIGHT.sqrt(),
    "power": lambda nll, batch: nll ** (1 / WEIGHT),
    "0 / 0": lambda nll, batch: nll / (1 - (-nll).exp()),
    "overflows": lambda nll, batch: torch.where(MASK, nll, 1e4 + nll).exp(),
    "where": lambda nll, batch: torch.where(WEIGHT > 0, nll / WEIGHT, 0.0),
    "mean of a sequence": lambda nll, batch: nll / by_sequence(MASK.double())[SEQUENCE],
    "constant": lambda nll, batch: torch.full_like(nll, torch.nan).masked_fill(MASK, 2.0),
}


def numeric(function, nll):
    """The gradient by differences of the sum over tokens with loss."""

    def total(values):
        return function(torch.where(MASK, values, 0.0), BATCH)[MASK].sum().item()

    gradient = torch.zeros_like(nll)
    for row in MASK.nonzero()[:, 0].tolist():
        step = torch.zeros_like(nll)
        step[row] = 1e-6
        gradient[row] = (total(nll + step) - total(nll - step)) / 2e-6
    return gradient


@pytest.mark.parametrize("name", LOSSES)
def test_tokens_without_loss_reach_neither_value_nor_gradient(name: str) -> None:
    function, nll = LOSSES[name], torch.linspace(0.3, 1.7, len(MASK), dtype=torch.float64)
    assert 5 < MASK.sum() < len(MASK)
    want = numeric(function, nll)
    nll.requires_grad_()
    values, faults = masked_values(function, nll, BATCH)
    values.sum().backward()
    assert torch.equal(values[~MASK], torch.zeros(int((~MASK).sum()), dtype=torch.float64))
    assert torch.equal(values[MASK], function(torch.where(MASK, nll, 0.0), BATCH)[MASK])
    assert torch.allclose(nll.grad, want, rtol=1e-6, atol=1e-8)
    assert torch.equal(nll.grad[~MASK], torch.zeros_like(nll.grad[~MASK]))
    assert [int(row) for row in faults] == [-1, -1]


@pytest.mark.parametrize(
    ("function", "which"),
    [
        (lambda nll, batch: nll / torch.where(torch.arange(len(nll)) == LAST, 0.0, 1.0), "value"),
        (lambda nll, batch: (nll - nll[LAST].detach()).abs().sqrt(), "gradient"),
    ],
)
def test_a_fault_at_a_token_with_loss_is_named(function, which: str) -> None:
    nll = torch.linspace(0.3, 1.7, len(MASK)).requires_grad_()
    values, faults = masked_values(function, nll, BATCH)
    values.sum().backward()
    assert int(getattr(faults, which)) == LAST
    assert not nll.grad[MASK].isfinite().all()


def test_what_the_model_did_is_not_blamed_on_the_function() -> None:
    nll = torch.full((len(MASK),), torch.nan).requires_grad_()
    values, faults = masked_values(lambda nll, batch: nll * 2, nll, BATCH)
    values.sum().backward()
    assert [int(row) for row in faults] == [-1, -1]
