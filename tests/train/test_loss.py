"""The loss of a batch, and losses of users: what they do at masked tokens must not count."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from tests.data.plans import FIELDS, counts_of, make_samples

from longshore.data.pack import cut_shards, lane_cuts, pack_step
from longshore.data.source import parse_field
from longshore.ops.cross_entropy import OutputLayer
from longshore.plan import make_plan
from longshore.train.loss import (
    LogitsHead,
    Loss,
    LossCall,
    SequenceSums,
    StepInputs,
    masked_values,
)
from longshore.train.loss_fields import check_needed
from longshore.train.losses import distill, dpo, make_loss


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
    with pytest.raises(ValueError, match=r"^train.loss: there is no module nowhere"):
        make_loss("nowhere:f")
    with pytest.raises(ValueError, match=r"^train.loss_count: tests.train.losses has no nothing"):
        make_loss(count="tests.train.losses:nothing")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("tests.train.losses:unknown_parameter", {}, "unknown parameter 'reward'; known are nll,"),
        ("tests.train.losses:of_sequences_and_tokens", {}, "it reads sequences, and nll; a loss"),
        ("tests.train.losses:weighted", {"x": 1}, "weighted has no option 'x'; it has none"),
        ("tests.train.losses:of_sequences", {"x": 1}, "has no option 'x'; it has power"),
        ("dpo", {"bta": 1}, "dpo has no option 'bta'; it has beta, label_smoothing"),
        ("dpo", {"beta": -1}, "beta is -1; it must be at least 0"),
        ("dpo", {"reference_free": 1}, "reference_free is 1; it must be true or false"),
        ("distill", {"temperature": 0}, "temperature is 0; it must be a number above 0"),
        ("grpo", {"average": "words"}, "average is 'words'; it must be tokens or sequences"),
        ("grpo", {"kl": True}, "kl is True; it must be a number"),
        ("ppo", {"temperature": 0}, "temperature is 0; it must be a number above 0"),
        ("cross_entropy", {"label_smoothing": 2}, "label_smoothing is 2; it must be from 0 to 1"),
        ("", {"beta": 1}, "train.loss_options need a train.loss"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(name: str, options, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        make_loss(name, "auto", options)


def test_what_a_loss_is_divided_by() -> None:
    batch = a_batch()
    names = ("dpo", "grpo", "tests.train.losses:of_sequences")
    assert [make_loss(name).divisor([batch], None) for name in names] == [2, 2, 2]
    tokens = [make_loss("grpo", "auto", {"average": "tokens"}), make_loss("ppo"), make_loss("")]
    tokens += [make_loss("cross_entropy", "auto", {"z_loss": 1e-4}), make_loss("dpo", "tokens")]
    assert {loss.divisor([batch], None) for loss in tokens} == {batch.counts.main}
    assert make_loss("cross_entropy").is_plain


def check_fields(loss: Loss, declared) -> None:
    check_needed(loss.name, loss.fields, declared)


def test_the_data_must_have_the_fields_of_a_loss() -> None:
    fields = ["pair:per_sequence:int64", "sign:per_sequence:int8"]
    declared = [parse_field(text) for text in fields]
    check_fields(make_loss("dpo", "auto", {"reference_free": True}), declared)
    message = "loss is dpo, which reads the field ref_logprobs, .*; longshore score DATA --model"
    with pytest.raises(ValueError, match=message):
        check_fields(make_loss("dpo"), declared)
    old = parse_field("old_logprobs:per_token:float32")
    advantages = parse_field("advantages:per_sequence:float32")
    said = (
        "reads old_logprobs as old_logprobs:per_target:float32, with .* shifted .* not as old_log"
    )
    with pytest.raises(ValueError, match=said):
        check_fields(make_loss("grpo"), [advantages, old])
    check_fields(make_loss("grpo", "auto", {"on_policy": True}), [advantages])


@pytest.mark.parametrize(
    ("loss", "wrong", "said"),
    [
        ("dpo", "pair:per_target:int64", "reads pair as pair:per_sequence:int64; declare it so"),
        ("dpo", "pair:per_sequence:float32", "reads pair as pair:per_sequence:int64"),
        ("dpo", "pair:per_sequence:int64:2", "reads pair as pair:per_sequence:int64"),
        ("dpo", "sign:per_target:int8", "reads sign as sign:per_sequence:int64"),
        ("ppo", "old_logprobs:per_sequence:float32", "as old_logprobs:per_target:float32; declare"),
        ("ppo", "advantages:per_target:float32:2", "advantages:per_target:float32 or advantages:"),
        ("distill", "teacher_ids:per_target:float32:4", "as teacher_ids:per_target:int64:8;"),
        ("distill", "teacher_ids:per_target:int32", "as teacher_ids:per_target:int64:8; declare"),
        ("distill", "teacher_ids:per_target:int32:3", "must have the same shape"),
    ],
)
def test_fields_of_another_kind_are_refused(loss: str, wrong: str, said: str) -> None:
    right = ["pair:per_sequence:int64", "sign:per_sequence:int8", "ref_logprobs:per_target:float32"]
    right += ["advantages:per_sequence:float32", "old_logprobs:per_target:float32"]
    right += ["teacher_ids:per_target:int32:4", "teacher_logprobs:per_target:float32:4"]
    check_fields(make_loss(loss), [parse_field(text) for text in right])
    others = [text for text in right if not text.startswith(wrong.partition(":")[0])]
    with pytest.raises(ValueError, match=said):
        check_fields(make_loss(loss), [parse_field(text) for text in [*others, wrong]])


def test_a_temperature_divides_the_logits() -> None:
    hidden, weight = (torch.randn(rows, 4, dtype=torch.float64) for rows in (8, 11))
    labels, batch = torch.arange(8), a_batch()
    loss = make_loss("tests.train.losses:entropy_weighted", "auto", {"temperature": 0.5})
    got, _ = loss.summed(loss.reader(None)(batch)(hidden, OutputLayer(weight), labels), batch)
    logp = (hidden @ weight.T / 0.5).log_softmax(-1)
    nll = -logp.gather(1, labels[:, None])[:, 0]
    want = nll * -(logp.exp() * logp).sum(-1)
    assert torch.allclose(got, want[batch.targets.loss_mask].sum())


@pytest.mark.parametrize("wrong", ["twice chosen", "alone"])
def test_a_pair_that_is_none_is_refused(wrong: str) -> None:
    pair, sign = torch.tensor([4.0, 7, 4, 7]), torch.tensor([1.0, 1, -1, -1])
    if wrong == "alone":
        pair[3] = 8
    else:
        sign[3] = 1
    sums = SequenceSums(torch.zeros(4), torch.ones(4), {"pair": pair, "sign": sign})
    with pytest.raises(ValueError, match=r"pair 7 has . sequences in this step"):
        dpo(sums, reference_free=True)


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


def not_finite_at(row: int, of: str):
    """A function of the logits whose value or gradient is not finite at one token."""

    def function(hidden, head, batch):
        place = torch.arange(len(hidden), dtype=torch.float64)
        bad = (place == row).double()

        def value(logits, bad):
            total = logits.sum(1)
            if of == "value":
                return total / (1 - bad)
            return (total - total.detach() + 1 - bad).sqrt()

        return head.map_logits(value, bad)

    return function


@pytest.mark.parametrize("of", ["value", "gradient"])
def test_a_fault_of_a_function_of_logits_is_named(of: str) -> None:
    hidden = torch.randn(len(MASK), 4, dtype=torch.float64).requires_grad_()
    weight = torch.randn(7, 4, dtype=torch.float64).requires_grad_()
    for row, want in ((LAST, LAST), (int((~MASK).nonzero()[0]), -1)):
        loss, step = Loss(LossCall(not_finite_at(row, of)), None), StepInputs()
        values = loss.reader(step)(BATCH)(hidden, OutputLayer(weight), BATCH.targets.labels)
        total, faults = loss.summed(values, BATCH, step)
        gradients = torch.autograd.grad(total, (hidden, weight))
        assert int(getattr(faults, of)) == want
        if want == -1:
            assert all(part.isfinite().all() for part in (total, *gradients))


def test_the_head_gets_a_gradient_although_nothing_reads_it() -> None:
    hidden = torch.randn(len(MASK), 4, dtype=torch.float64).requires_grad_()
    weight = torch.randn(7, 4, dtype=torch.float64).requires_grad_()
    loss, step = Loss(LossCall(lambda hidden: hidden.square().sum(1)), None), StepInputs()
    values = loss.reader(step)(BATCH)(hidden, OutputLayer(weight), BATCH.targets.labels)
    loss.summed(values, BATCH, step)[0].backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert torch.allclose(hidden.grad, 2 * hidden.detach() * MASK[:, None])


def distilled(ids, logprobs, **options):
    """Of one loss token, then one that does not count; a student with p = ¼ four times."""
    targets = SimpleNamespace(loss_mask=torch.tensor([True, False]), labels=torch.tensor([1, -100]))
    fields = {"teacher_ids": torch.tensor(ids), "teacher_logprobs": torch.tensor(logprobs)}
    batch = SimpleNamespace(targets=targets, token_fields=fields)
    hidden = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(4, 3, dtype=torch.float64)
    value = distill(LogitsHead(hidden, OutputLayer(weight)), batch, **options)[0][0]
    value.backward()
    assert hidden.grad[1].isfinite().all()
    return value.item()


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_short_row_of_a_teacher_has_any_ids(renormalize) -> None:
    half, inf = math.log(0.5), math.inf
    value = distilled(
        [[1, 2, -1], [9, 9, 9]],
        [[half, half, -inf], [-inf, math.nan, 0.0]],
        renormalize=renormalize,
    )
    assert value == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_a_teachers_unknown_token_is_not_finite(wrong) -> None:
    assert math.isnan(distilled([[1, wrong], [0, 0]], [[-1.0, -2.0], [0.0, 0.0]]))


@pytest.mark.parametrize(
    ("metrics", "declared", "said"),
    [
        ({"likely": MASK}, (), r"returned the metrics \(likely\) and declares \(\); set its attr"),
        ({}, ("likely",), r"returned the metrics \(\) and declares \(likely\)"),
        ({"likely": MASK.sum()}, ("likely",), "metric likely must be a tensor with a value for"),
        ({"likely": (MASK, 1)}, ("likely",), "metric likely must be .* or two: values and weights"),
    ],
)
def test_metrics_must_be_those_that_are_declared(metrics, declared, said: str) -> None:
    nll = torch.ones(len(MASK))
    with pytest.raises(ValueError, match=said):
        masked_values(lambda nll, batch: (nll, metrics), nll, BATCH, metrics=declared)


def test_metrics_of_no_weight_count_nothing_not_even_nan() -> None:
    nll = torch.where(MASK, 3.0, torch.nan).double()
    step = StepInputs(totals=torch.zeros(4, dtype=torch.float64))
    nan_at_last = torch.where(torch.arange(len(MASK)) == LAST, torch.nan, 2.0)
    weights = torch.arange(len(MASK)) != LAST

    def function(nll, batch):
        return nll, {"two": (nan_at_last, weights)}

    masked_values(function, nll, BATCH, metrics=("two",), step=step)
    others = int(MASK.sum()) - 1
    assert step.totals.tolist() == [0, 0, 2.0 * others, others]


def test_logits_detached_inside_are_told_in_backward() -> None:
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    head = LogitsHead(hidden, OutputLayer(torch.randn(7, 4, dtype=torch.float64)))
    values = head.map_logits(lambda logits: logits.detach().sum(1))
    with pytest.raises(ValueError, match="function of logits returned values without a gradient"):
        values.sum().backward()
