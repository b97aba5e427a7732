"""`longshore report`: run folders become a page."""

import pytest
from tests.report.run_folders import make_run

from longshore.cli.options import Parser
from longshore.cli.report import register_report


def report(*words):
    parser = Parser("longshore")
    register_report(parser.add_subparsers())
    args = parser.parse_args(["report", *map(str, words)])
    args.run(args)


def test_writes_into_the_first_run(tmp_path, capsys):
    folder = make_run(tmp_path / "demo-1", steps=6)
    report(folder)
    assert "data-ready" in (folder / "report.html").read_text(encoding="utf-8")
    said = capsys.readouterr().out
    assert said.startswith("demo-1: 6 steps")
    assert said.endswith(f"page: {folder / 'report.html'} (open it in a browser)\n")


def test_compares_runs_in_a_page_of_that_name(tmp_path, capsys):
    runs = [make_run(tmp_path / name, steps=3) for name in ("a", "b")]
    report(*runs, "--html", tmp_path / "compare.html")
    assert (tmp_path / "compare.html").is_file()
    assert not (runs[0] / "report.html").exists()
    assert "the configurations differ in: nothing" in capsys.readouterr().out


def test_refuses_what_it_cannot_read_or_write(tmp_path):
    folder = make_run(tmp_path / "run", steps=2)
    with pytest.raises(ValueError, match=r"nowhere is missing; name the folder of a run"):
        report(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"nowhere/page.html: No such file or directory"):
        report(folder, "--html", tmp_path / "nowhere/page.html")
    with pytest.raises(ValueError, match="RUN"):
        report()
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match=r"run has no metrics.jsonl"):
        report(folder)
