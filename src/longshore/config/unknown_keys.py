"""Answers to those who use other words: a key that does not exist gets the one that was meant.

In: a key as it was typed. Out: one line. `train.learning_rate`, which TRL knows, is answered with
"there is no train.learning_rate; use train.lr", and `train.batch` with "did you mean data.batch?".
"""

import difflib
from dataclasses import fields

from longshore.config.foreign import ANSWERS, PREFIXES
from longshore.config.schema import SECTIONS

# Keys of Megatron, TRL and torchtitan, in any section, and ours; ": …" says why there is none.
# foreign.py has those that are asked for less.
FOREIGN = {
    **ANSWERS,
    "activation_checkpoint": "train.recompute",
    "adam_beta1": "train.betas",
    "adam_beta2": "train.betas",
    "adam_eps": "train.eps",
    "adam_epsilon": "train.eps",
    "assistant_only_loss": "data.loss_on",
    "bf16": "train.dtype",
    "chat_template": "data.template",
    "chat_template_path": "data.template",
    "checkpoint_interval": "output.save_every",
    "clip_grad": "train.clip",
    "context_parallel_degree": "plan.cp_size, or plan.max_cp where sizes differ",
    "context_parallel_size": "plan.cp_size, or plan.max_cp where sizes differ",
    "data_parallel_shard_degree": "parallel.shard",
    "data_path": "data.path",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "dataset_path": "data.path",
    "dump_folder": "output.folder",
    "eval_dataset": "data.eval_path",
    "eval_interval": "train.eval_every",
    "eval_steps": "train.eval_every",
    "exit_signal_handler": ": SIGTERM always ends a run with a checkpoint",
    "flavor": "model.preset",
    "fp16": "train.dtype",
    "fsdp": "parallel.shard",
    "global_batch_size": "data.batch",
    "grad_accum_steps": ": the plan decides the number of rounds",
    "gradient_accumulation_steps": ": the plan decides the number of rounds",
    "gradient_checkpointing": "train.recompute",
    "hf_assets_path": "model.from_hf",
    "hidden_size": ": a preset (model.preset) or a checkpoint (model.from_hf) has its own",
    "keep_latest_k": "output.keep",
    "learning_rate": "train.lr",
    "load": "model.from_hf",
    "local_batch_size": ": plan.capacity decides how many sequences a micro-batch holds",
    "lr_decay_style": "train.schedule",
    "lr_scheduler_type": "train.schedule",
    "lr_warmup_iters": "train.warmup",
    "max_grad_norm": "train.clip",
    "max_norm": "train.clip",
    "max_seq_length": "plan.capacity for a rank's tokens, data.max_length for a sequence's",
    "max_seqlen_per_dp_cp_rank": "plan.capacity",
    "max_steps": "train.steps",
    "micro_batch_size": ": plan.capacity decides how many sequences a micro-batch holds",
    "min_dynamic_context_parallel_size": "plan.min_cp",
    "min_lr_ratio": "train.min_lr",
    "mixed_precision": "train.dtype",
    "model_name": "model.from_hf",
    "model_name_or_path": "model.from_hf",
    "moe_aux_loss_coeff": "model.aux_weight",
    "moe_router_bias_update_rate": "model.bias_update",
    "mtp_loss_scaling_factor": "train.mtp_weight",
    "n_layers": "model.layers",
    "nproc_per_node": "parallel.ranks",
    "num_layers": "model.layers",
    "num_microbatches": ": the plan decides the number of rounds",
    "num_train_epochs": "train.epochs",
    "output_dir": "output.folder",
    "output_router_logits": "model.aux_weight",
    "packing": ": sequences are always packed",
    "per_device_train_batch_size": "data.batch, over all devices",
    "pipeline_model_parallel_size": ": training has no pipeline yet",
    "pipeline_parallel_degree": ": training has no pipeline yet",
    "recompute_granularity": "train.recompute",
    "resume_from_checkpoint": ": go on with a run with --resume",
    "router_aux_loss_coef": "model.aux_weight",
    "run_name": "output.folder",
    "save": "output.folder",
    "save_interval": "output.save_every",
    "save_steps": "output.save_every",
    "save_strategy": "output.save_every, and output.keep=0 for no checkpoint at all",
    "save_total_limit": "output.keep",
    "seq_len": "plan.capacity for a rank's tokens, data.max_length for a sequence's",
    "seq_length": "plan.capacity for a rank's tokens, data.max_length for a sequence's",
    "sequence_packing_scheduler": "plan.policy (dp_balanced: static, default_dynamic_cp: dynamic)",
    "tensor_model_parallel_size": ": training has no tensor parallelism yet",
    "tensor_parallel_degree": ": training has no tensor parallelism yet",
    "tokenizer_model": "data.tokenizer",
    "tokenizer_name": "data.tokenizer",
    "tokenizer_path": "data.tokenizer",
    "torch_compile": "train.compile",
    "train_iters": "train.steps",
    "train_on_inputs": "data.loss_on",
    "valid_data_path": "data.eval_path",
    "warmup_ratio": "train.warmup, in steps",
    "warmup_steps": "train.warmup",
    "world_size": "parallel.ranks",
    "zero_stage": "parallel.shard",
}

# Values that other systems use, and ours.
FOREIGN_VALUES = {
    "bf16": "bfloat16",
    "default_dynamic_cp": "dynamic",
    "dp_balanced": "static",
    "fp16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
    "full": "blocks",
    "ulysses": "heads",
    "allgather": "gather",
    "ddp": "none",
    "fsdp": "zero3",
}

# Values that others of our commands take, and why a key does not.
REFUSED = {
    (
        "plan.policy",
        "given",
    ): "which is for packs of your own; training makes them, so use mixed",
}

# Sections of torchtitan and others.
FOREIGN_SECTIONS = {
    "checkpoint": "output",
    "dataset": "data",
    "job": "output",
    "logging": "output",
    "lr_scheduler": "train",
    "metrics": "output",
    "optimizer": "train",
    "parallelism": "parallel",
    "training": "train",
}


def all_keys() -> list[str]:
    """Every key as section.key."""
    return [f"{name}.{f.name}" for name, kind in SECTIONS.items() for f in fields(kind)]


def answer_key(key: str, *, typed: str = "") -> str:
    """What to say to section.key where there is no such key.

    typed: as the user wrote it, where that is not just the key.
    """
    typed = typed or key
    word = key.rpartition(".")[2].lower().replace("-", "_")
    known = all_keys()
    is_ours = any(key.endswith(f".{word}") for key in known)
    if not is_ours and (foreign := FOREIGN.get(word) or _of_family(word)):
        return f"there is no {typed}" + (foreign if foreign[0] == ":" else f"; use {foreign}")
    section = key.partition(".")[0].lower()
    home = FOREIGN_SECTIONS.get(section, section)
    ours = [key for key in known if key.startswith(f"{home}.")]
    for keys, likeness in ((ours, 1.0), (known, 1.0), (ours, 0.7), (known, 0.75)):
        if meant := _called(word, keys, likeness):
            return f"there is no {typed}; did you mean {meant}?"
    if section in SECTIONS:
        names = ", ".join(key.rpartition(".")[2] for key in ours)
        return f"there is no {typed}; [{section}] has {names}"
    return answer_section(key.partition(".")[0])


def _of_family(word: str) -> str:
    return next((told for prefix, told in PREFIXES.items() if word.startswith(prefix)), "")


def _called(word: str, keys: list[str], likeness: float) -> str:
    """The first of the keys whose name, its section aside, is the most like a word."""
    names = [key.rpartition(".")[2] for key in keys]
    near = difflib.get_close_matches(word, names, n=1, cutoff=likeness)
    return keys[names.index(near[0])] if near else ""


def answer_section(typed: str) -> str:
    known = [*SECTIONS]
    near = difflib.get_close_matches(typed.lower(), known, n=1)
    if meant := FOREIGN_SECTIONS.get(typed.lower()) or (near[0] if near else ""):
        return f"there is no section [{typed}]; did you mean [{meant}]?"
    return f"there is no section [{typed}]; the sections are {', '.join(known)}"
