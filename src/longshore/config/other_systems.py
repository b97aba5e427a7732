"""Answers to unknown keys: the key that was meant, or why there is none.

In: a key as it was typed. Out: one line. `train.learning_rate`, which TRL knows, is answered with
"there is no train.learning_rate; use train.lr", and `train.batch` with "did you mean data.batch?".
WORDS_BY_ANSWER has words of TRL, transformers, Megatron, torchtitan, axolotl and verl under our
key, or under ": …", which says why there is none; `lora_*` is a family, for lora_r, lora_alpha and
so on. Options of the command line are in cli/options.py.
"""

import difflib
from dataclasses import fields

from longshore.config.schema import SECTIONS, by_word

WORDS_BY_ANSWER = {
    # The model.
    "model.from_hf": "base_model partial_pretrain pretrained_model_name_or_path initial_load_path "
    "initial_load_in_hf pretrained_checkpoint tokenizer_name_or_path hf_assets_path load "
    "model_name model_name_or_path",
    "model.from_hf, a folder: hf download NAME --revision … --local-dir FOLDER": "model_revision "
    "revision model_code_revision base_model_revision",
    ": model.from_hf reads the model from its folder, without further options": "model_init_kwargs "
    "model_kwargs config_overrides trust_remote_code override_config",
    ": the preset (model.preset) or checkpoint (model.from_hf) defines it": "ffn_hidden_size "
    "num_attention_heads num_query_groups kv_channels intermediate_size swiglu rotary_base "
    "rope_theta rotary_percent position_embedding_type normalization num_experts moe_router_topk "
    "untie_embeddings_and_output_weights hidden_dropout attention_dropout init_method_std "
    "make_vocab_size_divisible_by dim n_heads max_position_embeddings hidden_size",
    "model.lora, a table of rank, alpha and targets": "use_peft target_modules lora_* peft* "
    "adapter*",
    ": model.lora trains plain low-rank factors; variants of LoRA are not supported yet": "qlora "
    "use_rslora use_dora dora lora_dropout",
    ": training in 8 or 4 bits is not supported yet; train.dtype is the arithmetic": ""
    "use_bnb_nested_quant converters fp8 fp4 enable_fp8 float8 bnb_* fp8_* load_in_* quantization*",
    ": kernels are chosen for the machine, `longshore doctor` lists them; train.kernels=plain "
    "leaves only torch's own": "attn_implementation sdp_attention xformers_attention "
    "attention_backend transformer_impl use_kernels use_remove_padding attention_type liger_* "
    "flash_att* use_flash_att* use_liger*",
    ": training keeps no cache of keys and values": "use_cache",
    "model.preset": "flavor",
    "model.aux_weight": "moe_aux_loss_coeff output_router_logits router_aux_loss_coef",
    "model.bias_update": "moe_router_bias_update_rate",
    "model.layers": "n_layers num_layers",
    # Data.
    "data.path": "datasets train_files train_dataset train_data_path data_files data_path dataset "
    "dataset_name dataset_path",
    "data.path, files, or a folder of `datasets` such as dolly/train": "dataset_config "
    "dataset_config_name subset dataset_train_split split dataset_type",
    "data.stream": "streaming dataset_streaming",
    "data.weights": "interleave_probs dataset_weights mixture_weights",
    "data.eval_path": "val_files dataset_test_split eval_split valid_dataset test_datasets "
    "validation_dataset eval_dataset valid_data_path",
    "data.eval_path, a file of its own": "val_set_size val_split_ratio eval_split_ratio",
    "data.mock": "mock_data",
    "data.cache": "dataset_prepared_path data_cache_path cache_dir",
    ": columns are found by their names: messages, prompt and completion, or text": "text_field "
    "dataset_text_field messages_field field_messages text_column prompt_key response_key "
    "input_column messages_key multiturn_messages_key",
    ": text is always prepared; a folder that `longshore prepare` made is taken as it is": ""
    "dataset_kwargs skip_prepare_dataset",
    ": `longshore prepare --workers` tokenizes with several processes": "dataset_num_proc "
    "dataset_processes preprocessing_num_workers num_proc dataset_batch_size",
    ": the tokenizer and its chat template define it": "eos_token pad_token bos_token "
    "special_tokens added_tokens pad_token_id tokenizer_type add_eos add_bos train_on_eos",
    "data.tokenizer": "processing_class tokenizer_*",
    "data.loss_on": "completion_only_loss train_on_completions train_on_responses_only "
    "roles_to_train mask_prompt mask_inputs assistant_only_loss train_on_inputs",
    "data.too_long, reject or truncate": "excess_length_strategy truncation*",
    "data.max_length": "sequence_len sequence_length max_sequence_length max_model_len cutoff_len "
    "max_prompt_length max_response_length model_max_length",
    "data.shuffle": "shuffle_dataset shuffle_train shuffle_merged_datasets",
    "data.seed": "data_seed dataset_shuffle_seed shuffle_seed",
    "data.batch, which held-out data takes too": "per_device_eval_batch_size eval_batch_size "
    "per_gpu_eval_batch_size val_batch_size",
    ": the batch size is constant, data.batch": "rampup_batch_size",
    "data.ignore": "remove_unused_columns remove_columns columns_to_remove",
    "data.prefetch, steps prepared ahead": "dataloader_num_workers dataloader_prefetch_factor "
    "num_workers prefetch_factor num_dataset_workers",
    ": the last, short step of an epoch is kept, so that every sequence is trained": "drop_last "
    "dataloader_drop_last",
    ": the plan balances lengths in every step; data.shuffle is the order": "group_by_length "
    "train_sampling_strategy length_column_name curriculum_sampling sampling_strategy",
    ": labels are the tokens, and the loss mask says which count": "label_names",
    "data.template": "chat_template*",
    "data.batch, over all devices": "per_device_train_batch_size train_batch_size "
    "global_train_batch_size batch_size total_batch_size global_batch_size",
    ": a thread makes steps ahead (data.prefetch), pinned for GPUs": "dataloader_*",
    # The plan.
    ": sequences are always packed": "eval_packing eval_sample_packing padding_free "
    "sequence_packing use_sequence_packing pad_to_sequence_len pad_to_max_length dynamic_batching "
    "multipack packing_efficiency batch_flattening packing sample_packing*",
    "plan.policy": "packing_strategy dynamic_context_parallel hybrid_context_parallel",
    "plan.align": "pad_to_multiple_of pad_multiple_of",
    "plan.capacity": "ppo_max_token_len_per_gpu max_token_len_per_gpu train_mb_tokens "
    "max_tokens_per_gpu max_tokens token_budget max_packed_sequence_length max_token_len "
    "max_seqlen_per_dp_cp_rank",
    "plan.capacity, which is found automatically": "auto_find_batch_size use_dynamic_bsz",
    ": plan.capacity decides how many sequences a micro-batch holds": "ppo_micro_batch_size "
    "ppo_micro_batch_size_per_gpu micro_batch_size_per_gpu per_gpu_train_batch_size "
    "device_train_microbatch_size local_batch_size micro_batch_size",
    "plan.cp_size, or plan.max_cp where sizes differ": "context_parallel cp "
    "sequence_parallel_degree ulysses_sequence_parallel_size sequence_parallel_size "
    "max_context_parallel_size context_parallel_degree context_parallel_size",
    "parallel.attention": "cp_comm_type context_parallel_rotate_method ring_attn_func",
    ": the plan decides the number of rounds": "grad_accum_steps gradient_accumulation_steps "
    "num_microbatches",
    "plan.capacity for a rank's tokens, data.max_length for a sequence's": "max_seq_length seq_len "
    "seq_length",
    "plan.min_cp": "min_dynamic_context_parallel_size",
    "plan.policy (dp_balanced: static, default_dynamic_cp: dynamic)": "sequence_packing_scheduler",
    # Ranks.
    "parallel.shard": "use_distributed_optimizer use_torch_fsdp2 use_megatron_fsdp "
    "data_parallel_replicate_degree dp_shard_size strategy data_parallel_sharding_strategy "
    "data_parallel_shard_degree fsdp* deepspeed* zero*",
    "parallel.shard, and plan.max_cp for context parallelism": "parallelism_config "
    "parallelism_config_file device_mesh",
    "parallel.ranks": "num_gpus n_gpus_per_node gpus num_processes ngpu n_gpu tpu_num_cores "
    "nproc_per_node world_size",
    ": start the command with torchrun on each machine": "nnodes num_nodes num_machines",
    ": torchrun tells each process its rank": "local_rank node_rank",
    ": NCCL on GPUs and gloo on CPUs": "ddp_backend distributed_backend backend",
    ": ranks wait for each other parallel.timeout_min minutes": "ddp_timeout nccl_timeout "
    "distributed_timeout_minutes init_timeout_seconds train_timeout_seconds",
    "parallel.tp": "tensor_parallel_size tp_size tensor_model_parallel_size tensor_parallel "
    "tensor_parallel_degree",
    ": with parallel.tp above 1 the rows between layers are always split over the TP ranks": ""
    "sequence_parallel enable_sequence_parallel disable_sequence_parallel",
    ": the communication of parallel.tp is not overlapped with products yet": ""
    "enable_async_tensor_parallel tp_comm_overlap",
    ": an expert is never split; parallel.ep splits experts over ranks, TP ranks included": "etp "
    "etp_size expert_tensor_parallel_*",
    "parallel.pp": "pp_size pipeline_parallel_* pipeline_model_parallel_*",
    "parallel.vpp": "virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank",
    "parallel.layout": "num_layers_per_virtual_pipeline_stage pipeline_model_parallel_layout",
    ": parallel.vpp above 1 interleaves, else it is 1F1B": "pipeline_parallel_schedule",
    "parallel.ep": "ep_size expert_model_parallel_size expert_parallel_degree expert_parallel_size "
    "expert_parallel",
    ": FSDP2 overlaps communication by itself": "overlap_grad_reduce overlap_param_gather",
    ": accelerate is not used; `longshore train` starts its ranks": "accelerator_config "
    "accelerate_config",
    ": offloading parameters or activations to the CPU is not supported yet; parallel.shard=zero3 "
    "and train.recompute=blocks save memory": "activation_offloading cpu_offload "
    "enable_cpu_offload param_offload optimizer_offload offload optimizer_cpu_offload",
    "train.recompute=blocks": "activation_checkpointing enable_gradient_checkpointing "
    "activation_checkpoint gradient_checkpointing* recompute_*",
    ": gradients are summed once a step; parallel.shard says what is split": "ddp_*",
    # Learning.
    "train.lr": "lr_max peak_lr base_lr initial_lr learning_rate",
    "train.epochs": "num_epochs n_epochs total_epochs max_epochs nb_epochs num_train_epochs",
    "train.steps": "total_training_steps training_steps num_steps num_train_steps max_iters "
    "total_steps max_steps train_iters",
    "train.steps, in updates": "train_samples exit_interval",
    "train.schedule": "lr_scheduler decay_type lr_schedule lr_decay_style lr_scheduler_type",
    "train.schedule, and train.min_lr for the share that is left": "lr_scheduler_*",
    "train.min_lr, a share of train.lr": "cosine_min_lr_ratio lr_min min_lr_factor "
    "min_learning_rate lr_end min_lr_ratio",
    "train.warmup, a share of all steps such as 0.03, or their number": "lr_warmup_fraction "
    "warmup_fraction lr_warmup_steps_ratio warmup_ratio",
    "train.warmup, in steps": "lr_warmup_samples num_warmup_steps lr_warmup_steps lr_warmup_iters "
    "warmup_iters warmup_steps",
    ": the learning rate falls until the last step": "lr_decay_iters lr_decay_steps decay_ratio",
    ": the optimizer is AdamW, with train.betas, train.eps and train.weight_decay": "adafactor "
    "implementation muon optim*",
    "train.betas": "beta1 beta2 adam_beta*",
    "train.weight_decay": "wd",
    "train.clip": "gradient_clip_val gradient_clipping grad_clip clip_grad_norm clip_grad "
    "max_grad_norm max_norm",
    "train.dtype": "torch_dtype model_dtype precision half_precision_backend tf32 fp16_opt_level "
    "bfloat16 params_dtype amp bf16 fp16 mixed_precision*",
    "train.dtype, in which evaluation runs too": "bf16_full_eval fp16_full_eval",
    "train.compile, without further options": "torchdynamo use_torch_compile torch_compile "
    "torch_compile_*",
    "train.loss, a name such as dpo or grpo, or a function of yours": "loss_type loss_fn loss_func "
    "compute_loss compute_loss_func",
    "train.loss_count": "loss_agg_mode calculate_per_token_loss loss_reduction",
    ": the loss is divided by the tokens of all ranks; train.loss_count changes that": ""
    "average_tokens_across_devices",
    "train.loss_options, {label_smoothing = 0.1} with train.loss=cross_entropy": ""
    "label_smoothing_factor label_smoothing",
    "train.loss_options, {beta = 0.1} with train.loss=dpo, or {kl = 0.04} with grpo": "beta "
    "dpo_beta kl_*",
    "train.loss_options, {clip_low = 0.2, clip_high = 0.2} with train.loss=grpo or ppo": "epsilon "
    "epsilon_high cliprange clip_ratio*",
    "train.loss_options, {entropy_bonus = 0.01} with train.loss=grpo or ppo": "entropy_coeff "
    "entropy_coef",
    ": noise on embeddings is not supported yet": "neftune_noise_alpha",
    ": an average of the weights is not supported yet": "ema ema_decay use_ema",
    ": only model.lora freezes weights; without it all are trained": "unfrozen_parameters "
    "trainable_modules freeze*",
    ": train.seed gives the same run again; on GPUs kernels may differ in the last bits": ""
    "full_determinism deterministic*",
    "train.seed": "random_seed manual_seed",
    "train.device": "use_cpu no_cuda use_mps_device accelerator",
    "train.eps": "adam_eps adam_epsilon",
    "train.mtp_weight": "mtp_loss_scaling_factor",
    # Evaluation.
    "train.eval_every": "eval_strategy evaluation_strategy do_eval test_freq val_check_interval "
    "evals_per_epoch eval_every_n_steps eval_freq val_interval eval_interval eval_steps",
    ": evaluation comes after every train.eval_every steps, and after the last": "eval_delay "
    "eval_on_start val_before_train",
    ": evaluation takes all held-out data": "eval_iters max_eval_samples limit_val_batches",
    ": evaluation measures the loss, nothing else": "prediction_loss_only include_for_metrics "
    "batch_eval_metrics eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
    "compute_metrics include_inputs_for_metrics do_predict preprocess_logits_for_metrics "
    "predict_with_generate do_bench_eval eval_causal_lm_metrics jit_mode_eval",
    ": choosing the best checkpoint is not supported yet; evals.jsonl has the losses": ""
    "best_metric load_best_model_at_end metric_for_best_model greater_is_better "
    "early_stopping_patience",
    # Output.
    "output.folder": "default_local_dir experiment_name overwrite_output_dir save_dir folder_name "
    "log_dir logging_dir exp_name dump_folder output_dir run_name save",
    "output.save_every": "saves_per_epoch save_freq interval checkpoint_every save_every_n_steps "
    "checkpoint_interval save_interval save_steps",
    "output.keep": "max_ckpt_to_keep max_to_keep max_actor_ckpt_to_keep save_top_k keep_latest_k "
    "save_total_limit",
    ": a run leaves its weights and whole checkpoints": "save_only_model last_save_model_only "
    "no_save_optim save_safetensors ckpt_format async_mode async_save no_load_optim no_load_rng "
    "finetune initial_load_model_only",
    "output.export, a Hugging Face folder": "last_save_in_hf save_hf_format merge_lora export_hf",
    ": longshore export --dtype": "export_dtype",
    ": only rank 0 writes, on a folder that all machines see": "save_on_each_node log_on_each_node",
    ": SIGTERM always ends a run with a checkpoint": "enable_jit_checkpoint exit_duration_in_mins "
    "exit_signal_handler",
    ": a resumed run continues with the data that come next": "ignore_data_skip",
    ": there are no callbacks": "restore_callback_states_from_checkpoint callbacks",
    ": resume a run with --resume": "auto_resume_from_checkpoints auto_resume load_step resume*",
    ": nothing is uploaded; output.export makes a folder for `hf upload`": "hub_* push_to_hub*",
    "output.trackers, tensorboard or wandb": "report_to logger loggers logging enable_tensorboard "
    "enable_wandb use_wandb use_tensorboard tracker log_with wandb swanlab trackio mlflow* comet* "
    "tensorboard*",
    ": a tracker has its own variables, such as WANDB_PROJECT": "project project_name trackio_* "
    "wandb_*",
    ": metrics.jsonl has every step; output.display says what is shown": "log_interval log_freq "
    "log_every_n_steps include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics "
    "log_throughput log_completions log_params_norm log_entropy logging_*",
    "output.display": "disable_tqdm verbose progress_bar quiet log_level*",
    ": a loss that is not finite ends the run": "logging_nan_inf_filter check_for_nan*",
    ": `longshore train` trains": "do_train",
    ": not needed: plan.capacity bounds the memory of a step": "torch_empty_cache_steps gc_freq "
    "empty_unused_memory_level gc_steps",
    ": profiling is not supported yet; `longshore report` shows where a run's time went": ""
    "enable_profiling use_pytorch_profiler nsys profile*",
    ": `longshore doctor` looks at the machine": "debug",
    ": --print-config prints the configuration, checks it and stops; `longshore plan` shows plans "
    "of your lengths": "dry_run",
    ": a recipe is a TOML file, named alone: longshore train RECIPE.toml": "config config_file "
    "config_path recipe",
    ": training reads answers that were sampled before; data.group keeps those of one prompt in "
    "one step": "num_generations num_samples_per_prompt n_samples_per_prompt",
    "output.save_every, and output.keep=0 for no checkpoint at all": "save_strategy",
}

ANSWERS = by_word(WORDS_BY_ANSWER)
FOREIGN_KEYS = {word: answer for word, answer in ANSWERS.items() if word[-1] != "*"}
FOREIGN_PREFIXES = {word[:-1]: answer for word, answer in ANSWERS.items() if word[-1] == "*"}
FOREIGN_VALUES = by_word(
    {
        "bfloat16": "bf16 fp16",
        "float32": "fp32",
        "float64": "fp64",
        "dynamic": "default_dynamic_cp",
        "static": "dp_balanced",
        "blocks": "full true",
        "none": "false ddp",
        "heads": "ulysses",
        "gather": "allgather",
        "zero3": "fsdp",
    }
)
FOREIGN_SECTIONS = by_word(
    {
        "data": "dataset",
        "parallel": "parallelism",
        "train": "lr_scheduler optimizer training",
        "output": "checkpoint job logging metrics",
    }
)


def all_keys() -> list[str]:
    """Every key as section.key."""
    return [f"{name}.{f.name}" for name, kind in SECTIONS.items() for f in fields(kind)]


def foreign_answer(word: str) -> str:
    """The answer to a word of another system, alone or by its family; "" if it is of none."""
    families = (answer for start, answer in FOREIGN_PREFIXES.items() if word.startswith(start))
    return FOREIGN_KEYS.get(word) or next(families, "")


def answer_key(key: str, *, typed: str = "") -> str:
    """The answer to an unknown section.key. typed: as the user wrote it, where that differs."""
    typed = typed or key
    word = key.rpartition(".")[2].lower().replace("-", "_")
    known = all_keys()
    is_ours = any(key.endswith(f".{word}") for key in known)
    if not is_ours and (foreign := foreign_answer(word)):
        return f"there is no {typed}" + (foreign if foreign[0] == ":" else f"; use {foreign}")
    section = key.partition(".")[0].lower()
    home = FOREIGN_SECTIONS.get(section, section)
    ours = [key for key in known if key.startswith(f"{home}.")]
    for keys, likeness in ((ours, 1.0), (known, 1.0), (ours, 0.7), (known, 0.75)):
        names = [key.rpartition(".")[2] for key in keys]
        if near := difflib.get_close_matches(word, names, n=1, cutoff=likeness):
            return f"there is no {typed}; did you mean {keys[names.index(near[0])]}?"
    if section in SECTIONS:
        names = [key.rpartition(".")[2] for key in ours]
        return f"there is no {typed}; [{section}] has {', '.join(names)}"
    return answer_section(key.partition(".")[0])


def answer_section(typed: str) -> str:
    """The answer to an unknown section."""
    near = difflib.get_close_matches(typed.lower(), [*SECTIONS], n=1)
    if meant := FOREIGN_SECTIONS.get(typed.lower()) or "".join(near):
        return f"there is no section [{typed}]; did you mean [{meant}]?"
    return f"there is no section [{typed}]; the sections are {', '.join(SECTIONS)}"
