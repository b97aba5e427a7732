from types import SimpleNamespace

import pytest
import torch
from tests.data.plans import FIELDS, counts_of, make_samples

from longshore.data.pack import pack_step
from longshore.data.shard import cut_shards, lane_cuts
from longshore.errors import SettingError
from longshore.plan import make_plan
from longshore.train.loss import make_loss


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
    one_rank = SimpleNamespace(device="cpu", lanes=alone)
    with pytest.raises(ValueError, match=r"train.loss_count=tests.train.losses:not_finite: .* nan"):
        loss.divisor([a_batch()], one_rank)


def test_a_wrong_name_is_an_error_about_its_setting() -> None:
    with pytest.raises(SettingError, match=r"^loss: there is no module nowhere"):
        make_loss("nowhere:f")
    with pytest.raises(SettingError, match=r"^loss_count: tests.train.losses has no nothing"):
        make_loss(count="tests.train.losses:nothing")
