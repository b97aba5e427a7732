"""TRL's SFTTrainer with planned, packed rounds trains as each sequence alone does."""

from importlib.util import find_spec

import pytest
import torch
from tests.lazy import Lazy, transformers

pytestmark = pytest.mark.skipif(not find_spec("trl"), reason="no trl")
example = Lazy("examples.trl_packed")
LR, BATCH, CAPACITY = 0.5, 8, 64


def alone(rows):
    """The model after a step of plain SGD, a sequence at a time, mean over all loss tokens."""
    model = example.tiny_model(torch.float64)
    total = sum(label != example.IGNORE for row in rows for label in row["labels"][1:])
    for row in rows:
        ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
        logits = model(ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits, labels[0, 1:], ignore_index=example.IGNORE, reduction="sum"
        )
        (loss / total).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= LR * parameter.grad
    return model


def wide_loss(outputs, labels, num_items_in_batch):
    """In float64 throughout; TRL's own loss computes log-probabilities in float32."""
    logits = outputs.logits[0, :-1]
    total = torch.nn.functional.cross_entropy(
        logits, labels[0, 1:], ignore_index=example.IGNORE, reduction="sum"
    )
    return total / num_items_in_batch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("loss", "limit"), [(None, 1e-6), (wide_loss, 1e-9)])
def test_a_step_is_that_of_each_sequence_alone(tmp_path, loss, limit):
    rows = example.counting_rows(BATCH).filter(lambda row: len(row["input_ids"]) <= CAPACITY)
    trainer = example.PlannedSFTTrainer(
        example.tiny_model(torch.float64),
        example.settings(
            str(tmp_path),
            max_steps=1,
            learning_rate=LR,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
        ),
        train_dataset=rows,
        processing_class=example.tiny_tokenizer(),
        compute_loss_func=loss,
        capacity=CAPACITY,
        batch=BATCH,
    )
    assert len(trainer.planned(list(rows))["rounds"]) > 1
    trainer.train()
    expected = alone(list(rows))
    start = example.tiny_model(torch.float64)
    compared = zip(
        trainer.model.parameters(), expected.parameters(), start.parameters(), strict=True
    )
    for mine, theirs, before in compared:
        step = (theirs - before).abs().max()
        assert step > 0
        assert (mine - theirs).abs().max() <= limit * step


@pytest.mark.filterwarnings("ignore")
def test_a_balance_loss_is_refused(tmp_path):
    """It is that of a micro-batch, so the gradient would depend on the plan."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_local_experts": 2}
    config = transformers.MixtralConfig(vocab_size=64, **sizes, **heads)
    model = transformers.MixtralForCausalLM(config)

    def trainer(coefficient):
        return example.PlannedSFTTrainer(
            model,
            example.settings(str(tmp_path), router_aux_loss_coef=coefficient),
            train_dataset=example.counting_rows(2),
            processing_class=example.tiny_tokenizer(),
            capacity=CAPACITY,
            batch=BATCH,
        )

    with pytest.raises(ValueError, match=r"router_aux_loss_coef is 0.01: .*; set it to 0"):
        trainer(0.01)
    assert not trainer(0.0).aux_loss_enabled
