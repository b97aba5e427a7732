"""A run that cannot be written is refused before its first step."""

from pathlib import Path

import numpy as np
import pytest

from longshore.arch.costs import parameter_count
from longshore.cli.main import main
from longshore.config.check import decoder_config
from longshore.config.load import load_config
from longshore.data.source import Field, TokenizedSample
from longshore.data.store import write_store
from longshore.distributed.process_group import alone
from longshore.run import folder as room
from longshore.run import score
from longshore.run.resume import FRESH, check_output

WORDS = ["model.preset=tiny-llama", "data.batch=2", "output.folder=run"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(*words):
    return load_config(None, [*WORDS, *words])


@pytest.mark.parametrize(
    ("words", "bytes_of_each"),
    [
        ([], {"checkpoint": 12, "weights": 4}),
        (["output.keep=0", "output.export=hf"], {"weights": 4, "export": 2}),
        (["train.dtype=float64", "output.weights=false"], {"checkpoint": 24}),
        (["train.dtype=float32", "output.export=hf", "output.keep=0"], {"weights": 4, "export": 4}),
        (["output.keep=0", "output.weights=false"], {}),
        (["model.lora.rank=4", "output.export=hf"], {"export": 2}),
    ],
)
def test_what_a_run_writes(words, bytes_of_each, monkeypatch):
    decoder = decoder_config(config_of(*words).model)
    count = parameter_count(decoder)
    expected = {what: size * count for what, size in bytes_of_each.items()}
    assert room.written_bytes(config_of(*words), decoder) == expected
    needed = sum(expected.values()) + room.SPARE
    for free, fits in ((needed, True), (needed - 1, not expected), (None, True)):
        monkeypatch.setattr(room, "free_bytes", lambda path, free=free: free)
        if fits:
            check_output(config_of(*words), FRESH)
        else:
            with pytest.raises(
                ValueError, match=r"output.(folder|export): the run writes .* but only .* fr"
            ):
                check_output(config_of(*words), FRESH)


def test_each_disk_has_to_hold_its_own_part(monkeypatch):
    Path("far").mkdir()
    monkeypatch.setattr(room, "disk_of", lambda path: path.name == "far")
    monkeypatch.setattr(room, "free_bytes", lambda path: 0 if path.name == "far" else 10**9)
    check_output(config_of("output.export=hf"), FRESH)
    with pytest.raises(ValueError, match=r"output.export: .*\(export .*are free in .*/far;"):
        check_output(config_of("output.export=far/hf"), FRESH)


def test_a_full_disk_is_told_before_the_ranks_start(monkeypatch, capsys):
    monkeypatch.setattr(room, "free_bytes", lambda path: 10**6)
    monkeypatch.setattr("longshore.cli.train.launch", lambda *_: pytest.fail("ranks started"))
    assert main(["train", "output.folder=run"]) == 2
    assert "output.folder: the run writes" in capsys.readouterr().err
    assert not Path("run").exists()
    assert main(["train", "output.folder=run", "--print-config"]) == 0  # it may run elsewhere


def test_scores_that_do_not_fit_are_refused_before_the_weights_are_read(monkeypatch):
    """Tokens, scores, two numbers of each and one of a sequence; Parquet compresses all but one."""
    fields = (Field("pairs", "token", "float64", (2,)), Field("kind", "sequence", "int16"))
    ids, mask = np.arange(4, dtype=np.int32), np.ones(4, dtype=bool)
    values = {"pairs": np.ones((4, 2)), "kind": np.int16(1)}
    write_store("made", [TokenizedSample(i, ids, mask, values) for i in range(3)], fields=fields)
    config = config_of("data.path=made", "train.device=cpu")

    def read(*_):
        raise ValueError("the weights are read")

    monkeypatch.setattr(score, "make_model", read)
    for out, needed in (("scored", 12 * (4 + 4 + 2 * 8) + 3 * 2), ("x.parquet", 12 * 4)):
        task = score.ScoreTask(out, "ref")
        for lacking, message in ((1, f"--out: {out} takes .*, but only "), (0, "are read")):
            free = needed + room.SPARE - lacking
            monkeypatch.setattr(room, "free_bytes", lambda path, free=free: free)
            with alone() as ranks, pytest.raises(ValueError, match=message):
                score.score(config, ranks, task)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["output.export=run"], "are the same folder"),
        (["output.folder=hf/run", "output.export=hf"], "hf contains output.folder, hf/run, so it"),
        (["output.export=runs"], "runs contains data.cache, runs/prepared, so it"),
        (["output.export=full"], "output.export: full already contains x; name a new folder"),
        (["output.export=full/x"], "output.export: full/x is a file"),
    ],
)
def test_an_export_that_cannot_be_written(words, message):
    Path("full").mkdir()
    Path("full/x").touch()
    with pytest.raises(ValueError, match=message):
        check_output(config_of(*words), FRESH)
