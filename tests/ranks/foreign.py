"""Tiny models of transformers in float64, one sequence at a time, and adapted on gloo ranks."""

import importlib
import sys

import torch
from tests.ranks.spine import VOCAB, Outcome, batches_of, whole

from longshore.data.pack import merge, unpack
from longshore.hf.generic_keys import describe_decoder
from longshore.hf.transformers_model import adapted, config_keys, parameters_on_meta
from longshore.parallel.apply import parallelize
from longshore.parallel.shards import fill
from longshore.train.losses import make_loss
from longshore.train.step import Stepper

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "intermediate_size": 20,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
KINDS = ["sliding_attention", "full_attention"]
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS = {
    "llama": ("Llama", "Llama", {}),
    "qwen3": ("Qwen3", "Qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", "Qwen3Moe", {**MOE, "num_experts": 5}),
    "gemma3": (
        "Gemma3",
        "Gemma3Text",
        {"sliding_window": 7, "layer_types": KINDS, "query_pre_attn_scalar": 5},
    ),
    "gemma2": (
        "Gemma2",
        "Gemma2",
        {"sliding_window": 7, "layer_types": KINDS, "final_logit_softcapping": 1.5}
        | {"attn_logit_softcapping": 2.0},
    ),
    "gpt_oss": (
        "GptOss",
        "GptOss",
        {"sliding_window": 7, "layer_types": KINDS, "num_local_experts": 5} | MOE,
    ),
}


class WideFloats:
    """torch, where float32 is float64."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def make_config(name: str):
    import transformers

    _, config, changes = MODELS[name]
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    rope = rope if name == "gpt_oss" else {}
    return getattr(transformers, f"{config}Config")(**{**SIZES, **rope, **changes})


def in_float64(name: str) -> None:
    """Lets the code of a model compute in float64 where it says float32; for the whole process."""
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    module.torch = WideFloats()
    sys.modules["transformers.modeling_rope_utils"].torch = WideFloats()
    torch.Tensor.float = torch.Tensor.double


def make_hf(name: str):
    """The model with random weights, in float64, that transformers trains by itself."""
    import transformers

    config = make_config(name)
    config._attn_implementation = "eager"
    hf = getattr(transformers, f"{MODELS[name][0]}ForCausalLM")(config).double().train()
    hf.set_experts_implementation("eager")
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in hf.parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(0.3 * noise + (0 if parameter.dim() > 1 else parameter))
    return hf


def alone(hf, samples) -> Outcome:
    """Transformers' own forward, one sequence at a time."""
    count = max(1, sum(int(sample.loss_mask[1:].sum()) for sample in samples.values()))
    losses, total = {}, 0.0
    for place, sample in samples.items():
        ids = torch.tensor(sample.tokens.tolist())
        logits = hf(input_ids=ids[None], use_cache=False).logits[0]
        mask = torch.tensor([*sample.loss_mask.tolist()[1:], False])
        nll = torch.nn.functional.cross_entropy(logits, ids.roll(-1), reduction="none")
        nll = nll.where(mask, 0)
        (nll.sum() / count).backward()
        losses[place], total = nll.detach(), total + nll.sum().item() / count
    trained = {name: p for name, p in hf.named_parameters() if p.requires_grad}
    return Outcome(losses, total, {name: p.grad for name, p in trained.items()})


def sharded(name: str, hf, topology, groups, choices, change=None):
    """Made on `meta`, split, and given the weights of hf, as the trainer does it.

    change: what was done to the modules of hf before.
    """
    config = make_config(name)
    with parameters_on_meta():
        empty = type(hf)(config)
        if change is not None:
            change(empty)
    empty.set_experts_implementation("eager")
    model = adapted(empty, describe_decoder(config_keys(config)))
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    parallelize(model, topology, groups, choices=choices)
    weights = hf.state_dict()
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
    fill(model, topology.device, lambda key, _, index: {**buffers, **weights}[key][index])
    return model


def together(name: str, hf, plan, samples, topology, groups, choices, change=None) -> Outcome:
    """The plan on all lanes; every rank gets the whole outcome. change: see sharded."""
    model = sharded(name, hf, topology, groups, choices, change)
    outputs = {}
    model.register_forward_hook(
        lambda module, args, out: outputs.update({id(args[1]): (args[1], out.values)})
    )
    stepper = Stepper(model, None, topology, choices.mode, make_loss(), 0.0, 0.0)
    batches = batches_of(plan, samples, topology.lane)
    losses, _, _ = stepper.gradients(batches, max(1, batches[0].counts.main))
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    gradients = {key: whole(p.grad, None) for key, p in trained.items()}
    pieces = [piece for ctx, out in outputs.values() for piece in unpack(ctx, out.detach())]
    everything = [None] * topology.lanes
    torch.distributed.all_gather_object(everything, (pieces, stepper.weighted(losses).item()))
    nll = merge(plan, [piece for part, _ in everything for piece in part])
    return Outcome(nll, sum(part for _, part in everything), gradients)
