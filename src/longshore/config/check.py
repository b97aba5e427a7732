"""Checks of a RunConfig: keys that depend on each other, and files on disk. No torch, and fast.

In: a config and the number of lanes. Out: nothing, or a ValueError of one line that names the key
and the way out. A lane is the tp · pp ranks that share its tokens. The planner, the mock data and
the presets have checks of their own, whose errors are passed on with keys: plan.max_cp 8 on 4 lanes
gives the planner's "plan.max_cp is 8, but there are only 4 lanes".
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from longshore.arch.cost_source import model_cost
from longshore.arch.cuts import decoder_on_tp_rank
from longshore.arch.decoder import DecoderConfig, has_experts, with_balance
from longshore.arch.flops_cost import flops_cost, needs_curve
from longshore.arch.part import Sharing
from longshore.arch.stages import make_layout, stage_costs
from longshore.config.check_code import check_code, transformers_decoder
from longshore.config.check_data import check_data, known_longest
from longshore.config.check_graph import check_graph
from longshore.config.check_parallel import check_parallel
from longshore.config.located import in_keys, settings_in_keys
from longshore.config.lora import check_lora, check_router_bias, lora_config
from longshore.config.schema import ModelConfig, ParallelConfig, PlanConfig, RunConfig
from longshore.plan.cost import BUILT_IN, CostProfile
from longshore.plan.layout import Layout, layout_stages
from longshore.plan.planner import make_plan
from longshore.plan.policy import DEFAULT_POLICY, policy_named
from longshore.plan.shapes import make_buckets
from longshore.user_code import check_module_exists, load_module

LOWERS_LIKELIHOOD = ("dpo", "grpo", "ppo")
"""Losses that make some of the answers less likely."""


def check_config(config: RunConfig, ranks: int) -> None:
    """All that can be checked before torch is imported."""
    _check_model(config.model)
    check_code(config)
    decoder = decoder_config(config.model)
    lanes = lanes_of(config, ranks)
    check_parallel(config, decoder, lanes=lanes)
    if config.model.code == "longshore":
        _check_written(config, decoder)
    _check_train(config)
    _check_depths(config, decoder)
    check_lora(config, decoder)
    with settings_in_keys():
        check_graph(config, decoder)
    _check_plan(config, lanes, decoder)
    check_data(config, decoder.vocab_size)
    if longest := known_longest(config):
        check_longest(config, lanes, longest)
    _check_evaluation(config)
    _check_trackers(config)


def lanes_of(config: RunConfig, ranks: int) -> int:
    """How many lanes a run of so many ranks has: each has tp · pp ranks."""
    sizes = {"parallel.tp": config.parallel.tp, "parallel.pp": config.parallel.pp}
    each = math.prod(sizes.values())
    lanes, rest = divmod(ranks, each)
    if rest or not lanes:
        keys = [key for key, size in sizes.items() if size > 1]
        asked = " × ".join(f"{key} {sizes[key]}" for key in keys)
        product = f" = {each}" if len(keys) > 1 else ""
        works = " or ".join(str(count * each) for count in (lanes, lanes + 1) if count)
        raise ValueError(
            f"{asked}{product}: the number of ranks must be a multiple of {each}, but there are "
            f"{ranks}; start {works} ranks, or change {' or '.join(keys)}"
        )
    return lanes


def lane_align(config: RunConfig) -> int:
    """What a lane's tokens are padded to a multiple of: TP ranks have equal parts of them."""
    return math.lcm(config.plan.align, config.parallel.tp)


def lane_buckets(config: RunConfig, capacity: int) -> tuple[int, ...]:
    """Token totals that a lane's micro-batch is rounded up to."""
    count = config.plan.buckets
    return make_buckets(capacity, align=lane_align(config), count=count) if count else ()


def pipeline_layout(config: RunConfig, decoder: DecoderConfig) -> Layout:
    """The stages of the run's pipeline: one without it; by hand, or balanced by cost."""
    pp, vpp, layout = config.parallel.pp, config.parallel.vpp, config.parallel.layout
    if pp == 1 and (vpp > 1 or layout):
        name = "vpp" if vpp > 1 else "layout"
        raise ValueError(f"parallel.{name} needs a pipeline; set parallel.pp to 2 or more")
    if layout and vpp == 1:
        vpp = max(1, layout_stages(layout) // pp)
    with settings_in_keys():
        return make_layout(decoder, pp=pp, vpp=vpp, text=layout)


def decoder_config(model: ModelConfig) -> DecoderConfig:
    """The decoder of a preset, a checkpoint or the user's module, experts balanced as asked for."""
    from longshore.arch.presets import preset
    from longshore.config.own_model import named_decoder
    from longshore.hf.config_file import read_config

    if model.code == "transformers":
        return replace(transformers_decoder(model), lora=lora_config(model.lora))
    if model.module:  # importing it registers its mixers, so that from_hf may contain them
        with settings_in_keys():
            load_module(model.module, "module")
    if model.from_hf:
        with in_keys("model.from_hf"):
            decoder = read_config(model.from_hf)
            _check_balance(model, decoder)
    elif model.module:
        with settings_in_keys():
            decoder = named_decoder(model.module)
    else:
        changed = {"layers": model.layers, "vocab_size": model.vocab_size}
        given = {name: value for name, value in changed.items() if value}
        with in_keys("model.preset"):
            decoder = preset(model.preset, **given)
    aux_weight, bias_update = (
        None if number == "auto" else number for number in (model.aux_weight, model.bias_update)
    )
    with in_keys():
        decoder = with_balance(decoder, aux_weight=aux_weight, bias_update=bias_update)
    lora = lora_config(model.lora)
    if lora is None:
        return decoder
    check_router_bias(model)
    return replace(decoder, lora=lora)


def _check_balance(model: ModelConfig, decoder: DecoderConfig) -> None:
    """A balance loss that transformers would add is never left out silently."""
    from longshore.hf.config_file import asked_balance

    if model.aux_weight == "auto" and has_experts(decoder):
        weight = asked_balance(model.from_hf)
        if weight:
            raise ValueError(
                "output_router_logits is true in its config.json, so transformers adds a balance "
                f"loss over the whole batch, with the weight router_aux_loss_coef {weight:g}; "
                "Longshore's is per sequence and layer, so choose its weight yourself: "
                "model.aux_weight=0.001, or 0 for none"
            )


def _check_written(config: RunConfig, decoder: DecoderConfig) -> None:
    """Refuses before the first step what could not be written as a Hugging Face folder."""
    from longshore.hf.config_file import choose_architecture, foreign_base

    export = config.output.export
    base = foreign_base(Path(config.model.from_hf) if config.model.from_hf else None)
    if not base and not export:
        return
    try:
        choose_architecture(decoder.merged(), base)
    except ValueError as error:
        key = "model.from_hf" if base else "output.export"
        after = "; leave output.export out, and write the run with longshore export RUN DIR "
        raise ValueError(
            f"{key}: this model can be trained, but not written as a Hugging Face folder: "
            f"{error}" + ("" if base else f"{after}--format longshore")
        ) from None


def planner_options(
    config: RunConfig, *, lanes: int, capacity: int, decoder: DecoderConfig
) -> dict[str, Any]:
    """What make_plan takes besides the lengths."""
    plan, layout = config.plan, pipeline_layout(config, decoder)
    cost = run_cost(config, decoder, lanes=lanes, capacity=capacity)
    return {
        "lanes": lanes,
        "capacity": capacity,
        # The data's packs come with each step; without them, as for held-out data, any policy does.
        "policy": DEFAULT_POLICY if policy_named(plan.policy).needs_packs else plan.policy,
        "sync": plan.sync,
        "profile": cost.on_ranks(tp=config.parallel.tp, pp=layout.pp),
        "cp_size": plan.cp_size or None,
        "min_cp": plan.min_cp,
        "max_cp": plan.max_cp or None,
        "cp_sizes": plan.cp_sizes,
        "heads": shared_heads(decoder, config.parallel),
        "max_sequences": plan.max_sequences or None,
        "align": lane_align(config),
        "buckets": lane_buckets(config, capacity),
        "tp": config.parallel.tp,
        "ep": config.parallel.ep,
        "pp": layout.pp,
        "vpp": layout.vpp,
        **_stage_options(config, decoder, layout),
    }


def run_cost(
    config: RunConfig, decoder: DecoderConfig, *, lanes: int, capacity: int
) -> CostProfile:
    """The whole model on one GPU: built in, of plan.cost, or of its machine and this model."""
    if not config.plan.cost:
        return flops_cost(decoder) if needs_curve(decoder) else BUILT_IN
    with in_keys("plan.cost"):
        dtype, shard = config.train.dtype, config.parallel.shard
        return model_cost(
            config.plan.cost,
            decoder,
            lanes=lanes,
            capacity=capacity,
            shard=("zero3" if lanes > 1 else "none") if shard == "auto" else shard,
            dtype=None if dtype == "auto" else dtype,
            recompute=config.train.recompute == "blocks",
            ep=config.parallel.ep,
        )


def _stage_options(config: RunConfig, decoder: DecoderConfig, layout: Layout) -> dict[str, Any]:
    """The stages, and how they share a round's cost: with a pipeline, or experts over ranks."""
    if layout.pp == 1 and config.parallel.ep == 1:
        return {}
    recompute = config.train.recompute == "blocks"
    return {"layout": layout, "stage_costs": stage_costs(decoder, layout, recompute=recompute)}


def shared_heads(decoder: DecoderConfig, parallel: ParallelConfig) -> int | None:
    """The heads of a TP rank that a CP size must divide; None if ranks do not split heads."""
    sharing = Sharing(parallel.attention, parallel.scan)
    local = decoder_on_tp_rank(decoder, parallel.tp)
    parts = {part for layer in (*local.layers, *local.mtp) for part in layer.parts}
    return math.gcd(*(heads for part in parts for heads in part.shared_heads(sharing))) or None


def check_longest(config: RunConfig, lanes: int, longest: int) -> None:
    """Refuses data whose longest sequence fits nowhere; nothing while the capacity is "auto"."""
    capacity = config.plan.capacity
    if isinstance(capacity, int):
        with settings_in_keys(where="the longest sequence"):
            _try_plan(config, lanes, capacity=capacity, longest=longest)


def _check_model(model: ModelConfig) -> None:
    others = [name for name in ("from_hf", "module") if getattr(model, name)]
    if not model.preset and not others:
        raise ValueError(
            "no model is given; set model.preset (such as tiny-llama), model.from_hf (a Hugging "
            "Face checkpoint folder) or model.module (your own decoder)"
        )
    if model.preset and others:
        raise ValueError(f"model.preset and model.{others[0]} are both given; leave one out")
    for name in ("layers", "vocab_size"):
        if others and getattr(model, name):
            raise ValueError(
                f"model.{name} only changes a preset; model.{others[0]} already defines it, so "
                f"leave model.{name} out"
            )
    if others == ["module"] and ":" not in model.module:
        raise ValueError(
            f"model.module is {model.module!r}, without the name of a decoder; write "
            f"{model.module}:decoder, or add model.from_hf=FOLDER, a checkpoint with its mixers"
        )
    if model.from_hf:
        if (path := Path(model.from_hf)).is_dir() and not (path / "config.json").is_file():
            raise ValueError(
                f"model.from_hf: {path} has no config.json; name a Hugging Face checkpoint folder"
            )
        if not path.is_dir():
            raise ValueError(
                f"model.from_hf: there is no folder {model.from_hf}; download a model of the "
                "Hugging Face Hub first: hf download NAME --local-dir FOLDER"
            )
        from longshore.hf.quantized import refuse_quantized_files

        with in_keys("model.from_hf"):
            refuse_quantized_files(path)


def _check_train(config: RunConfig) -> None:
    train = config.train
    if train.steps and train.epochs:
        raise ValueError("train.steps and train.epochs are both given; leave one out")
    if train.steps and train.warmup > train.steps:
        raise ValueError(
            f"train.warmup is {train.warmup}, more than train.steps ({train.steps}); lower "
            "train.warmup"
        )
    if train.loss == "distill" and config.parallel.tp > 1:
        raise ValueError(
            "train.loss=distill reads the head's logits, of which each rank of parallel.tp "
            f"{config.parallel.tp} has a part; set parallel.tp to 1"
        )
    if config.data.stream and (train.loss == "dpo" or config.data.group):
        raise ValueError(
            "data.stream draws sequences one by one, so those of a pair or a data.group may come "
            "to different steps; leave data.stream out"
        )
    if train.loss_options and not train.loss:
        raise ValueError("train.loss_options need a train.loss; name one, or leave them out")
    for name in ("loss", "loss_count"):
        if ":" in (function := getattr(train, name)):
            with settings_in_keys():
                check_module_exists(function, name)


def _check_depths(config: RunConfig, decoder: DecoderConfig) -> None:
    """Depths of multi-token prediction train nll, which also makes bad answers likelier."""
    loss, weight = config.train.loss, config.train.mtp_weight
    if loss in LOWERS_LIKELIHOOD and decoder.mtp and weight:
        raise ValueError(
            f"train.loss is {loss}, but train.mtp_weight {weight:g} trains the model's "
            f"{len(decoder.mtp)} depth{'s' if len(decoder.mtp) > 1 else ''} of multi-token "
            "prediction on the likelihood of all answers, bad ones too; set train.mtp_weight=0"
        )


def _check_plan(config: RunConfig, lanes: int, decoder: DecoderConfig) -> None:
    plan, shard = config.plan, config.parallel.shard
    if plan.sync == "step" and shard == "zero3":
        raise ValueError(
            "plan.sync=step does not work with parallel.shard=zero3, whose ranks wait for each "
            "other in every round; use plan.sync=round, or parallel.shard=zero2"
        )
    _check_heads(plan, shared_heads(decoder, config.parallel), tp=config.parallel.tp)
    # One token fits anywhere, so only the settings can be wrong.
    auto = max(lane_align(config), 1 << 20)
    capacity = plan.capacity if isinstance(plan.capacity, int) else auto
    _check_align(config, capacity)
    with settings_in_keys():
        _try_plan(config, lanes, capacity=capacity, longest=1)


def _check_align(config: RunConfig, capacity: int) -> None:
    """TP ranks have equal parts of a lane's tokens; without TP the planner says all."""
    align, tp = lane_align(config), config.parallel.tp
    if tp > 1 and capacity < align:
        raise ValueError(
            f"plan.capacity is {capacity}, but with parallel.tp {tp} and plan.align "
            f"{config.plan.align} a lane's tokens are a multiple of {align}; raise plan.capacity "
            f"to {align}"
        )


def _check_heads(plan: PlanConfig, heads: int | None, *, tp: int) -> None:
    whose = f" (of each of {tp} TP ranks)" if tp > 1 else ""
    for name in ("cp_size", "min_cp", "max_cp"):
        size = getattr(plan, name)
        if heads and size and heads % size:
            raise ValueError(
                f"plan.{name} is {size}, which does not divide the {heads} heads that ranks split "
                f"with parallel.attention=heads or parallel.scan=heads{whose}; change plan.{name}, "
                "or use parallel.attention=gather and parallel.scan=states"
            )


def _try_plan(config: RunConfig, lanes: int, *, capacity: int, longest: int) -> None:
    options = planner_options(
        config, lanes=lanes, capacity=capacity, decoder=decoder_config(config.model)
    )
    make_plan([longest], **options)


def _check_evaluation(config: RunConfig) -> None:
    data = config.data
    if data.eval_path and data.eval_mock:
        raise ValueError("data.eval_path and data.eval_mock are both given; leave one out")
    if data.eval_path and data.eval_count:
        raise ValueError(
            "data.eval_count works only with data.eval_mock; data.eval_path is used whole; leave "
            "data.eval_count out"
        )
    if data.eval_mock.get("mode") == "distribution" and not data.eval_count:
        raise ValueError(
            "data.eval_mock draws from a distribution; give data.eval_count, the number of "
            "sequences to draw"
        )
    if config.train.eval_every and not data.eval_path and not data.eval_mock:
        raise ValueError(
            "train.eval_every needs held-out data; give data.eval_path, or data.eval_mock for "
            "synthetic sequences"
        )


def _check_trackers(config: RunConfig) -> None:
    for name in config.output.trackers:
        if name not in ("tensorboard", "wandb"):
            raise ValueError(
                f"output.trackers: unknown tracker {name!r}; known are tensorboard and wandb"
            )
