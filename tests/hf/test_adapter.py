"""Models of transformers in one process: adapted, refused, read and written."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.hf.folders import (
    SIZES,
    change_tensors,
    cohere,
    deepseek,
    exaone_moe,
    gemma2,
    gemma3,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    load,
    qwen3,
    qwen3_moe,
)
from tests.lazy import Lazy, transformers
from torch import nn

from longshore.batch import whole_context
from longshore.hf.adapter import adapt, check_transformers
from longshore.hf.generic_keys import describe_decoder
from longshore.hf.transformers_model import adapted, empty_model
from longshore.hf.transformers_weights import (
    fill_transformers,
    open_transformers,
    shapes_of,
    write_transformers,
)
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.pipeline import saved_buffers

modeling_qwen3 = Lazy("transformers.models.qwen3.modeling_qwen3")
LENGTHS = (7, 1, 12)
MODELS = {"qwen3": qwen3, "qwen3_moe": qwen3_moe, "gemma3": gemma3, "gpt_oss": gpt_oss}
RENAMED = {"gpt_neox": gpt_neox, "exaone_moe": exaone_moe}
CHANGED_LOGITS = {"gemma2": gemma2, "granite": granite, "cohere": cohere}


def ids_of(lengths):
    return torch.arange(sum(lengths)) * 7 % 61


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *CHANGED_LOGITS])
def test_packed_logits_are_those_of_each_sequence_alone(tmp_path, name):
    {**MODELS, **CHANGED_LOGITS}[name](tmp_path)
    theirs, ids = load(tmp_path), ids_of(LENGTHS)
    with torch.no_grad():
        expected = [theirs(part[None]).logits[0] for part in ids.split(LENGTHS)]
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    model = adapt(hf)
    with torch.no_grad():
        logits = model(ids, whole_context(LENGTHS)).values
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-4, atol=1e-4)
    assert len(model.blocks()) == 3
    names = {key for key, _ in hf.named_parameters()}
    assert {key for key, _ in model.named_parameters()} == names


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *RENAMED])
def test_streamed_in_and_out_without_a_changed_byte(tmp_path, name):
    {**MODELS, **RENAMED}[name](tmp_path / "base", shard="20KB")
    hf = empty_model(str(tmp_path / "base"))
    assert all(parameter.is_meta for parameter in hf.parameters())
    assert not any(buffer.is_meta for buffer in hf.buffers())
    model = adapted(hf, describe_decoder(hf.config.to_dict()))
    fill_transformers(model, torch.device("cpu"), tmp_path / "base")
    ids = ids_of(LENGTHS)
    with torch.no_grad():
        logits = model(ids, whole_context(LENGTHS)).values
        expected = [load(tmp_path / "base")(part[None]).logits[0] for part in ids.split(LENGTHS)]
    torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-4, atol=1e-4)
    stream = [*model.named_parameters(), *saved_buffers(model)]
    write_transformers(tmp_path / "new", stream, base=tmp_path / "base", tied=model.tied)
    before, after = (files_of(tmp_path / folder) for folder in ("base", "new"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    texts = [(tmp_path / folder / "config.json").read_text() for folder in ("base", "new")]
    assert texts[0] == texts[1]


def test_buffers_are_as_wide_as_in_the_files(tmp_path):
    """A routing bias is float32 beside bfloat16 weights, and is written as it was read."""
    base = tmp_path / "base"
    deepseek(base)
    change_tensors(base, half_but_biases)
    keys = {**config_of(base), "dtype": "bfloat16"}
    (base / "config.json").write_text(json.dumps(keys))
    model = adapted(empty_model(str(base)), describe_decoder(keys))
    fill_transformers(model, torch.device("cpu"), base)
    tensors = [*model.named_parameters(), *saved_buffers(model)]
    write_transformers(tmp_path / "new", tensors, base=base, tied=model.tied, dtype=torch.bfloat16)
    before, after = files_of(base), files_of(tmp_path / "new")
    biases = [name for name in before if name.endswith("e_score_correction_bias")]
    assert biases
    assert all(before[name].dtype == torch.float32 for name in biases)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(before[name].dtype == after[name].dtype for name in before)


def half_but_biases(tensors):
    tensors.update({name: t.bfloat16() for name, t in tensors.items() if "bias" not in name})


def files_of(folder):
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def test_folders_that_do_not_fit(tmp_path):
    llama(tmp_path)
    shapes = shapes_of(load(tmp_path))
    tensors = files_of(tmp_path)
    tensors["model.extra"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing model.norm.weight; unknown model.extra"):
        open_transformers(tmp_path, shapes, tied=False)
    with pytest.raises(ValueError, match=r"tensor model.norm.weight is not one of"):
        write_transformers(
            tmp_path / "new", [("model.norm.weight", torch.ones(2))], base=tmp_path, tied=False
        )
    assert not (tmp_path / "new").exists()


def test_a_copy_of_a_tied_head_is_kept_and_compared(tmp_path):
    qwen3(tmp_path / "base", tie_word_embeddings=True)
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    model = adapted(empty_model(str(path.parent)), describe_decoder(config_of(path.parent)))
    fill_transformers(model, torch.device("cpu"), path.parent)
    stream = [*model.named_parameters()]
    write_transformers(tmp_path / "new", stream, base=path.parent, tied=True)
    assert files_of(tmp_path / "new").keys() == tensors.keys()
    tensors["lm_head.weight"] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        fill_transformers(model, torch.device("cpu"), path.parent)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def make_qwen3(**keys):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**{**sizes, **keys}))


def own_mlp(forward):
    """A patch of Qwen3's MLP, so that its layers do something more."""
    plain = modeling_qwen3.Qwen3MLP.forward
    return lambda self, x: forward(self, plain(self, x))


class ListedExperts(nn.Module):
    """Each token uses one of four weights; those that no token chose are not used at all."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(4)])

    def forward(self, x):
        chosen = (10 * x[..., :1].abs()).long() % 4
        return sum(x.where(chosen == i, 0) * self.weights[i] for i in chosen.unique().tolist())


TWO_HEADS = SIZES | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("name", ["helium", "persimmon", "olmoe", "bitnet"])
def test_accepted_with_few_heads_and_without_gradients(name):
    """These models rely on heads that are together as wide as the model, also in a small copy."""
    config = transformers.AutoConfig.for_model(name, **TWO_HEADS)
    hf = transformers.AutoModelForCausalLM.from_config(config)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            check_transformers(hf)
            assert torch.is_grad_enabled() is False


LEAKS = {
    "the token before": own_mlp(lambda self, x: x + x.roll(1, dims=1)),
    "the whole batch": own_mlp(lambda self, x: x - x.mean((0, 1))),
    "its place in the batch": own_mlp(
        lambda self, x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None]
    ),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_layers_that_mix_tokens_are_refused(monkeypatch, leak):
    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", LEAKS[leak])
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM: in a small copy of it, the loss of a"):
        adapt(make_qwen3())


def test_a_key_of_logits_that_means_something_else_is_refused():
    """It multiplies logits by what Granite divides them by."""
    sizes = {**SIZES, "logits_scaling": 2.0, "pad_token_id": None}
    hf = transformers.HyperCLOVAXForCausalLM(transformers.HyperCLOVAXConfig(**sizes))
    with pytest.raises(ValueError, match="the loss of a token differs"):
        adapt(hf)


def test_a_window_that_only_the_mask_knows_is_refused(monkeypatch):
    keys = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    adapt(make_qwen3(**keys))
    forward = modeling_qwen3.Qwen3Attention.forward

    def silent(self, *args, **kwargs):
        window, self.sliding_window = self.sliding_window, None
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.sliding_window = window

    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", silent)
    with pytest.raises(ValueError, match="differs between packed sequences and each sequence"):
        adapt(make_qwen3(**keys))


def test_a_layer_without_the_interface_is_refused(monkeypatch):
    forward = modeling_qwen3.Qwen3Attention.forward

    def own(self, hidden_states, *args, **kwargs):
        if self.layer_idx:
            return self.o_proj(self.q_proj(hidden_states)), None
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", own)
    with pytest.raises(ValueError, match="1 of its 2 layers call transformers' attention"):
        adapt(make_qwen3())


def test_an_unknown_argument_of_attention_is_refused(monkeypatch):
    forward = modeling_qwen3.Qwen3Attention.forward

    def biased(self, *args, **kwargs):
        eager = self.config._attn_implementation == "eager"
        return forward(self, *args, **kwargs, **({} if eager else {"position_bias": 1.0}))

    monkeypatch.setattr(modeling_qwen3.Qwen3Attention, "forward", biased)
    with pytest.raises(ValueError, match="Qwen3Attention passes position_bias to its attention"):
        adapt(make_qwen3())


def test_a_parameter_that_some_tokens_do_not_reach_is_refused(monkeypatch):
    make = modeling_qwen3.Qwen3MLP.__init__

    def init(self, config):
        make(self, config)
        self.experts = ListedExperts()

    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "__init__", init)
    forward = own_mlp(lambda self, x: self.experts(x))
    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", forward)
    with pytest.raises(ValueError, match=r"experts.weights.\d gets no gradient from some tokens"):
        adapt(make_qwen3())


def test_parts_that_are_refused():
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM: attention_dropout is 0.5"):
        adapt(make_qwen3(attention_dropout=0.5))
    hf = make_qwen3()
    hf.lm_head = nn.Linear(32, 61)
    with pytest.raises(ValueError, match="its head has a bias"):
        check_transformers(hf)
    hf = make_qwen3()
    hf.model.layers[1].mlp.drop = nn.Dropout(0.1)
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.drop drops out 0.1"):
        check_transformers(hf)
    hf = make_qwen3()
    hf.model.layers[0].mlp.conv = nn.Conv1d(32, 32, 3)
    with pytest.raises(ValueError, match=r"layers.0.mlp.conv is a Conv1d, which mixes"):
        check_transformers(hf)
    hf = make_qwen3()
    hf.model.layers[1].mlp.up_proj.weight = hf.model.layers[0].mlp.up_proj.weight
    with pytest.raises(ValueError, match=r"up_proj.weight are one parameter; FSDP can share only"):
        check_transformers(hf)


def test_wrong_calls():
    model = adapt(make_qwen3(), check=False)
    with pytest.raises(ValueError, match=r"token ids of shape \(4,\) .* but got shape \(1, 4\)"):
        model(torch.zeros(1, 4, dtype=torch.int64), whole_context((4,)))
    with pytest.raises(ValueError, match="Qwen3Attention got no context"):
        model.model(torch.zeros(1, 4, dtype=torch.int64))


def make_gpt2():
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 61, "n_positions": 8}
    drops = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))


def test_a_table_of_positions_ends():
    """GPT-2 has other names for nearly everything."""
    model = adapt(make_gpt2())
    assert model(ids_of((8, 3)), whole_context((8, 3))).values.shape == (11, 61)
    with pytest.raises(ValueError, match="a sequence has 9 tokens, but the model has a table of 8"):
        model(ids_of((2, 9)), whole_context((2, 9)))


@pytest.mark.slow
def test_compiled_blocks_change_nothing():
    model, ids, ctx = adapt(make_qwen3(), check=False), ids_of((4, 3)), whole_context((4, 3))
    before = model(ids, ctx, ids).values
    for block in model.blocks():
        block.compile(dynamic=True)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(model(ids, ctx, ids).values, before)


def test_parameters_that_stay_float32_are_not_trained_in_bfloat16():
    """Ernie's router; a routing bias, which is a buffer in DeepSeek-V3, stays as it is anyway."""
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 8}
    config = transformers.Ernie4_5_MoeConfig(**sizes, moe_num_experts=4, moe_k=2)
    model = adapt(transformers.Ernie4_5_MoeForCausalLM(config), check=False)
    name = "model.layers.1.mlp.gate.weight"
    assert name in model.wide_names
    choices = Choices(mode="none", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"gate.* must be computed in float32, .*dtype=float32"):
        parallelize(model, None, None, choices=choices)
    assert adapt(make_qwen3(), check=False).wide_names == ()


@pytest.mark.parametrize("most", [False, True])
def test_whole_numbers_are_written_as_they_are(tmp_path, most):
    """A table of hashes has ids past 256, which bfloat16 does not hold."""
    tables = {f"table.{i}": torch.tensor([0, 257, 70_001]) for i in range(3 if most else 1)}
    tensors = tables | {f"other.{i}": torch.ones(2) for i in range(2)}
    base = tmp_path / "base"
    base.mkdir()
    save_file(tensors, base / "model.safetensors")
    (base / "config.json").write_text("{}")
    write_transformers(
        tmp_path / "new", tensors.items(), base=base, tied=False, dtype=torch.bfloat16
    )
    after = files_of(tmp_path / "new")
    assert all(after.pop(name).tolist() == table.tolist() for name, table in tables.items())
    assert [each.dtype for each in after.values()] == [torch.bfloat16] * 2


def test_what_peft_keeps_outside_the_model_is_refused():
    peft = pytest.importorskip("peft")
    task = {"task_type": "CAUSAL_LM"}
    lora = {**task, "target_modules": ["q_proj"], "r": 2}
    configs = {
        "PREFIX_TUNING": peft.PrefixTuningConfig(num_virtual_tokens=2, **task),
        "PROMPT_TUNING": peft.PromptTuningConfig(num_virtual_tokens=2, **task),
        "ADALORA": peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9, **task),
    }
    for kind, config in configs.items():
        with pytest.raises(ValueError, match=f"adapter default is of type {kind}, which does more"):
            adapt(peft.get_peft_model(make_qwen3(), config), check=False)
    dropped = peft.get_peft_model(make_qwen3(), peft.LoraConfig(lora_dropout=0.1, **lora))
    with pytest.raises(ValueError, match=r"has lora_dropout 0.1; .* make it with lora_dropout=0"):
        adapt(dropped)
    headed = peft.LoraConfig(modules_to_save=["lm_head"], **lora)
    with pytest.raises(ValueError, match=r"PEFT has changed its head.* leave lm_head, or"):
        adapt(peft.get_peft_model(make_qwen3(), headed))
    model = adapt(peft.get_peft_model(make_qwen3(), peft.LoraConfig(**lora)), check=False)
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
