"""A large checkpoint in and out: the memory of a process grows by a tensor, not by the checkpoint.

300 MB in each run, 3 GB in `make fuzz`. The folder is sparse, and its copy is removed at once.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from tests.hf.folders import SIZES

from longshore.hf.checkpoint import open_weights
from longshore.hf.config_file import read_config
from longshore.train.safetensors_stream import FileWriter

IS_FUZZ = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
LAYERS, LIMIT = (90, 10**9) if IS_FUZZ else (9, 10**8)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    **SIZES,
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
CHILD = """
import json, resource, shutil, sys
import torch
from longshore.hf.checkpoint import open_weights, write_checkpoint
from longshore.hf.config_file import read_config
from longshore.model.decoder import Decoder
from longshore.parallel.shards import fill

def now():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

def peak():  # not ru_maxrss, which has the peak of the process that started this one, too
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

base, copy = sys.argv[1:]
config = read_config(base)
torch.set_num_threads(1)
before = now()
weights = open_weights(base)
write_checkpoint(copy, config, weights.items(), base=base, shard_bytes=10**8)
streamed = peak() - before
shutil.rmtree(copy)
with torch.device("meta"):
    model = Decoder(config).to(torch.bfloat16)
size = sum(p.nbytes for p in model.parameters())
before = now()
fill(model, torch.device("cpu"), lambda name, shape, index: weights.block(name, index))
after = now()
peaks = {"streamed": streamed, "filled": peak() - after, "kept": after - before - size}
print(json.dumps({**peaks, "size": size}))
"""


@pytest.fixture
def folder(tmp_path):
    """A checkpoint in two files with an index, whose tensors are holes in the files."""
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps(CONFIG))
    where, names = {}, _tensor_names()
    for number, half in enumerate((names[::2], names[1::2])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        _write_holes(base / file, half)
        where |= dict.fromkeys((name for name, _ in half), file)
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return base


def _tensor_names():
    width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    names = [("model.embed_tokens.weight", (4096, width)), ("lm_head.weight", (4096, width))]
    names.append(("model.norm.weight", (width,)))
    for i in range(LAYERS):
        start = f"model.layers.{i}"
        names += [(f"{start}.self_attn.{p}_proj.weight", (width, width)) for p in "qkvo"]
        names += [(f"{start}.mlp.{p}_proj.weight", (inner, width)) for p in ("gate", "up")]
        names.append((f"{start}.mlp.down_proj.weight", (width, inner)))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            names.append((f"{start}.{norm}.weight", (width,)))
    return names


def _write_holes(path, names):
    header, at = {}, 0
    for name, shape in names:
        end = at + 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


@pytest.mark.slow
@pytest.mark.fuzz
def test_memory_is_bounded_by_a_tensor(folder, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, folder, tmp_path / "copy"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    assert peaks["size"] > 2.9 * LIMIT
    assert peaks["streamed"] < LIMIT
    assert peaks["filled"] < LIMIT
    assert peaks["kept"] < 0.4 * peaks["size"]  # torch's allocator rounds up to huge pages


def test_a_rank_reads_only_its_rows(folder, monkeypatch):
    """The bytes of a block, however large the tensor; nothing else is read once it is open."""
    weights, asked = open_weights(folder), []
    honest = os.preadv

    def counting(number, buffers, offset):
        asked.append(sum(len(buffer) for buffer in buffers))
        return honest(number, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    assert weights.block("embed.weight", (slice(8, 24),)).shape == (16, 1024)
    assert asked == [16 * 1024 * 2]
    assert read_config(folder).vocab_size == 4096


def test_the_writer_leaves_room_for_every_name(tmp_path):
    """The header is written into the room left for it: no byte of a tensor is moved."""
    names = [name for name, _ in _tensor_names()]
    writer = FileWriter(tmp_path / "a", names)
    writer._move = None  # would be called if the room were too small
    for name in names:
        writer.add(name, torch.zeros(4096, 0, 4096, 4096))
    writer.finish()
