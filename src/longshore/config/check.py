"""Checks of a RunConfig: keys that depend on each other, and files on disk. No torch, and fast.

In: a config and the number of lanes, each the tp · pp ranks that share its tokens. Out: nothing, or
a ValueError of one line that names the key and the way out. Planner, mock data and presets have
checks of their own: plan.max_cp 8 on 4 lanes gives "plan.max_cp is 8, but there are only 4 lanes".

What is legal can also be asked: the functions *_refusals yield why a setting is refused. Checks
raise the first reason; `longshore advise` proposes what has none. With 8 heads parallel.tp may be
1, 2, 4 or 8; with 2 lanes, tp 2 and layers of 6 experts parallel.ep may be 1 or 2.

The decoder of a run is that of a preset, of a checkpoint, or of the user's module, with the LoRA
factors of model.lora: {rank = 8, targets = ["q_proj"]} is LoRAConfig(8, 16.0, ("q_proj",)).
"""

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longshore.arch.as_json import config_from_json, config_to_json
from longshore.arch.costs import flops_cost, make_layout, needs_curve, stage_costs
from longshore.arch.decoder import (
    ALL_LINEAR,
    DecoderConfig,
    LoRAConfig,
    decoder_on_tp_rank,
    ep_refusals,
    has_experts,
    tp_refusals,
    with_balance,
)
from longshore.arch.part import Sharing
from longshore.config.check_data import check_data, known_longest
from longshore.config.schema import (
    TEXTS,
    Kind,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    in_keys,
    listed,
    number,
    whole,
)
from longshore.files import read_json_object
from longshore.plan.cost import BUILT_IN, CostProfile, load_profile, names_machine
from longshore.plan.layout import Layout, layout_stages
from longshore.plan.planner import PlaceError, plan_setting, plan_step
from longshore.plan.shapes import make_buckets, sync_refusals
from longshore.plan.types import DEFAULT_POLICY, Axes, PlanSetting, policy_named, rank_refusals
from longshore.settings import GraphLayer, names_of
from longshore.user_code import (
    check_module_exists,
    describe_error,
    load_function,
    load_module,
    load_object,
)

WITHOUT = {"tp": "tensor parallelism", "ep": "expert parallelism", "pp": "pipelines"}
MACHINE_COSTS = "longshore.advisor.step_time:model_cost"
"""What a model costs on a machine. Named, not imported: only runs that name a machine need it."""
ALL = "all"
NO_GPU = "graph.layers needs a GPU, and this run is on a CPU; leave graph.layers out"
LORA_KINDS: dict[str, Kind] = {
    "rank": whole(0, 1 << 16),
    "alpha": number(0, above=True),
    "targets": TEXTS,
}


def refuse(refusals: Iterator[str]) -> None:
    """Raises the first reason, if there is one."""
    if why := next(refusals, ""):
        raise ValueError(why)


def code_refusals(config: RunConfig) -> Iterator[str]:
    """What models that run as transformers wrote them cannot have."""
    model = config.model
    if model.code == "longshore":
        return
    if not model.from_hf:
        yield (
            "model.code=transformers runs the code of a Hugging Face checkpoint; give its folder "
            "as model.from_hf, or leave model.code out"
        )
    for name in ("module", "aux_weight", "bias_update"):
        if getattr(model, name) not in ("", "auto"):
            yield (
                f"model.{name} works only with Longshore's own models; leave it out, or "
                "model.code=transformers"
            )
    for name, what in WITHOUT.items():
        if (size := getattr(config.parallel, name)) > 1:
            yield (
                f"parallel.{name} is {size}, but model.code=transformers has no {what}; set "
                f"parallel.{name}=1, or use model.code=longshore"
            )
    if config.graph.layers:
        yield (
            "graph.layers works only with Longshore's own models; leave it out, or use "
            "model.code=longshore"
        )
    if importlib.util.find_spec("transformers") is None:
        yield ("model.code=transformers needs the package transformers; install longshore[hf]")


def parallel_refusals(config: RunConfig, decoder: DecoderConfig, *, lanes: int) -> Iterator[str]:
    """What parallel.tp and parallel.ep are refused for: by the model, or by the ranks."""
    ep, tp = config.parallel.ep, config.parallel.tp
    yield from tp_refusals(decoder, tp)
    yield from ep_refusals(decoder, ep)
    yield from sync_refusals(config.plan.sync, pp=config.parallel.pp, ep=ep)
    yield from rank_refusals(lanes=lanes, tp=tp, ep=ep)


def graph_refusals(config: RunConfig, decoder: DecoderConfig) -> Iterator[str]:
    """What graphs do not work with; nothing where they are off."""
    if not config.graph.layers:
        return
    yield from _layer_refusals(config.graph.layers, graph_parts(decoder))
    if decoder.residuals is not None:
        yield (
            "graph.layers does not work with hyper-connections, whose weights FSDP gathers "
            "inside each layer; leave graph.layers out"
        )
    if config.parallel.pp > 1:
        yield (
            f"graph.layers does not work with parallel.pp {config.parallel.pp}: a pipeline runs "
            "several micro-batches at a time, each would need buffers of its own; use "
            "parallel.pp=1, or leave graph.layers out"
        )
    if config.parallel.tp > 1:
        yield (
            f"graph.layers does not work with parallel.tp {config.parallel.tp}: TP ranks "
            "communicate inside each layer, which would need NCCL's calls captured in the graph; "
            "use parallel.tp=1, or leave graph.layers out"
        )
    if config.train.compile is True:
        yield (
            "graph.layers does not work with train.compile=true, which fuses across the parts "
            "that are replayed; leave one of them out"
        )
    if config.train.device == "cpu":
        yield NO_GPU


def _layer_refusals(given: Sequence[str], has: Sequence[str]) -> Iterator[str]:
    """given: graph.layers. has: the kinds of parts of the model that can be graphed."""
    known = tuple(dict.fromkeys((*names_of(GraphLayer), *has)))
    if "step" in given:
        yield (
            "graph.layers=step would capture a whole step, which is not possible: packs give "
            "every round other shapes, FSDP's communication stays outside of graphs, and so does "
            "a micro-batch that has to run eagerly; name parts of layers: graph.layers=all, or "
            f"some of {', '.join(known)}"
        )
    for name in given:
        if name not in (*known, ALL):
            yield f"graph.layers: unknown part {name!r}; it may be {listed((*known, ALL))}"
        elif has and name not in (*has, ALL):
            yield f"graph.layers: this model has no part {name!r}; it has {listed(has, 'and')}"
    if not has:
        yield (
            f"graph.layers: no part of this model can be graphed (known are {', '.join(known)}); "
            "leave graph.layers out"
        )


def graph_parts(decoder: DecoderConfig) -> tuple[str, ...]:
    """The parts that graphs serve in this model, in GraphLayer's order, a user's own last."""
    present = [part.graph_layer for part in decoder.parts if part.graph_layer]
    known = dict.fromkeys((*names_of(GraphLayer), *present))
    return tuple(name for name in known if name in present)


def graph_layers(config: RunConfig, decoder: DecoderConfig) -> tuple[str, ...]:
    """The kinds of parts that are graphed; none: graphs are off."""
    given, has = config.graph.layers, graph_parts(decoder)
    if not given:
        return ()
    refuse(_layer_refusals(given, has))
    return tuple(name for name in has if name in given or ALL in given)


def lora_config(table: Mapping[str, Any]) -> LoRAConfig | None:
    """The factors that model.lora asks for; None if it is off."""
    values = {}
    for name, value in table.items():
        if name not in LORA_KINDS:
            raise ValueError(
                f"there is no model.lora.{name}; model.lora has {listed([*LORA_KINDS])}"
            )
        values[name] = LORA_KINDS[name].read(value)
        if values[name] is None:
            raise ValueError(f"model.lora.{name} is {value!r}; it must be {LORA_KINDS[name].wants}")
    if table and "rank" not in table:
        raise ValueError("model.lora has no rank; add model.lora.rank=8, or 0 for no factors")
    rank = values.get("rank", 0)
    if not rank:
        return None
    targets = values.get("targets", (ALL_LINEAR,))
    if not targets:
        raise ValueError(
            "model.lora.targets is empty; name modules, such as q_proj,v_proj, or leave it out "
            "for all linear layers"
        )
    return LoRAConfig(rank, values.get("alpha", 2.0 * rank), targets)


def lora_refusals(config: RunConfig, decoder: DecoderConfig) -> Iterator[str]:
    """Unknown targets, and what factors do not work with; nothing without LoRA."""
    if decoder.lora is None:
        return
    if config.graph.layers:
        yield "graph.layers does not work with model.lora; leave one of them out"
    if decoder.lora.targets == (ALL_LINEAR,) or config.model.code == "transformers":
        return  # names of transformers' modules are checked once the model is made
    from longshore.model.lora import target_refusals  # imports torch

    yield from target_refusals(decoder)


def check_config(config: RunConfig, ranks: int) -> None:
    """All that can be checked before torch is imported."""
    _check_model(config.model)
    refuse(code_refusals(config))
    decoder = decoder_config(config.model)
    lanes = lanes_of(config, ranks)
    refuse(parallel_refusals(config, decoder, lanes=lanes))
    if config.model.code == "longshore":
        _check_written(config, decoder)
    _check_train(config, decoder)
    refuse(lora_refusals(config, decoder))
    refuse(graph_refusals(config, decoder))
    _check_plan(config, lanes, decoder)
    check_data(config, decoder.vocab_size)
    if longest := known_longest(config):
        check_longest(config, lanes, longest)
    _check_evaluation(config)
    for name in config.output.trackers:
        if name not in ("tensorboard", "wandb"):
            raise ValueError(
                f"output.trackers: unknown tracker {name!r}; known are tensorboard and wandb"
            )


def lanes_of(config: RunConfig, ranks: int) -> int:
    """How many lanes a run has: each has tp · pp of its ranks."""
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


def pipeline_layout(config: RunConfig, decoder: DecoderConfig) -> Layout:
    """The stages of the run's pipeline: one without it; by hand, or balanced by cost."""
    pp, vpp, layout = config.parallel.pp, config.parallel.vpp, config.parallel.layout
    if pp == 1 and (vpp > 1 or layout):
        name = "vpp" if vpp > 1 else "layout"
        raise ValueError(f"parallel.{name} needs a pipeline; set parallel.pp to 2 or more")
    if layout and vpp == 1:
        vpp = max(1, layout_stages(layout) // pp)
    return make_layout(decoder, pp=pp, vpp=vpp, text=layout)


def decoder_config(model: ModelConfig) -> DecoderConfig:
    """The decoder of a preset, a checkpoint or the user's module, experts balanced as asked for."""
    from longshore.arch.presets import preset
    from longshore.hf.config_file import CONFIG, read_config

    if model.code == "transformers":
        from longshore.hf.generic_keys import check_keys, describe_decoder

        with in_keys("model.from_hf"):
            raw = read_json_object(Path(model.from_hf) / CONFIG)
            check_keys(raw)
            return replace(describe_decoder(raw), lora=lora_config(model.lora))
    if model.module:  # importing it registers its mixers, so that from_hf may contain them
        load_module(model.module, "model.module")
    if model.from_hf:
        with in_keys("model.from_hf"):
            decoder = read_config(model.from_hf)
            _check_balance(model, decoder)
    elif model.module:
        decoder = named_decoder(model.module)
    else:
        changed = {"layers": model.layers, "vocab_size": model.vocab_size}
        given = {name: value for name, value in changed.items() if value}
        with in_keys("model.preset"):
            decoder = preset(model.preset, **given)
    aux_weight, bias_update = (
        None if number == "auto" else number for number in (model.aux_weight, model.bias_update)
    )
    decoder = with_balance(decoder, aux_weight=aux_weight, bias_update=bias_update)
    lora = lora_config(model.lora)
    if lora is None:
        return decoder
    if model.bias_update not in ("auto", 0):
        raise ValueError(
            f"model.bias_update is {model.bias_update:g}, but with model.lora a router's bias is "
            "frozen like all of the base; leave model.bias_update out"
        )
    return replace(decoder, lora=lora)


def _check_balance(model: ModelConfig, decoder: DecoderConfig) -> None:
    """A balance loss that transformers would add is never left out silently."""
    from longshore.hf.config_file import asked_balance

    is_open = model.aux_weight == "auto" and has_experts(decoder)
    if is_open and (weight := asked_balance(model.from_hf)):
        raise ValueError(
            "output_router_logits is true in its config.json, so transformers adds a balance "
            f"loss over the whole batch, with the weight router_aux_loss_coef {weight:g}; "
            "Longshore's is per sequence and layer, so choose its weight yourself: "
            "model.aux_weight=0.001, or 0 for none"
        )


def _check_written(config: RunConfig, decoder: DecoderConfig) -> None:
    """Refuses before the first step what could not be written as a Hugging Face folder."""
    from longshore.hf.config_file import choose_architecture, transformers_base

    base = transformers_base(Path(config.model.from_hf) if config.model.from_hf else None)
    if not base and not config.output.export:
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


def planner_setting(
    config: RunConfig, *, lanes: int, capacity: int, decoder: DecoderConfig
) -> PlanSetting:
    """What the run's steps are planned with."""
    plan, layout, align = config.plan, pipeline_layout(config, decoder), lane_align(config)
    cost = run_cost(config, decoder, lanes=lanes, capacity=capacity)
    tp, ep = config.parallel.tp, config.parallel.ep
    # How stages share a round's cost matters with a pipeline, or experts over ranks.
    shares = layout.pp > 1 or ep > 1
    recompute = config.train.recompute == "blocks"
    return plan_setting(
        Axes(lanes=lanes, tp=tp, pp=layout.pp, vpp=layout.vpp, ep=ep),
        capacity=capacity,
        # The data's packs come with each step; without them, as for held-out data, any policy does.
        policy=DEFAULT_POLICY if policy_named(plan.policy).needs_packs else plan.policy,
        sync=plan.sync,
        profile=cost.on_ranks(tp=tp, pp=layout.pp),
        cp_size=plan.cp_size or None,
        min_cp=plan.min_cp,
        max_cp=plan.max_cp or None,
        cp_sizes=plan.cp_sizes,
        heads=shared_heads(decoder, config.parallel),
        max_sequences=plan.max_sequences or None,
        align=align,
        buckets=make_buckets(capacity, align=align, count=plan.buckets) if plan.buckets else (),
        layout=layout if shares else None,
        stage_costs=stage_costs(decoder, layout, recompute=recompute) if shares else None,
    )


def run_cost(
    config: RunConfig, decoder: DecoderConfig, *, lanes: int, capacity: int
) -> CostProfile:
    """The whole model on one GPU: built in, of plan.cost, or of its machine and this model."""
    cost = config.plan.cost
    if not cost:
        return flops_cost(decoder) if needs_curve(decoder) else BUILT_IN
    with in_keys("plan.cost"):
        if not names_machine(cost):
            return load_profile(cost)
        dtype, shard = config.train.dtype, config.parallel.shard
        profile: CostProfile = load_function(MACHINE_COSTS, "plan.cost")(
            cost,
            decoder,
            lanes=lanes,
            capacity=capacity,
            shard=("zero3" if lanes > 1 else "none") if shard == "auto" else shard,
            dtype=None if dtype == "auto" else dtype,
            recompute=config.train.recompute == "blocks",
            ep=config.parallel.ep,
        )
        return profile


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
        try:
            _try_plan(config, lanes, capacity=capacity, longest=longest)
        except PlaceError as error:
            raise ValueError(f"the longest sequence{error.problem}") from None


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
        from longshore.hf.tensor_map import refuse_quantized_files

        path = Path(model.from_hf)
        if not path.is_dir():
            raise ValueError(
                f"model.from_hf: there is no folder {model.from_hf}; download a model of the "
                "Hugging Face Hub first: hf download NAME --local-dir FOLDER"
            )
        if not (path / "config.json").is_file():
            raise ValueError(
                f"model.from_hf: {path} has no config.json; name a Hugging Face checkpoint folder"
            )
        with in_keys("model.from_hf"):
            refuse_quantized_files(path)


def _check_train(config: RunConfig, decoder: DecoderConfig) -> None:
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
            check_module_exists(function, f"train.{name}")
    # Depths of multi-token prediction train nll, which also makes bad answers likelier.
    if train.loss in ("dpo", "grpo", "ppo") and decoder.mtp and train.mtp_weight:
        raise ValueError(
            f"train.loss is {train.loss}, but train.mtp_weight {train.mtp_weight:g} trains the "
            f"model's {len(decoder.mtp)} depth{'s' if len(decoder.mtp) > 1 else ''} of multi-token "
            "prediction on the likelihood of all answers, bad ones too; set train.mtp_weight=0"
        )


def _check_plan(config: RunConfig, lanes: int, decoder: DecoderConfig) -> None:
    plan, tp, align = config.plan, config.parallel.tp, lane_align(config)
    if plan.sync == "step" and config.parallel.shard == "zero3":
        raise ValueError(
            "plan.sync=step does not work with parallel.shard=zero3, whose ranks wait for each "
            "other in every round; use plan.sync=round, or parallel.shard=zero2"
        )
    heads = shared_heads(decoder, config.parallel)
    for name in ("cp_size", "min_cp", "max_cp"):
        size = getattr(plan, name)
        if heads and size and heads % size:
            whose = f" (of each of {tp} TP ranks)" if tp > 1 else ""
            raise ValueError(
                f"plan.{name} is {size}, which does not divide the {heads} heads that ranks split "
                f"with parallel.attention=heads or parallel.scan=heads{whose}; change plan.{name}, "
                "or use parallel.attention=gather and parallel.scan=states"
            )
    capacity = plan.capacity if isinstance(plan.capacity, int) else max(align, 1 << 20)
    if tp > 1 and capacity < align:  # without TP the planner says all
        raise ValueError(
            f"plan.capacity is {capacity}, but with parallel.tp {tp} and plan.align {plan.align} a "
            f"lane's tokens are a multiple of {align}; raise plan.capacity to {align}"
        )
    # One token fits anywhere, so only the settings can be wrong.
    _try_plan(config, lanes, capacity=capacity, longest=1)


def _try_plan(config: RunConfig, lanes: int, *, capacity: int, longest: int) -> None:
    decoder = decoder_config(config.model)
    plan_step([longest], planner_setting(config, lanes=lanes, capacity=capacity, decoder=decoder))


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


def named_decoder(name: str) -> DecoderConfig:
    """The decoder that "module:name" is, or returns; it can be saved and read back."""
    value = load_object(name, "model.module", wanted="a function that returns a DecoderConfig")
    verb = "is"
    if callable(value):
        verb = "returned"
        try:
            value = value()
        except Exception as error:
            raise ValueError(f"model.module: {name} raised {describe_error(error)}") from error
    if not isinstance(value, DecoderConfig):
        raise ValueError(
            f"model.module: {name} {verb} a {type(value).__name__}; it must be a DecoderConfig, "
            "or a function without arguments that returns one"
        )
    try:  # refuses before the first step what could not be saved after the last
        read_back = config_from_json(config_to_json(value))
    except ValueError as error:
        raise ValueError(f"model.module: {name}: {error}") from None
    if read_back != value:
        raise ValueError(
            f"model.module: {name}: its config changes when it is saved as JSON and read again; "
            "declare its classes with @dataclass(frozen=True), which compares them by their fields"
        )
    return value
