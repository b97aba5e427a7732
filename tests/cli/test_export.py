"""`longshore export`: a finished run becomes a folder that transformers loads."""

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.hf.folders import gemma2, llama, load, qwen3
from tests.parallel.my_mixer import MeanConfig

from longshore.arch.decoder import DecoderConfig, LayerConfig, LoRAConfig
from longshore.arch.presets import preset
from longshore.cli.export import register_export
from longshore.cli.options import Parser
from longshore.config.check import decoder_config
from longshore.config.schema import ModelConfig
from longshore.hf.checkpoint import open_weights, tensor_shapes
from longshore.hf.config_file import read_config
from longshore.hf.generic_keys import describe_decoder
from longshore.hf.lora import factor_shapes, find_base
from longshore.hf.weights import save_weights
from longshore.train.checkpoint_files import (
    CheckpointIndex,
    SavedChunk,
    SavedTensor,
    begin_save,
    finish_save,
    partial_folder,
)
from longshore.train.safetensors_stream import write_safetensors


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path):
    """A run that began with a Qwen3 and changed nothing."""
    qwen3(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    weights = open_weights(tmp_path / "base")
    config = read_config(tmp_path / "base")
    save_weights(tmp_path / "run/weights", config, weights.items(), base=tmp_path / "base")
    return tmp_path / "run"


def export(*words):
    parser = Parser("longshore")
    register_export(parser.add_subparsers())
    args = parser.parse_args(["export", *map(str, words)])
    args.run(args)


@pytest.mark.parametrize("part", ["", "weights"])
@torch.no_grad()
def test_a_run_becomes_a_folder_that_transformers_loads(run, capsys, part):
    export(run / part, "made")
    assert capsys.readouterr().out == "wrote made\n"
    ids = torch.arange(20)[None]
    assert torch.equal(load("made")(ids).logits, load("base")(ids).logits)
    for name in ("config.json", "tokenizer.json", "generation_config.json", "model.safetensors"):
        assert (run.parent / "made" / name).is_file()
    made, base = load_file("made/model.safetensors"), load_file("base/model.safetensors")
    assert made.keys() == base.keys()
    assert all(torch.equal(made[name], base[name]) for name in base)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "keep"])
def test_the_dtype_is_the_one_asked_for(run, dtype):
    export(run, "made", "--dtype", dtype)
    wanted = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    made = load_file("made/model.safetensors")
    assert {tensor.dtype for tensor in made.values()} == {wanted}
    raw = json.loads((run.parent / "made/config.json").read_text())
    assert f"torch.{raw['dtype']}" == str(wanted)


def test_a_damaged_weight_is_not_exported(run):
    path = run / "weights" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-7] ^= 16
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"weights\.safetensors is damaged: .* --resume"):
        export(run, "made")
    assert not (run.parent / "made").exists()


def test_a_disk_without_room_is_told_before(run, monkeypatch):
    monkeypatch.setattr("longshore.files.free_bytes", lambda _: 1000)
    with pytest.raises(ValueError, match=r"^made: it takes [\d.]+ MB, but only 1\.0 kB are free"):
        export(run, "made")
    assert sorted(path.name for path in run.parent.iterdir()) == ["base", "run"]


def test_a_run_without_base(tmp_path):
    config = preset("tiny-llama")
    tensors = {name: torch.ones(shape) for name, shape in tensor_shapes(config).items()}
    save_weights("run/weights", config, tensors.items(), base=None)
    export("run", "made", "--max-length", 4096)
    assert read_config("made") == config
    assert load("made").config.max_position_embeddings == 4096


def test_what_transformers_does_not_have_is_written_in_our_own_format(tmp_path):
    config = preset("tiny-hybrid")
    tensors = {name: torch.randn(shape) for name, shape in tensor_shapes(config).items()}
    save_weights("run/weights", config, tensors.items(), base=None)
    with pytest.raises(ValueError, match=r"^no architecture .*; --format longshore writes a folde"):
        export("run", "made")
    export("run", "made", "--format", "longshore")
    assert sorted(path.name for path in tmp_path.glob("made/*")) == [
        "config.json",
        "model.safetensors",
    ]
    assert read_config("made") == config
    weights = open_weights("made")
    assert weights.keys() == tensors.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())


def test_a_mixer_of_the_users_own_needs_its_module_named(monkeypatch):
    layers = (LayerConfig(MeanConfig(), None),)
    config = DecoderConfig(vocab_size=7, width=8, layers=layers)
    tensors = {name: torch.randn(shape) for name, shape in tensor_shapes(config).items()}
    save_weights("run/weights", config, tensors.items(), base=None)
    with pytest.raises(ValueError, match="; --format longshore writes a folder"):
        export("run", "made", "--module", "tests.parallel.my_mixer")
    export("run", "made", "--format", "longshore", "--module", "tests.parallel.my_mixer:decoder")
    assert read_config("made") == config
    monkeypatch.setattr("longshore.arch.as_json.REGISTERED", {})
    told = "'MeanConfig' of the Python module 'tests.parallel.my_mixer', .* --module tests.parallel"
    with pytest.raises(ValueError, match=f"^run/weights/weights.json: it uses {told}"):
        export("run", "again", "--format", "longshore")
    with pytest.raises(ValueError, match=f"^model.from_hf: made/config.json: it uses {told}"):
        decoder_config(ModelConfig(from_hf="made"))


def test_from_a_folder_of_our_own_format_to_one_of_transformers():
    config = preset("tiny-llama")
    tensors = {name: torch.randn(shape) for name, shape in tensor_shapes(config).items()}
    save_weights("first/weights", config, tensors.items(), base=None)
    export("first", "own", "--format", "longshore")
    save_weights("second/weights", config, open_weights("own").items(), base="own")
    export("second", "made")
    assert load("made").config.architectures == ["LlamaForCausalLM"]
    assert all(torch.equal(open_weights("made")[name], tensors[name]) for name in tensors)


def test_a_base_that_moved_is_named_with_base(run):
    shutil.move("base", "moved")
    with pytest.raises(ValueError, match="base, which does not exist; name its folder with"):
        export(run, "made")
    export(run, "made", "--base", "moved")
    assert read_config("made") == read_config("moved")


def test_the_base_of_a_run_of_transformers_code_moved(tmp_path):
    gemma2(tmp_path / "base")
    config = describe_decoder(json.loads((tmp_path / "base/config.json").read_text()))
    tensors = load_file("base/model.safetensors")
    save_weights("run/weights", config, tensors.items(), base="base", code="transformers")
    shutil.move("base", "moved")
    export("run", "made", "--base", "moved")
    assert load_file("made/model.safetensors").keys() == tensors.keys()
    gemma2(tmp_path / "wider", intermediate_size=64)
    with pytest.raises(ValueError, match=r"\(32, 48\), but \(32, 64\) in wider, which so is not"):
        export("run", "other", "--base", "wider")


def test_an_adapter_of_another_base_is_refused(run):
    config = replace(read_config("base"), lora=LoRAConfig(2, 4.0, ("q_proj",)))
    factors = {name: torch.zeros(shape) for name, shape in factor_shapes(config).items()}
    known = find_base(config, "base", seed=0)
    save_weights("tuned/weights", config, factors.items(), base="base", lora=known)
    shutil.copytree("base", "moved")
    export("tuned", "made", "--adapter", "--base", "moved")
    assert json.loads(Path("made/adapter_config.json").read_text())["r"] == 2
    qwen3(Path("moved"), seed=1)
    with pytest.raises(ValueError, match="moved is not the base that these low-rank factors were"):
        export("tuned", "other", "--adapter", "--base", "moved")


def test_mistakes_are_one_line(run, tmp_path):
    llama(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    for words, reason in [
        (("nowhere", "made"), "nowhere is not a folder"),
        (("empty", "made"), r"empty has no weights/weights\.json"),
        ((run, "base"), "base is not empty"),
        ((run, "made", "--base", "empty"), r"empty has no config\.json"),
        ((run, "made", "--base", "other"), "the decoder does not fit LlamaForCausalLM, the"),
        ((run, "made", "--dtype", "int8"), "'int8' is not one of bfloat16, float32, keep"),
        ((run, "made", "--format", "gguf"), "'gguf' is not one of hf, longshore"),
        ((run, "made", "--format", "longshore", "--max-length", 9), "--max-length works only wi"),
        ((run, "made", "--module", "no_such"), "^--module: there is no module no_such; start in "),
        (
            (run, "base/config.json/made"),
            r"cannot be created, because .*config\.json is not a folder",
        ),
    ]:
        with pytest.raises(ValueError, match=reason) as caught:
            export(*words)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "made").exists()


def checkpoint_of(run, config, step, *, recipe):
    """A checkpoint of a run on two ranks: each has half the rows, or columns, of every tensor."""
    begin_save(run, step, needed=100)
    shapes = tensor_shapes(config)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    files, chunks = {}, {name: [] for name in shapes}
    for rank in (0, 1):
        blocks = {}
        for name, shape in shapes.items():
            dim = len(shape) - 1
            start, stop = (shape[dim] * place // 2 for place in (rank, rank + 1))
            blocks[f"{name} {rank}"] = tensors[name].narrow(dim, start, stop - start).contiguous()
            offsets = (*(0 for _ in shape[1:]), start)
            sizes = (*shape[:-1], stop - start)
            file, key = f"rank-0000{rank}.safetensors", f"{name} {rank}"
            chunks[name].append(SavedChunk(offsets, sizes, file, key))
        files[file] = write_safetensors(partial_folder(run, step) / file, blocks)
    saved = {
        f"model.{name}": SavedTensor("F32", shape, tuple(chunks[name]))
        for name, shape in shapes.items()
    }
    finish_save(run, CheckpointIndex(step, step, 2, {}, files, saved), keep=5)
    (run / "config.toml").write_text(recipe)
    return tensors


@pytest.mark.parametrize("words", [("run", "--step", 20), ("run/checkpoints/step-00000020",)])
def test_a_checkpoint_becomes_a_folder(tmp_path, words):
    recipe = '[model]\npreset = "tiny-llama"\n'
    config = preset("tiny-llama")
    tensors = checkpoint_of(tmp_path / "run", config, 20, recipe=recipe)
    checkpoint_of(tmp_path / "run", config, 40, recipe=recipe)
    export(words[0], "made", *words[1:], "--max-length", 4096)
    assert read_config("made") == config
    weights = open_weights("made")
    assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())
    save_weights("other/weights", config, tensors.items(), base=None)
    export("other", "again", "--max-length", 4096)
    for path in (tmp_path / "again").iterdir():
        assert (tmp_path / "made" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_checkpoint_of_a_run_with_a_base(run, tmp_path):
    config = read_config("base")
    checkpoint_of(run, config, 20, recipe='[model]\nfrom_hf = "base"\n')
    shutil.rmtree(run / "weights")
    told = r"^.*run has no weights/weights\.json; .*; name one of its checkpoints with --step: 20$"
    with pytest.raises(ValueError, match=told):
        export(run, "made")
    export(run, "made", "--step", 20, "--dtype", "bfloat16")
    assert (tmp_path / "made/tokenizer.json").is_file()
    assert load_file("made/model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    shutil.move("base", "moved")
    with pytest.raises(ValueError, match="the run began with base, which does not exist; name its"):
        export(run, "other", "--step", 20)
    export(run, "other", "--step", 20, "--dtype", "bfloat16", "--base", "moved")
    assert (tmp_path / "other/tokenizer.json").is_file()


def test_checkpoints_that_cannot_be_exported(run, tmp_path):
    checkpoint_of(run, read_config("base"), 20, recipe='[model]\npreset = "tiny-qwen3-moe"\n')
    folder = run / "checkpoints/step-00000020"
    shutil.copytree(folder, tmp_path / "away/checkpoints/step-00000020")
    for words, reason in [
        ((run, "made", "--step", 30), "has no checkpoint of step 30; it has those of steps 20$"),
        (("base", "made", "--step", 30), "base has no checkpoint of step 30 or any other$"),
        ((run, "made", "--step", 20), "0020 has no tensor layers.*; it is of another model$"),
        (
            ("away", "made", "--step", 20),
            "is not in a run's folder: .*config.toml, which describes",
        ),
    ]:
        with pytest.raises(ValueError, match=reason):
            export(*words)
    (run / "config.toml").write_text('[model]\nfrom_hf = "base"\n')
    path = folder / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-7] ^= 16
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"1\.safetensors is damaged: .*; export another checkpoint"
    ):
        export(run, "made", "--step", 20)
    assert not (tmp_path / "made").exists()


def test_refused_before_torch_is_loaded(tmp_path, monkeypatch):
    """None in sys.modules makes an import fail."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="is not a folder"):
        export("nowhere", "made")


def test_help_names_every_option():
    from longshore.cli.export import EXPORT_HELP

    parser = Parser("longshore")
    register_export(parser.add_subparsers())
    (action,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    for option in action.choices["export"]._option_string_actions:
        assert option in (*EXPORT_HELP.split(), "--help", "-h")
