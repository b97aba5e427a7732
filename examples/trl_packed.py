"""Longshore's planner and packing under TRL's SFTTrainer: padding-free, balanced, right loss.

In: a tokenized dataset (`input_ids`, and `labels` with -100 where no loss counts). Out: a trained
model. Each optimizer step takes `batch` sequences over all processes; a plan packs them into rounds
of at most `capacity` tokens, so that all processes have the same number of rounds and nearly equal
work. The model sees packed rows whose position ids begin at 0 with each sequence; transformers
keeps the sequences apart by that, with sdpa as with flash attention.

The loss of a step is the mean over all its loss tokens: TRL counts them over all rounds and
processes before backward, since `labels` of the whole step stand beside the rounds. So loss and
gradient do not depend on the plan; tests/examples/test_trl_packed.py compares them with each
sequence alone. A balance loss of experts would depend on it, and is refused.

TRL has no context parallelism for packed rows, so a sequence stays on one process (max_cp=1), and
the longest must fit into the capacity. Run it on a CPU in about 10 s:

    python examples/trl_packed.py
"""

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from longshore import MicroBatch, TokenizedSample, make_plan, pack_lane

IGNORE = -100


class PlannedSFTTrainer(SFTTrainer):
    """SFTTrainer whose steps are planned. batch: sequences of a step, over all processes."""

    def __init__(self, *args: Any, capacity: int, batch: int, **kwargs: Any) -> None:
        self.capacity, self.batch = capacity, batch
        super().__init__(*args, **kwargs)
        if getattr(self, "aux_loss_enabled", False):
            raise ValueError(
                f"router_aux_loss_coef is {self.router_aux_loss_coef}: TRL's balance loss is that "
                "of a micro-batch, so the gradient would depend on the plan; set it to 0"
            )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Every process draws the same sequences, and packs those of its own lane."""
        generator = torch.Generator().manual_seed(self.args.data_seed or self.args.seed)
        dataset: Any = self.train_dataset
        order = RandomSampler(dataset, generator=generator)
        sampler = BatchSampler(order, self.batch, drop_last=False)
        return DataLoader(dataset, batch_sampler=sampler, collate_fn=self.planned)

    def planned(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The rounds of a step on this process, and the labels of all of them, to be counted."""
        samples = [as_sample(place, row) for place, row in enumerate(rows)]
        plan = make_plan(
            [sample.length for sample in samples],
            lanes=self.accelerator.num_processes,
            capacity=self.capacity,
            max_cp=1,
        )
        rounds = [inputs(b) for b in pack_lane(plan, self.accelerator.process_index, samples)]
        joined = {key: torch.cat([r[key] for r in rounds], dim=1) for key in rounds[0]}
        return {**joined, "rounds": rounds}

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of every round; each loss is divided by the tokens of the step."""
        one_round: Callable[..., Tensor] = super().training_step
        losses = [one_round(model, one, num_items_in_batch) for one in inputs["rounds"]]
        return torch.stack(losses).sum()


def as_sample(place: int, row: dict[str, Any]) -> TokenizedSample:
    tokens = np.asarray(row["input_ids"], dtype=np.int32)
    counts = np.asarray(row.get("labels", row["input_ids"])) != IGNORE
    return TokenizedSample(place, tokens, counts)


def inputs(batch: MicroBatch) -> dict[str, Tensor]:
    """A round as transformers takes it: labels stand at their own token, not at the one before."""
    assert batch.token_ids is not None
    assert batch.targets is not None
    labels = torch.where(batch.targets.loss_mask, batch.targets.labels, IGNORE).roll(1)
    labels[0] = IGNORE
    return {
        "input_ids": batch.token_ids[None],
        "position_ids": batch.ctx.positions[None],
        "labels": labels[None],
    }


def tiny_model(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: Any = LlamaForCausalLM(config)
    converted: LlamaForCausalLM = model.to(dtype)
    return converted


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(64)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")),
        pad_token="w0",
        eos_token="w1",
    )


def counting_rows(count: int) -> Dataset:
    """Sequences that count upwards, of very different lengths; 3 tokens of each are a prompt."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(3.0, 1.0, count).clip(5, 200).astype(int)
    ids = [((random.integers(64) + np.arange(n)) % 64).tolist() for n in lengths]
    return Dataset.from_dict({"input_ids": ids, "labels": [[IGNORE] * 3 + row[3:] for row in ids]})


def settings(folder: str, **changes: Any) -> SFTConfig:
    return SFTConfig(
        output_dir=folder,
        gradient_accumulation_steps=1,  # the plan decides the rounds of a step
        max_length=None,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        **changes,
    )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = PlannedSFTTrainer(
            tiny_model(),
            settings(folder, max_steps=20, learning_rate=3e-3, logging_steps=5),
            train_dataset=counting_rows(128),
            processing_class=tiny_tokenizer(),
            capacity=256,
            batch=16,
        )
        trainer.train()
        for line in trainer.state.log_history:
            if "loss" in line:
                print(f"step {line['step']}: loss {line['loss']:.3f}")


if __name__ == "__main__":
    main()
