"""A Hugging Face folder straight into sharded training and out again, on several ranks."""

import os

import torch
from tests.hf.folders import llama
from tests.ranks.composed import ranks_of
from tests.ranks.harness import run_ranks
from tests.ranks.piped import staged
from tests.ranks.spine import exact

from longshore.hf.checkpoint import open_weights, write_checkpoint
from longshore.hf.config_file import read_config
from longshore.parallel.gathered import gathered_tensors
from longshore.parallel.pipeline import stages_of
from longshore.parallel.shards import fill
from longshore.plan.layout import one_stage

WIDE = {"vocab_size": 512, "tie_word_embeddings": False}


def in_and_out(base, out):
    """Fills a model that FSDP splits over 2 ranks, writes it, and counts the bytes it read."""
    config, weights, read = read_config(base), open_weights(base), [0]
    honest = os.preadv

    def counting(number, buffers, offset):
        count = honest(number, buffers, offset)
        read[0] += count
        return count

    os.preadv = counting
    with ranks_of(lanes=2) as (topology, groups):
        model = staged(
            config, one_stage(layers=len(config.layers)), topology, groups, exact(mode="zero3")
        )
        for part in stages_of(model).values():
            fill(part, topology.device, lambda name, _, index: weights.block(name, index))
        os.preadv = honest
        tensors = gathered_tensors(model, topology)
        if topology.rank == 0:
            write_checkpoint(out, config, tensors, base=base, shard_bytes=50_000)
        else:
            list(tensors)
    return read[0]


def test_each_rank_reads_its_rows_and_the_export_has_the_same_bytes(tmp_path):
    model = llama(tmp_path / "base", shard="60KB", **WIDE)
    read = run_ranks(2, in_and_out, tmp_path / "base", tmp_path / "out")
    size = sum(p.nbytes for p in model.parameters())
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 1
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert sum(read) == size  # each row once, by the rank that has it
    assert max(read) < 0.6 * size
    before, after = open_weights(tmp_path / "base"), open_weights(tmp_path / "out")
    assert list(before) == list(after)
    for name in before:
        assert torch.equal(before[name].to(after[name].dtype), after[name])
