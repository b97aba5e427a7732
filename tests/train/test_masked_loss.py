"""Whatever a user's loss does where no loss counts, it shows in neither value nor gradient."""

import pytest
import torch
from tests.train.test_loss import a_batch

from longshore.train.loss import masked_values

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
