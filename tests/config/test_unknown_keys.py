"""Words of other systems get the right answer, never one that only looks alike."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from longshore.config.other_systems import (
    FOREIGN_KEYS,
    FOREIGN_PREFIXES,
    WORDS_BY_ANSWER,
    all_keys,
    answer_key,
)

SFT_CONFIG = """
    model_init_kwargs chat_template_path dataset_text_field dataset_kwargs dataset_num_proc
    eos_token pad_token max_length truncation_mode shuffle_dataset packing packing_strategy
    padding_free pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type
    activation_offloading max_seq_length dataset_batch_size
"""
MODEL_CONFIG = """
    model_name_or_path model_revision torch_dtype dtype trust_remote_code attn_implementation
    use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_target_parameters
    lora_modules_to_save lora_task_type use_rslora use_dora load_in_8bit load_in_4bit
    bnb_4bit_quant_type use_bnb_nested_quant
"""
SCRIPT_ARGUMENTS = """
    dataset_name dataset_config dataset_train_split dataset_test_split dataset_streaming
    gradient_checkpointing_use_reentrant
"""
OTHERS = """
    tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size
    sequence_parallel use_distributed_optimizer overlap_grad_reduce num_experts ffn_hidden_size
    eval_iters eval_interval log_interval distributed_timeout_minutes lr_warmup_fraction
    lr_decay_iters fp8_format attention_backend moe_router_topk train_samples cp_comm_type
    data_parallel_replicate_degree expert_parallel_degree enable_cpu_offload decay_ratio beta1
    interval last_save_in_hf enable_wandb log_freq converters mixed_precision_param
    base_model sequence_len sample_packing num_epochs datasets val_set_size adapter optimizer
    lr_scheduler flash_attention special_tokens evals_per_epoch saves_per_epoch wandb_project
    dataset_prepared_path sequence_parallel_degree early_stopping_patience
    ppo_max_token_len_per_gpu use_dynamic_bsz ulysses_sequence_parallel_size train_files val_files
    total_epochs total_training_steps save_freq test_freq project_name experiment_name
    n_gpus_per_node partial_pretrain use_remove_padding
"""


def training_arguments():
    """The fields of transformers' TrainingArguments, read without importing it."""
    found = find_spec("transformers")
    if found is None or found.origin is None:
        pytest.skip("transformers is not installed")
    tree = ast.parse(Path(found.origin).with_name("training_args.py").read_text("utf-8"))
    (kind,) = (node for node in tree.body if getattr(node, "name", "") == "TrainingArguments")
    lines = [node for node in kind.body if isinstance(node, ast.AnnAssign)]
    names = [node.target.id for node in lines if isinstance(node.target, ast.Name)]
    return [name for name in names if not name.startswith("_")]


def is_specific(word):
    known = {key.partition(".")[2] for key in all_keys()}
    return word in known or word in FOREIGN_KEYS or word.startswith(tuple(FOREIGN_PREFIXES))


def test_every_field_of_training_arguments_has_its_answer():
    words = training_arguments()
    assert {"learning_rate", "report_to", "hub_token", "push_to_hub"} <= set(words)
    assert [word for word in words if not is_specific(word)] == []


@pytest.mark.parametrize("words", [SFT_CONFIG, MODEL_CONFIG, SCRIPT_ARGUMENTS, OTHERS])
def test_every_word_of_other_configurations_has_its_answer(words):
    assert [word for word in words.split() if not is_specific(word)] == []


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("train.lora", "; did you mean model.lora?"),
        ("train.lora_r", "; use model.lora, a table of rank, alpha and targets"),
        ("model.use_peft", "; use model.lora, a table of rank, alpha and targets"),
        ("model.lora_dropout", ": model.lora trains plain low-rank factors; variants of LoRA are "),
        ("output.report_to", "; use output.trackers, tensorboard or wandb"),
        ("train.report_to", "; use output.trackers, tensorboard or wandb"),
        ("train.packing_strategy", "; use plan.policy"),
        (
            "data.dataset_num_proc",
            ": `longshore prepare --workers` tokenizes with several processes",
        ),
        ("train.completion_only_loss", "; use data.loss_on"),
        (
            "train.label_smoothing",
            "; use train.loss_options, {label_smoothing = 0.1} with train.lo",
        ),
        ("beta", "; use train.loss_options, {beta = 0.1} with train.loss=dpo"),
        ("train.beta", "; use train.loss_options, {beta = 0.1} with train.loss=dpo"),
        ("train.epsilon", "; use train.loss_options, {clip_low = 0.2, clip_high"),
        ("train.loss_type", "; use train.loss, a name such as dpo or grpo, or a function of yours"),
        ("train.deepspeed", "; use parallel.shard"),
        ("gradient_checkpointing", "; use train.recompute=blocks"),
        ("train.warmup_ratio", "; use train.warmup, a share of all steps such as 0.03, or their"),
        ("num_generations", ": training reads answers that were sampled before; data.group"),
        ("parallel.tensor_model_parallel_size", "; use parallel.tp"),
        ("parallel.expert_parallel_size", "; use parallel.ep"),
        ("train.ep", "; did you mean parallel.ep?"),
        (
            "train.hub_some_new_field",
            ": nothing is uploaded; output.export makes a folder for `hf upload`",
        ),
        ("train.max_length", "; did you mean data.max_length?"),
        ("sft.weight_decay", "; did you mean train.weight_decay?"),
        ("train.zzz", "; [train] has steps, epochs, lr, "),
    ],
)
def test_the_right_answer(typed, told):
    assert answer_key(typed).startswith(f"there is no {typed}{told}")


def test_no_word_has_two_answers():
    words = [word for words in WORDS_BY_ANSWER.values() for word in words.split()]
    assert len(words) == len(FOREIGN_KEYS) + len(FOREIGN_PREFIXES)


def test_families_name_real_keys_and_take_none_of_ours():
    known = set(all_keys())
    for prefix, told in FOREIGN_PREFIXES.items():
        assert told.startswith(": ") or re.split("[, =]", told)[0] in known, prefix
        assert not any(key.partition(".")[2].startswith(prefix) for key in known), prefix
