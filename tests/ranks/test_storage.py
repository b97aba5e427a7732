"""Checkpoints and exports under every axis: written under one way of sharing, read under another.

No step is trained: values are written into the tensors of parameters and moments.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch
from tests.ranks.composed import ranks_of
from tests.ranks.harness import run_ranks
from tests.ranks.piped import staged
from tests.ranks.spine import VOCAB, exact

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.cli.main import main
from longshore.hf.checkpoint import write_own_checkpoint
from longshore.model.decoder import Decoder
from longshore.model.fill import fill_rows
from longshore.model.init import init_decoder
from longshore.parallel.gathered import gathered_tensors
from longshore.parallel.pipeline import EmbeddingCopies, Stages, tensor_names
from longshore.parallel.shards import boxes_of
from longshore.plan.layout import one_stage, parse_layout
from longshore.settings import ShardMode
from longshore.train import checkpoint
from longshore.train.checkpoint import Checkpoints, Position, make_moments, state_of
from longshore.train.checkpoint_files import checkpoint_folder, read_index
from longshore.train.optimizer import make_optimizer
from longshore.train.safetensors_stream import OF_NAME


@dataclass(frozen=True)
class Way:
    """How 4 ranks share the model."""

    lanes: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    mode: ShardMode = "zero3"


WAYS = (
    Way(lanes=4),
    Way(lanes=2, tp=2, ep=4),
    Way(lanes=1, tp=2, pp=2, ep=2, mode="none"),
    Way(lanes=2, pp=2, ep=2),
    Way(lanes=2, tp=2, ep=2),
)
EXPERTS = MoEConfig(experts=8, top_k=2, width=4, shared_width=3, bias_update=1e-3)


def decoder() -> DecoderConfig:
    """All mixers, biases after sums, KV heads and groups that ranks share, tied ends."""
    attention = AttentionConfig(
        heads=4, kv_heads=1, head_dim=4, bias=True, output_bias=True, qk_norm=True
    )
    mamba = Mamba2Config(heads=4, head_dim=3, state_dim=5, groups=2, bias=True)
    delta = DeltaNetConfig(key_heads=4, value_heads=8, key_dim=2, value_dim=3)
    mla = MLAConfig(heads=4, q_rank=5, kv_rank=6, nope_dim=3, rope_dim=2, value_dim=5, bias=True)
    layers = (
        LayerConfig(attention, EXPERTS),
        LayerConfig(mamba, MLPConfig(width=12)),
        LayerConfig(delta, None),
    )
    mtp = (LayerConfig(mla, EXPERTS),)
    return DecoderConfig(vocab_size=VOCAB, width=6, layers=layers, mtp=mtp, tied=True)


def built(way: Way, topology, groups) -> Stages:
    layout = one_stage(layers=3, depths=1)
    if way.pp > 1:
        layout = parse_layout("Et|ttmL", pp=2, layers=3, depths=1)
    return staged(decoder(), layout, topology, groups, exact(mode=way.mode))


@contextmanager
def checkpoints_of(way: Way, folder: Path):
    with ranks_of(lanes=way.lanes, tp=way.tp, pp=way.pp, ep=way.ep) as (topology, groups):
        model = built(way, topology, groups)
        optimizer = make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
        copies = EmbeddingCopies(model, topology) if way.pp > 1 else None
        checkpoints = Checkpoints(
            folder, model, optimizer, topology=topology, keep=1, copies=copies
        )
        yield checkpoints
        checkpoints.close()
        if copies is not None:
            copies.close()


@cache
def parameters() -> dict[str, torch.Tensor]:
    """The first values of the whole decoder."""
    whole = Decoder(decoder()).double()
    init_decoder(whole, seed=3)
    return {f"model.{name}": parameter.detach() for name, parameter in whole.named_parameters()}


@cache
def values_of(name: str, shape) -> torch.Tensor:
    """Of a tensor of the state: first values of parameters, and others of buffers and moments."""
    if name in parameters():
        return parameters()[name]
    return fill_rows(name, shape, slice(0, shape[0]), seed=1, std=1.0).double()


def pairs_of(checkpoints: Checkpoints):
    """Each of the rank's boxes, and what should be in it."""
    for name, tensor, cut in state_of(checkpoints.model, checkpoints.optimizer):
        shape, boxes = boxes_of(tensor.detach(), cut)
        whole = values_of(name, shape) if boxes else None
        for box in boxes:
            yield name, box.local, whole[box.index]


def check_values(checkpoints: Checkpoints) -> None:
    for name, local, want in pairs_of(checkpoints):
        assert torch.equal(local, want), name


def check_gathered(tensors, rank: int):
    """The same stream, every tensor of which must be whole on rank 0."""
    names = []
    for name, tensor in tensors:
        names.append(name)
        want = values_of(f"model.{name}", tensor.shape) if rank == 0 else torch.empty(0)
        assert torch.equal(tensor, want), name
        yield name, tensor
    assert names == tensor_names(decoder())


def saved(way: Way, folder: Path) -> None:
    """Writes a checkpoint, and a folder as a run exports it."""
    with checkpoints_of(way, folder) as checkpoints:
        model, topology = checkpoints.model, checkpoints.topology
        for name, local, want in pairs_of(checkpoints):
            if not name.endswith("router.bias"):
                assert torch.equal(local, want), f"{name} is filled"
            local.copy_(want)
        make_moments(model, checkpoints.optimizer, updates=2)
        for _, local, want in pairs_of(checkpoints):
            local.copy_(want)
        checkpoints.save(Position(5, 2, {}))
        checkpoints.confirm(5)
        checkpoints.wait()
        tensors = read_index(checkpoint_folder(folder, 5)).tensors.values()
        sizes = [prod(tensor.shape) * OF_NAME[tensor.dtype].itemsize for tensor in tensors]
        assert checkpoints.save_bytes == sum(sizes)
        stream = check_gathered(gathered_tensors(model, topology), topology.rank)
        if topology.rank == 0:
            write_own_checkpoint(folder / "own", decoder(), stream, base=None)
        else:
            assert len(list(stream)) == len(tensor_names(decoder()))


def loaded(way: Way, folder: Path) -> None:
    """Loads a checkpoint; no rank reads more than it has."""
    with checkpoints_of(way, folder) as checkpoints:
        sizes, read = [], checkpoint.read_block

        def counted(file, key, offsets, target):
            if not key.startswith("rng."):
                sizes.append(target.nbytes)
            read(file, key, offsets, target)

        checkpoint.read_block = counted
        make_moments(checkpoints.model, checkpoints.optimizer, updates=0)
        for _, local, _ in pairs_of(checkpoints):
            local.zero_()
        assert checkpoints.load(5) == Position(5, 2, {})
        checkpoint.read_block = read
        check_values(checkpoints)
        once = {(name, local.shape): local.nbytes for name, local, _ in pairs_of(checkpoints)}
        assert sum(sizes) <= sum(local.nbytes for _, local, _ in pairs_of(checkpoints))
        assert sum(sizes) >= sum(once.values())


def every_way(folder: str, count: int) -> None:
    runs, ways = [Path(folder) / f"run-{number}" for number in range(count)], WAYS[:count]
    for way, run in zip(ways, runs, strict=True):
        saved(way, run)
    for way, run in zip(ways[1:] + ways[:1], runs, strict=True):
        loaded(way, run)


@pytest.mark.fuzz
def test_written_under_one_way_and_read_under_another(tmp_path, is_fuzz):
    count = len(WAYS) if is_fuzz else 2
    run_ranks(4, every_way, str(tmp_path), count)
    first = read_index(checkpoint_folder(tmp_path / "run-0", 5)).tensors
    for number in range(count):
        run = tmp_path / f"run-{number}"
        tensors = read_index(checkpoint_folder(run, 5)).tensors
        assert tensors.keys() == first.keys()
        assert all(tensor.shape == first[name].shape for name, tensor in tensors.items())
        (run / "config.toml").write_text('[model]\nmodule = "tests.ranks.test_storage:decoder"\n')
        exported = tmp_path / f"made-{number}"
        words = ["export", str(run), str(exported), "--step", "5", "--format", "longshore"]
        assert main(words) == 0
        for path in (run / "own").iterdir():
            assert (exported / path.name).read_bytes() == path.read_bytes(), path.name
            assert (tmp_path / "made-0" / path.name).read_bytes() == path.read_bytes()
