"""The models and the 64 sequences that bench/gpu.py measures, and a run of them in this process.

In: the name of a case, and overrides. Out: a TrainingJob and its Parts, built as `longshore train`
builds them, on one rank. The sequences are lognormal with median 812 and sigma 1.1, clipped to
64 to 8192, and the same in every step: seed 360 draws about 82,852 tokens.
"""

import gc
import itertools
import math
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.presets import preset
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.config.load import load_config
from longshore.data.mock import mock_lengths
from longshore.distributed.process_group import Ranks
from longshore.model.init import initial_block
from longshore.plan.planner import make_plan
from longshore.plan.types import Sequence
from longshore.run import parts as parts_of_run
from longshore.run.parts import Parts, TrainingJob, build_parts, joined_ranks, make_job

CAPACITY = 32_768
"""3 rounds; the host has to launch a round's kernels, however many its tokens."""
SEED = 360
MOCK = {
    "mode": "distribution",
    "type": "lognormal",
    "min_seq_len": 64,
    "max_seq_len": 8192,
    "mean_seq_len": 1487,
    "lognormal_sigma": 1.1,
}


def qwen3_next() -> DecoderConfig:
    """4 layers with 32 experts each, of which a token uses 10 as in the whole model."""
    decoder = preset("qwen3-next-80b-a3b", layers=4)
    return replace(decoder, layers=tuple(_fewer_experts(decoder, 32)))


def _fewer_experts(decoder: DecoderConfig, experts: int) -> Iterator[LayerConfig]:
    for layer in decoder.layers:
        assert isinstance(layer.mlp, MoEConfig)
        yield replace(layer, mlp=replace(layer.mlp, experts=experts))


def deepseek_v3() -> DecoderConfig:
    """The 3 dense layers, without the depth of multi-token prediction."""
    return preset("deepseek-v3", layers=3, mtp=())


def deepseek_v4() -> DecoderConfig:
    """The first 4 layers, of all kinds, with 16 experts each, of which a token uses 6."""
    decoder = preset("deepseek-v4-flash", layers=4, mtp=())
    return replace(decoder, layers=tuple(_fewer_experts(decoder, 16)))


def moe_half_billion() -> DecoderConfig:
    """A mixture of experts of about 0.5 billion parameters, with Qwen3's layers."""
    decoder = preset("qwen3-30b-a3b", layers=8, width=1024, vocab_size=32_768)
    layer = decoder.layers[0]
    assert isinstance(layer.mlp, MoEConfig)
    assert isinstance(layer.mixer, AttentionConfig)
    moe = replace(layer.mlp, experts=32, top_k=4, width=512)
    mixer = replace(layer.mixer, heads=16, kv_heads=4, head_dim=64)
    return replace(decoder, layers=(replace(layer, mixer=mixer, mlp=moe),) * 8)


def hybrid_half_billion() -> DecoderConfig:
    """Qwen3-0.6B with two of three attention layers replaced, by Mamba2 and by gated delta net."""
    decoder = preset("qwen3-0.6b")
    mamba = Mamba2Config(heads=32, head_dim=64, groups=8, state_dim=128, kernel=4)
    delta = DeltaNetConfig(key_heads=8, value_heads=16, key_dim=128, value_dim=128)
    mixers = itertools.cycle((mamba, delta, None))
    layers = (
        layer if mixer is None else replace(layer, mixer=mixer)
        for layer, mixer in zip(decoder.layers, mixers, strict=False)
    )
    return replace(decoder, layers=tuple(layers))


def hybrid_of_six() -> DecoderConfig:
    """Its first 6 layers, two of each kind."""
    decoder = hybrid_half_billion()
    return replace(decoder, layers=decoder.layers[:6])


CASES: dict[str, tuple[str, ...]] = {
    "qwen3-0.6b": ("model.preset=qwen3-0.6b",),
    "qwen3-8b": ("model.preset=qwen3-8b", "model.layers=8"),
    "llama-3.2-1b": ("model.preset=llama-3.2-1b",),
    "qwen3-30b-a3b": ("model.preset=qwen3-30b-a3b", "model.layers=4"),
    "nemotron-h-8b": ("model.preset=nemotron-h-8b", "model.layers=8"),
    "qwen3-next": ("model.module=gpu_cases:qwen3_next",),
    "deepseek-v3": ("model.module=gpu_cases:deepseek_v3",),
    "deepseek-v4": ("model.module=gpu_cases:deepseek_v4",),
}
WANTED_OF_PRODUCT: dict[str, float | None] = {
    "qwen3-0.6b": 0.58,
    "qwen3-8b": 0.70,
    "llama-3.2-1b": 0.60,
    "qwen3-30b-a3b": 0.45,
    "nemotron-h-8b": 0.50,
    "qwen3-next": 0.35,
    "deepseek-v3": 0.50,
    "deepseek-v4": None,
}
SMOKE = {
    "qwen3-0.6b": "tiny-qwen3",
    "qwen3-8b": "tiny-qwen3",
    "llama-3.2-1b": "tiny-llama",
    "qwen3-30b-a3b": "tiny-qwen3-moe",
    "nemotron-h-8b": "tiny-nemotron-h",
    "qwen3-next": "tiny-qwen3-next",
    "deepseek-v3": "tiny-deepseek-v3",
    "deepseek-v4": "tiny-deepseek-v4",
}


def words_of(name: str, *, smoke: bool) -> list[str]:
    """The overrides of a case; smoke: a tiny model on few short sequences instead."""
    mock, count = (MOCK, 64)
    model: tuple[str, ...] = CASES[name]
    if smoke:
        mock, count = {**MOCK, "max_seq_len": 96, "min_seq_len": 8, "mean_seq_len": 40}, 8
        model = (f"model.preset={SMOKE[name]}",)
    table = ", ".join(f"{key}={value!r}" for key, value in mock.items())
    return [
        *model,
        f"data.mock={{{table}}}",
        f"data.count={count}",
        f"data.batch={count}",
        "data.shuffle=false",
        f"data.seed={SEED}",
        f"plan.capacity={96 if smoke else CAPACITY}",
        "train.lr=1e-5",
        "output.keep=0",
        "output.weights=false",
        "output.display=plain",
    ]


@contextmanager
def running(words: list[str]) -> Iterator[tuple[TrainingJob, Parts]]:
    """A job and its parts on one rank; afterwards the device's memory is free again."""
    config = load_config(None, words)
    free_memory()
    try:
        with quick_weights(), tempfile.TemporaryDirectory() as folder:
            ranks = Ranks(0, 1, 0, 1, f"file://{folder}/store")
            with joined_ranks(config, ranks, attempt=0, signals=True) as (topology, stop):
                job = make_job(config, topology, stop=stop, local_size=1, display="none")
                parts = build_parts(job, Path(folder))
                yield job, parts
                parts.close()
    finally:
        if dist.is_initialized():  # after a failure, which must not reach the next case
            dist.destroy_process_group()


LARGE = 1 << 20
"""Numbers of a tensor that the device draws."""


@contextmanager
def quick_weights() -> Iterator[None]:
    """On a GPU, large tensors are drawn there: billions of numbers take the host half a minute."""
    on_gpu = torch.cuda.is_available()

    def block(
        config: DecoderConfig, name: str, shape: torch.Size, index: tuple[slice, ...], *, seed: int
    ) -> Tensor:
        sizes = [part.stop - part.start for part in index] + list(shape[len(index) :])
        if not on_gpu or math.prod(sizes) < LARGE or name.endswith(".table"):
            return initial_block(config, name, shape, index, seed=seed)
        generator = torch.Generator("cuda").manual_seed(seed + zlib.crc32(name.encode()))
        return torch.randn(sizes, generator=generator, device="cuda") * config.init_std

    # Without a GPU too, so that a smoke run fails if a run's weights come from elsewhere.
    with patch.object(parts_of_run, "initial_block", block):
        yield


def free_memory() -> None:
    """What the case before left, also where it failed; then the peak is counted anew."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def packs_of_lengths(capacity: int = CAPACITY, *, smoke: bool = False) -> list[list[int]]:
    """The lengths of each pack of the 64 sequences on one lane."""
    if smoke:
        return [[40, 1, 23], [17, 30]]
    lengths = mock_lengths(MOCK, count=64, seed=SEED).tolist()
    plan = make_plan(
        [Sequence(i, n, n - 1) for i, n in enumerate(lengths)], lanes=1, capacity=capacity
    )
    return [[lengths[i] for i in pack.sequences] for _, pack in plan.packs()]
