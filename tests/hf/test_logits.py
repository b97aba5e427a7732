"""Our decoder, with the weights of a Hugging Face folder, gives the logits of transformers."""

import json

import pytest
import torch
from tests.hf.folders import (
    LLAMA3,
    LONGROPE,
    YARN,
    deepseek,
    llama,
    load,
    mamba2,
    nemotron,
    qwen3,
    qwen3_moe,
    qwen3_next,
)

from longshore.arch.decoder import with_balance
from longshore.batch import whole_context
from longshore.hf.checkpoint import open_weights
from longshore.hf.config_file import read_config
from longshore.model.decoder import Decoder

WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
CASES = {
    "qwen3": (qwen3, {}),
    "qwen3-tied": (qwen3, {"tie_word_embeddings": True}),
    "qwen3-bias": (qwen3, {"attention_bias": True}),
    "qwen3-window": (qwen3, WINDOW),
    "qwen3-theta": (qwen3, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "llama": (llama, {}),
    "llama-bias": (llama, {"attention_bias": True, "rms_norm_eps": 1e-2}),
    "llama-head-dim": (llama, {"head_dim": 16, "num_key_value_heads": 1}),
    "llama-linear": (llama, {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama-llama3": (llama, {"rope_parameters": LLAMA3 | {"rope_theta": 1000.0}}),
    "llama-yarn": (llama, {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        llama,
        {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "llama-longrope": (llama, {"rope_parameters": LONGROPE}),
    "qwen3-moe": (qwen3_moe, {"norm_topk_prob": True}),
    "qwen3-moe-window": (
        qwen3_moe,
        {"use_sliding_window": True, "sliding_window": 4, "attention_bias": True},
    ),
    "qwen3-moe-tied": (qwen3_moe, {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "qwen3-next": (qwen3_next, {}),
    "qwen3-next-half": (
        qwen3_next,
        {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-3, "mlp_only_layers": [1]},
    ),
    "deepseek": (deepseek, {}),
    "deepseek-yarn": (
        deepseek,
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "attention_bias": True},
    ),
    "deepseek-plain": (
        deepseek,
        {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False},
    ),
    "deepseek-one-group": (deepseek, {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "mamba2": (mamba2, {}),
    "mamba2-limits": (
        mamba2,
        {"time_step_limit": (0.5, 0.9), "use_bias": True, "tie_word_embeddings": False},
    ),
    "nemotron": (nemotron, {}),
    "nemotron-limits": (nemotron, {"time_step_min": 0.7, "use_bias": True, "use_conv_bias": False}),
}
LENGTHS = (1, 2, 13, 40)


def our_decoder(folder, dtype=torch.float32):
    model = Decoder(read_config(folder)).to(dtype)
    model.load_state_dict(dict(open_weights(folder)))
    return model.eval()


def packed_logits(model, sequences):
    """Logits of each sequence, all packed together."""
    lengths = [len(ids) for ids in sequences]
    return model(torch.cat(sequences), whole_context(lengths)).values.split(lengths)


def random_ids(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (length,), generator=generator) for length in lengths]


def worst(ours, theirs):
    return max((a - b).abs().max() / b.abs().max() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path, case):
    make, keys = CASES[case]
    make(tmp_path, **keys)
    theirs = load(tmp_path)
    sequences = random_ids(LENGTHS)
    ours = packed_logits(our_decoder(tmp_path), sequences)
    expected = [theirs(ids[None]).logits[0] for ids in sequences]
    assert worst(ours, expected) < 1e-5


@torch.no_grad()
def test_dynamic_positions_follow_each_sequences_own_length(tmp_path):
    keys = {"rope_type": "dynamic", "factor": 3.0}
    llama(tmp_path, rope_parameters=keys, max_position_embeddings=16)
    sequences = random_ids(LENGTHS)
    ours = packed_logits(our_decoder(tmp_path), sequences)
    # Loaded for each sequence: transformers keeps the longest length it has seen.
    expected = [load(tmp_path)(ids[None]).logits[0] for ids in sequences]
    assert worst(ours, expected) < 1e-5


def qwen3_in_float64(monkeypatch):
    """Makes a Qwen3 of transformers, whose norms and positions are float32, compute in float64."""
    from transformers.models.qwen3 import modeling_qwen3 as theirs

    def norm(self, x):
        return (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )

    def turn(self, x, position_ids):
        powers = torch.arange(0, 16, 2, dtype=torch.float64) / 16
        angles = position_ids[..., None].double() * 10_000.0**-powers
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(theirs.Qwen3RMSNorm, "forward", norm)
    monkeypatch.setattr(theirs.Qwen3RotaryEmbedding, "forward", turn)


@torch.no_grad()
def test_logits_agree_in_float64_where_transformers_computes_in_it(tmp_path, monkeypatch):
    qwen3_in_float64(monkeypatch)
    qwen3(tmp_path, use_sliding_window=True, sliding_window=5, max_window_layers=2)
    model = load(tmp_path, torch.float64)
    sequences = random_ids(LENGTHS)
    ours = packed_logits(our_decoder(tmp_path, torch.float64), sequences)
    assert worst(ours, [model(ids[None]).logits[0] for ids in sequences]) < 1e-9


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pad", [3, -61, None])
def test_the_pad_token_gets_the_gradient_of_transformers(tmp_path, monkeypatch, pad, tied):
    """As an input none, also where it is an ordinary token; as an output of a tied head its own."""
    qwen3_in_float64(monkeypatch)
    qwen3(tmp_path, tie_word_embeddings=tied, num_hidden_layers=1)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"pad_token_id": pad}))
    theirs, ours = load(tmp_path, torch.float64), our_decoder(tmp_path, torch.float64)
    ids = torch.tensor([5, 3, 7, 3, 3, 9, 1])
    logits = theirs(ids[None]).logits[0]
    torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum").backward()
    labels = torch.cat([ids[1:], torch.tensor([-100])])
    ours(ids, whole_context([len(ids)]), labels).values.sum().backward()
    got, want = ours.embed.weight.grad, theirs.model.embed_tokens.weight.grad
    assert (got - want).abs().max() <= 1e-9 * want.abs().max()
    assert bool(got[3].any()) == (tied or pad is None)


@pytest.mark.parametrize(("make", "router"), [(qwen3_moe, "mlp.gate"), (qwen3_next, "mlp.gate")])
def test_the_balance_loss_of_one_sequence_and_layer_is_transformers_over_top_k(
    tmp_path, make, router
):
    """Theirs is top_k where experts are even, ours 1."""
    kinds = {"layer_types": ["full_attention"]} if make is qwen3_next else {}
    make(tmp_path, num_hidden_layers=1, mlp_only_layers=[], router_aux_loss_coef=0.5, **kinds)
    theirs, top_k = load(tmp_path), 2
    ids = random_ids([40])[0]
    out = theirs(ids[None], labels=ids[None], output_router_logits=True, use_cache=False)
    out.loss.backward()
    config = with_balance(read_config(tmp_path), aux_weight=0.5 * top_k)
    ours = Decoder(config)
    ours.load_state_dict(dict(open_weights(tmp_path)))
    labels = torch.cat([ids[1:], torch.tensor([-100])])
    output = ours(ids, whole_context([40]), labels)
    balance = sum(routed.auxiliary for routed in output.routed) / len(ids)
    assert torch.allclose(balance, 0.5 * out.aux_loss, rtol=1e-5)
    (output.values.sum() / (len(ids) - 1) + balance).backward()
    want = theirs.get_parameter(f"model.layers.0.{router}.weight").grad
    got = ours.get_parameter("layers.0.mlp.router.weight").grad
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
