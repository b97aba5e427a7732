"""Hyper-connections, experts by token ids and mixers' own losses on lanes, stages and TP ranks."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from tests.parallel.own_loss import OwnLossConfig
from tests.ranks.composed import composed, ranks_of
from tests.ranks.harness import run_ranks
from tests.ranks.piped import error_of
from tests.ranks.spine import VOCAB, alone, exact, make_samples, sharded

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, HyperConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.hf.checkpoint import open_weights, write_own_checkpoint
from longshore.hf.config_file import read_config
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder
from longshore.parallel.fsdp import local_part
from longshore.plan import make_plan
from longshore.plan.layout import parse_layout
from longshore.train.checkpoint import Checkpoints, Position
from longshore.train.optimizer import make_optimizer


def mixed() -> DecoderConfig:
    """The second layer, not on the first stage, chooses experts by token ids."""
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=4)
    moe = MoEConfig(experts=4, top_k=2, width=8, score="sqrt-softplus", shared_width=8, limit=0.5)
    return DecoderConfig(
        vocab_size=VOCAB,
        width=16,
        layers=(
            LayerConfig(attention, MLPConfig(width=16, limit=0.5)),
            LayerConfig(OwnLossConfig(), replace(moe, hash_rows=VOCAB)),
            LayerConfig(attention, replace(moe, aux_weight=0.1)),
        ),
        mtp=(LayerConfig(OwnLossConfig(), MLPConfig(width=16)),),
        residuals=HyperConfig(count=3, iterations=4),
        init_std=0.3,
    )


LENGTHS = [3, 40, 17, 5, 50, 1, 2]
AXES = {
    "lanes": ({"lanes": 2}, "", "none"),
    "pipeline": ({"lanes": 1, "pp": 2}, "Et|t|tm|L", "blocks"),
    "tensors": ({"lanes": 1, "tp": 2}, "", "blocks"),
}


def run_exact(axes: dict[str, int], text: str, recompute: str) -> str:
    """What is off by most; `composed` compares what the ranks issue, too."""
    config, depths = mixed(), 1
    with ranks_of(**axes) as (topology, groups):
        layout = None
        if text:
            layout = parse_layout(text, pp=topology.pp, layers=3, depths=depths)
            layout = replace(layout, id_layers=config.hashed_layers)
        vpp = layout.vpp if layout else 1
        plan = make_plan(
            LENGTHS, lanes=topology.lanes, capacity=64, pp=topology.pp, vpp=vpp, tp=topology.tp
        )
        samples = make_samples(plan)
        choices = exact(mode="zero3", recompute=recompute)
        result = composed(config, plan, samples, topology, groups, choices, layout=layout)
        if topology.rank:
            return ""
        error, name = error_of(result, alone(config, samples))
        return "" if error <= 1e-9 else f"{axes}: {name} is off by {error}"


def run_all(folder: str) -> list[str]:
    """All in one run: processes cost more than the steps."""
    faults = [fault for case in AXES.values() if (fault := run_exact(*case))]
    return faults + checkpointed(folder)


def checkpointed(folder: str) -> list[str]:
    """The names of tensors that do not come back from a checkpoint of 2 lanes."""
    with ranks_of(lanes=2) as (topology, groups):
        model = sharded(mixed(), topology, groups, exact(mode="zero3"))
        optimizer = make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
        saves = Checkpoints(Path(folder), model, optimizer, topology=topology, keep=1)
        tensors = dict(chain(model.named_parameters(), model.named_buffers()))
        before = {name: local_part(tensor.detach()).clone() for name, tensor in tensors.items()}
        saves.save(Position(1, 0, {}))
        saves.confirm(1)
        saves.wait()
        for tensor in tensors.values():
            local_part(tensor.detach()).zero_()
        saves.load_newest()
        saves.close()
        after = {name: local_part(tensor.detach()) for name, tensor in tensors.items()}
    assert before["layers.1.mlp.router.table"].any()
    return [f"{name} is lost" for name in before if not torch.equal(before[name], after[name])]


@pytest.mark.fuzz
def test_gradients_are_those_of_each_sequence_alone_and_checkpoints_whole(
    tmp_path: Path, is_fuzz: bool
) -> None:
    if not is_fuzz:
        pytest.skip("test_deepseek_v4.py has such a model; this one is in `make fuzz`")
    assert run_ranks(2, run_all, str(tmp_path), timeout=200) == [[], []]


def test_a_folder_keeps_tables_and_weights_of_mixing_as_they_are(tmp_path: Path) -> None:
    """Where the others are cast."""
    model = Decoder(mixed())
    init_decoder(model, seed=0)
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    write_own_checkpoint(
        tmp_path / "folder", mixed(), tensors.items(), base=None, dtype=torch.bfloat16
    )
    read = open_weights(tmp_path / "folder")
    assert read_config(tmp_path / "folder") == mixed()
    assert list(read) == list(tensors)
    kinds = {name: tensor.dtype for name, tensor in read.items()}
    assert kinds["layers.1.mlp.router.table"] == torch.int64
    for name, tensor in tensors.items():
        is_kept = name.endswith("table") or "hyper." in name or "collapse." in name
        assert kinds[name] == (tensor.dtype if is_kept else torch.bfloat16), name
        assert torch.equal(read[name], tensor.to(kinds[name])), name
