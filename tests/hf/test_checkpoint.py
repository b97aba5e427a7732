"""Import, then export: no byte changes, and transformers loads what we wrote."""

import json
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.hf.folders import LLAMA3, YARN, llama, load, qwen3

from longshore.arch.presets import preset
from longshore.arch.rope import LinearScaling, RopeConfig
from longshore.hf import checkpoint
from longshore.hf.checkpoint import open_weights, tensor_shapes, write_checkpoint
from longshore.hf.config_file import read_config

IDS = torch.arange(1, 30)[None]


def tensors_of(folder):
    """Every tensor of the folder, as it lies in its files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same_tensors(folder, other):
    ours, theirs = tensors_of(folder), tensors_of(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8)), name


def copy(folder, to, **options):
    write_checkpoint(to, read_config(folder), open_weights(folder).items(), base=folder, **options)


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (qwen3, {}),
        (qwen3, {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 3}),
        (llama, {"rope_parameters": LLAMA3, "attention_bias": True}),
        (llama, {"rope_parameters": YARN}),
    ],
)
@torch.no_grad()
def test_import_and_export_change_no_byte(tmp_path, make, keys, shard):
    base, made = tmp_path / "base", tmp_path / "made"
    make(base, shard=shard, **keys)
    assert (base / "model.safetensors.index.json").exists() == (shard == "20KB")
    copy(base, made, shard_bytes=30_000)
    assert_same_tensors(base, made)
    assert (made / "config.json").read_bytes() == (base / "config.json").read_bytes()
    assert torch.equal(load(base)(IDS).logits, load(made)(IDS).logits)


def test_shards_hold_at_most_their_bytes_and_the_index_names_all(tmp_path):
    llama(tmp_path / "base")
    copy(tmp_path / "base", tmp_path / "made", shard_bytes=10_000)
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "made").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 3
    tensors = tensors_of(tmp_path / "made")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for path in files:
        held = load_file(path)
        assert sum(t.nbytes for t in held.values()) <= 10_000
        assert {index["weight_map"][name] for name in held} == {path.name}
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_a_tensor_larger_than_a_shard_gets_one_of_its_own(tmp_path):
    llama(tmp_path / "base")
    copy(tmp_path / "base", tmp_path / "made", shard_bytes=1)
    assert_same_tensors(tmp_path / "base", tmp_path / "made")
    assert all(len(load_file(path)) == 1 for path in (tmp_path / "made").glob("*.safetensors"))


def test_unknown_keys_the_tokenizer_and_generation_settings_are_kept(tmp_path):
    base, made = tmp_path / "base", tmp_path / "made"
    llama(base)
    raw = json.loads((base / "config.json").read_text()) | {"our_own": {"π": [1, None]}}
    (base / "config.json").write_text(json.dumps(raw, ensure_ascii=False), encoding="utf-8")
    (base / "additional_chat_templates").mkdir()
    kept = ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja"]
    kept += ["merges.txt", "additional_chat_templates/tools.jinja"]
    for name in [*kept, "README.md", "optimizer.pt"]:
        (base / name).write_text(f"this is {name}")
    copy(base, made)
    names = {str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()}
    assert names == {*kept, "config.json", "generation_config.json", "model.safetensors"}
    for name in [*kept, "config.json", "generation_config.json"]:
        assert (made / name).read_bytes() == (base / name).read_bytes()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_another_dtype_changes_the_tensors_and_one_key(tmp_path, key):
    base, made = tmp_path / "base", tmp_path / "made"
    qwen3(base)
    raw = json.loads((base / "config.json").read_text())
    raw = {key if old == "dtype" else old: value for old, value in raw.items()}
    (base / "config.json").write_text(json.dumps(raw))
    copy(base, made, dtype=torch.bfloat16)
    assert json.loads((made / "config.json").read_text()) == raw | {key: "bfloat16"}
    wanted = {name: tensor.bfloat16() for name, tensor in tensors_of(base).items()}
    found = tensors_of(made)
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == torch.bfloat16 for name in found)
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert load(made, "auto").dtype == torch.bfloat16


@torch.no_grad()
def test_a_changed_config_is_written_over_that_of_the_base(tmp_path):
    base, made = tmp_path / "base", tmp_path / "made"
    llama(base, rope_parameters=YARN, bos_token_id=5)
    config = read_config(base)
    rope = RopeConfig(theta=77.0, scaling=LinearScaling(factor=2.0))
    layers = [replace(one, mixer=replace(one.mixer, rope=rope)) for one in config.layers]
    config = replace(config, layers=layers, norm_eps=1e-3)
    write_checkpoint(made, config, open_weights(base).items(), base=base)
    assert read_config(made) == config
    theirs = load(made).config
    assert theirs.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 77.0}
    assert (theirs.rms_norm_eps, theirs.bos_token_id) == (1e-3, 5)
    assert theirs.max_position_embeddings == 64


@pytest.mark.parametrize(("name", "kind"), [("tiny-qwen3", "qwen3"), ("tiny-llama", "llama")])
def test_a_model_without_base_is_loaded_by_transformers(tmp_path, name, kind):
    config = preset(name, layers=3)
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in tensor_shapes(config).items()}
    write_checkpoint(tmp_path / "made", config, tensors.items(), base=None, max_length=131072)
    assert read_config(tmp_path / "made") == config
    theirs = load(tmp_path / "made")
    assert theirs.config.model_type == kind
    assert theirs.config.max_position_embeddings == 131072
    assert torch.equal(theirs.model.embed_tokens.weight, tensors["embed.weight"])
    read = open_weights(tmp_path / "made")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_blocks_are_read_alone(tmp_path):
    model = qwen3(tmp_path, shard="20KB")
    weights = open_weights(tmp_path)
    whole = model.model.layers[2].mlp.up_proj.weight
    index = slice(5, 9), slice(2, 3)
    assert torch.equal(weights.block("layers.2.mlp.up_proj.weight", index), whole[index])
    assert torch.equal(weights["layers.2.mlp.up_proj.weight"], whole)
    assert weights.block("norm.weight", (slice(3, 3),)).shape == (0,)
    with pytest.raises(
        ValueError, match=r"60 to 65 of dim 0 of embed\.weight are out of range; .* \(64, 32\)"
    ):
        weights.block("embed.weight", (slice(60, 65),))
    with pytest.raises(KeyError):
        weights["layers.3.mlp.up_proj.weight"]
    assert len(weights) == len(list(weights)) == len(list(model.parameters()))


def test_the_rows_of_a_tied_head_are_the_embeddings(tmp_path):
    model = qwen3(tmp_path, tie_word_embeddings=True)
    weights = open_weights(tmp_path)
    assert torch.equal(
        weights.block("head.weight", (slice(1, 3),)), model.model.embed_tokens.weight[1:3]
    )
    assert "head.weight" not in weights


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_wrong_tensors_are_named_in_one_line(tmp_path):
    llama(tmp_path)

    def break_them(tensors):
        for i in range(3):
            del tensors[f"model.layers.{i}.self_attn.q_proj.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.3.mlp.up_proj.weight"] = torch.ones(1)
        tensors["lm_head.weight"] = torch.ones(64, 31)

    change_tensors(tmp_path, break_them)
    with pytest.raises(ValueError, match="do not fit") as caught:
        open_weights(tmp_path)
    assert str(caught.value) == (
        f"the weights in {tmp_path} do not fit its config: missing "
        "model.layers.0.self_attn.q_proj.weight, model.layers.1.self_attn.q_proj.weight, "
        "model.layers.2.self_attn.q_proj.weight, model.norm.weight; unknown "
        "model.layers.3.mlp.up_proj.weight; of wrong shape lm_head.weight (is (64, 31), must be "
        "(64, 32))"
    )


def test_old_buffers_and_a_tied_head_may_be_there(tmp_path):
    llama(tmp_path, tie_word_embeddings=True)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(tmp_path, add)
    assert "head.weight" not in open_weights(tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(
        ValueError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"
    ):
        open_weights(tmp_path)


def test_a_pickle_is_never_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return (exit, (3,))

    llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, a pickle.*convert it to safetens"):
        open_weights(tmp_path)


def test_a_folder_that_holds_something_is_not_overwritten(tmp_path):
    llama(tmp_path / "base")
    made = tmp_path / "made"
    made.mkdir()
    copy(tmp_path / "base", made)
    with pytest.raises(ValueError, match="is not empty"):
        copy(tmp_path / "base", made)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a folder"):
        copy(tmp_path / "base", tmp_path / "file")


def test_nothing_is_left_when_writing_fails(tmp_path, monkeypatch):
    base = tmp_path / "base"
    llama(base)

    def failing(*args):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "_copy_companions", failing)
    with pytest.raises(OSError, match="disk full"):
        copy(base, tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_stream_must_hold_each_tensor_once(tmp_path):
    llama(tmp_path / "base")
    config, weights = read_config(tmp_path / "base"), open_weights(tmp_path / "base")
    whole = list(weights.items())
    for stream, reason in [
        (whole[:-1], r"missing among the tensors to write: head\.weight"),
        ([*whole, whole[0]], r"tensor embed\.weight was given twice"),
        ([*whole, ("layers.9.mlp.up_proj.weight", whole[0][1])], "is not part of this decoder"),
        ([("embed.weight", whole[0][1][:5])], r"is \(5, 32\); it must be \(64, 32\)"),
        ([], "missing"),
    ]:
        with pytest.raises(ValueError, match=reason):
            write_checkpoint(tmp_path / "made", config, stream, base=tmp_path / "base")
        assert not (tmp_path / "made").exists()


def test_slices_of_one_tensor_are_written_each_alone(tmp_path):
    config = preset("tiny-llama", layers=1)
    shapes = tensor_shapes(config)
    counts = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    pool = torch.arange(float(sum(counts.values()))).split(list(counts.values()))
    tensors = {name: part.view(shapes[name]) for name, part in zip(shapes, pool, strict=True)}
    tensors["layers.0.mlp.up_proj.weight"] = tensors["layers.0.mlp.down_proj.weight"].T
    write_checkpoint(tmp_path / "made", config, tensors.items(), base=None)
    read = open_weights(tmp_path / "made")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_decoder_that_is_not_the_bases_kind_is_refused(tmp_path):
    qwen3(tmp_path / "base")
    config = preset("tiny-llama")
    with pytest.raises(ValueError, match=r"does not fit Qwen3ForCausalLM.*have no norm"):
        write_checkpoint(tmp_path / "made", config, [], base=tmp_path / "base")
