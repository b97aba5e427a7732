"""A disk that fills while rank 0 writes what all ranks produce: every rank ends, with one error."""

import errno
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.ranks.composed import ranks_of
from tests.ranks.harness import run_ranks
from tests.ranks.piped import staged
from tests.ranks.spine import exact

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.config.load import load_config
from longshore.data.source import TokenizedSample
from longshore.distributed import collectives as shared_stream
from longshore.distributed.collectives import PeerError, sum_over
from longshore.hf.checkpoint import open_weights
from longshore.hf.weights import load_weights
from longshore.plan.layout import one_stage
from longshore.run import score
from longshore.run.weights import export_weights, write_weights
from longshore.train import safetensors_stream
from longshore.train.supervision import RunError

LAYER = LayerConfig(
    AttentionConfig(heads=4, kv_heads=2, head_dim=4, qk_norm=True), MLPConfig(width=12)
)
DECODER = DecoderConfig(vocab_size=32, width=8, layers=(LAYER,) * 3)
FULL = OSError(errno.ENOSPC, "No space left on device")


def fails_after(good, write_all):
    """_write_all of safetensors_stream that has room for some blocks only."""
    left = iter(range(good))

    def write(file, block):
        if next(left, None) is None:
            raise FULL
        write_all(file, block)

    return write


def refusal(call):
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def on_full_disks(folder: str):
    """The errors of this rank: of RUN/weights, of two exports; then all is written in the end."""
    run, honest = Path(folder) / "run", safetensors_stream._write_all
    notes = []
    with ranks_of(lanes=2) as (topology, groups):
        model = staged(DECODER, one_stage(layers=3), topology, groups, exact(mode="zero3"))
        config = load_config(None, [f"output.export={folder}/model"])
        job = SimpleNamespace(
            topology=topology, decoder=DECODER, config=config, base=None, dtype=torch.float64
        )

        def write():
            write_weights(job, model, folder=run, note=notes.append)

        def export(name):
            export_weights(job, model, f"{folder}/{name}")

        errors = []
        for call, good in ((write, 2), (lambda: export("early"), 0), (lambda: export("late"), 36)):
            if topology.rank == 0:
                safetensors_stream._write_all = fails_after(good, honest)
            errors.append(refusal(call))
        safetensors_stream._write_all = honest
        errors.append(refusal(lambda: export("run")))
        left = sorted(path.name for path in Path(folder).rglob("*"))
        write()
    return errors, left, notes


def test_a_full_disk_ends_all_ranks_with_one_error(tmp_path):
    """The second tensor, the first, and the header after all 36 of them cannot be written."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").touch()
    (first, left, notes), (second, _, silent) = run_ranks(
        2, on_full_disks, str(tmp_path), timeout=30
    )
    reason = "cannot be written (No space left on device: it takes "
    for kind, text in first[:3]:
        assert kind == RunError.__name__
        assert "/0.part " in text
        assert reason in text
        assert "free without it); make room there, then " in text
    assert first[0][1].endswith(f"then write it again with --resume {run}")
    assert first[:3] == second[:3]
    assert [kind for kind, _ in (first[3], second[3])] == ["ValueError", PeerError.__name__]
    assert "already contains config.toml" in second[3][1]
    assert left == ["config.toml", "run"]
    assert len(notes) == 2
    assert not silent
    model, weights = open_weights(tmp_path / "model"), load_weights(run / "weights").tensors
    assert list(model) == list(weights)
    assert all(torch.equal(model[name], weights[name]) for name in model)


class Steps:
    """Six steps of one sequence each."""

    batches = SimpleNamespace(steps=lambda epoch: 6)

    def from_place(self, place, is_closed):
        for number in range(6):
            sequences = [SimpleNamespace(id=number, length=3)]
            yield SimpleNamespace(
                place=SimpleNamespace(step=number), plan=SimpleNamespace(sequences=sequences)
            )


def scored(folder: str):
    """The errors of scores that cannot be written, and what is left of them."""
    steps, errors = 0, []
    with ranks_of(lanes=2) as (topology, _):

        class Scores:
            def __init__(self, executor, temperature):
                pass

            def scores(self, step):
                nonlocal steps
                steps += 1
                return sum_over(torch.ones(3, dtype=torch.float64), topology.groups.world)

        class Source:
            fields = ()
            lengths = np.full(6, 3)

            def __getitem__(self, number):
                if topology.rank == 0 and number == 2:
                    raise FULL
                return TokenizedSample(number, np.arange(3, dtype=np.int32), np.ones(3, bool))

        score.Scorer, score.reshard = Scores, lambda executor: None
        job = SimpleNamespace(
            topology=topology,
            indexed_source=Source(),
            tell=lambda text: None,
            status=SimpleNamespace(at=lambda *place, **given: None),
            dtype=torch.float64,
        )
        for out in (f"{folder}/scores", f"{folder}/scores.parquet"):
            task = score.ScoreTask(out)
            errors.append(refusal(lambda task=task: score.write_scores(job, None, Steps(), task)))
    return steps, errors, [path.name for path in Path(folder).iterdir()]


def test_scores_that_cannot_be_written_end_all_ranks(tmp_path):
    """After the third of six steps: the others are not computed."""
    first, second = run_ranks(2, scored, str(tmp_path), timeout=30)
    assert first == second
    steps, errors, left = first
    assert steps == 2 * 3
    assert [kind for kind, _ in errors] == [RunError.__name__] * 2
    end = "cannot be written (No space left on device); make room there, then score again"
    assert [text for _, text in errors] == [
        f"{tmp_path}/scores {end}",
        f"{tmp_path}/scores.parquet {end}",
    ]
    assert not left


def test_items_that_cannot_be_produced_end_without_an_agreement(monkeypatch):
    """The other ranks are in the collectives of another item: there is nobody to agree with."""
    agreements, written = [], []

    def agreed(groups):
        agreements.append(groups)
        return nullcontext()

    monkeypatch.setattr(shared_stream, "agreed", agreed)

    def items():
        yield from "ab"
        raise RuntimeError("out of memory")

    groups = SimpleNamespace(world=SimpleNamespace(rank=lambda: 0))
    with pytest.raises(RuntimeError, match="out of memory"):
        shared_stream.write_on_rank_0(items(), groups, written.extend)
    assert written == ["a", "b"]
    assert len(agreements) == 3
