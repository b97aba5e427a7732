"""Quantized checkpoints are refused by name, before anything is trained."""

import json

import pytest
import torch
from safetensors.torch import save_file
from tests.hf.folders import llama

from longshore.config.check import check_config
from longshore.config.load import load_config
from longshore.hf.config_file import read_config


@pytest.fixture
def folder(tmp_path):
    llama(tmp_path / "base")
    return tmp_path / "base"


def change(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("fp8", r"quantized \(fp8\); .*FineGrainedFP8Config\(dequantize=True\)"),
        ("mxfp4", r"\(mxfp4: MXFP4, as gpt-oss is published\).*=Mxfp4Config\(dequantize=True\)"),
        ("bitsandbytes", r"\(bitsandbytes: .*call dequantize\(\)"),
        ("gptq", r"\(gptq\); .*use the unquantized folder"),
        ("awq", r"\(awq\); .*use the unquantized folder"),
        ("compressed-tensors", r"\(compressed-tensors\); .*use the unquantized folder"),
    ],
)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GptOssForCausalLM"])
def test_methods_of_config_json(folder, method, message, architecture):
    change(folder, architectures=[architecture], quantization_config={"quant_method": method})
    with pytest.raises(ValueError, match=rf"config.json: quantization_config says .*{message}"):
        read_config(folder)


def test_a_text_model_inside_another(folder):
    change(folder, text_config={"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(ValueError, match=r"quantized \(fp8\)"):
        read_config(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", torch.ones(4).to(torch.float8_e4m3fn), "F8_E4M3.* quantized to FP8"),
        ("a.weight_scale_inv", torch.ones(4), "a.weight_scale_inv of F32: its weights are quant"),
        ("a.mlp.experts.gate_up_proj_blocks", torch.ones(4).byte(), "gate_up_proj_blocks of U8"),
        ("a.q_proj.qweight", torch.ones(4).int(), "qweight of I32: its weights are quantized"),
    ],
)
def test_quantized_files_without_a_word_in_config_json(folder, name, tensor, message):
    config = load_config(
        None, [f"model.from_hf={folder}", "data.batch=1", "data.mock.mode=file", "data.count=0"]
    )
    save_file({name: tensor}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"^model.from_hf: model.safetensors has .*{message}"):
        check_config(config, 1)
