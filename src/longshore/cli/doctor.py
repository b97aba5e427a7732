"""`longshore doctor`: checks whether this machine can train, and what is wrong with it.

In: the options of DOCTOR_HELP. Out: a line for each finding, or JSON; exit code 1 if something that
training needs is broken. Alone it starts its own ranks; under torchrun it tests torchrun's ranks,
and rank 0 prints.

    ! /dev/shm has 0.1 GiB
      → NCCL may run out of it; start the container with --shm-size=16g
"""

import argparse
import json
import os
import pickle
import shutil
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from longshore.cli.launch import flush_and_exit, gpu_count, launch, ranks_of_run
from longshore.cli.options import add_command, count, say
from longshore.config.schema import RunConfig
from longshore.distributed.process_group import Ranks, loopback, ranks_from_environment
from longshore.doctor.machine import DoctorOptions, Finding, bad, examine, first_line, good, warn
from longshore.files import printable, temporary_folder

if TYPE_CHECKING:
    from longshore.doctor.ranks import RankProbe

DOCTOR_HELP = """\
Checks this machine: torch and its devices, the backend of each op and whether its results are
right, packages, disk; and whether processes can connect and form the groups of a run.
✓ is fine, ! is a warning, ✗ is broken and ends the command with exit code 1.

  --ranks N          processes to start here, over gloo (default: 4)
  --json             print JSON instead

Under torchrun it tests the processes that torchrun started, over NCCL on GPUs, and prints the node,
device and lane of each:

  torchrun --nproc-per-node 8 -m longshore.cli.main doctor"""
MOST_RANKS = 1024
RANKS = 4
LIMIT_S = 120.0
WIDTH = 80
ROWS = 64
MARKS = {"ok": "✓", "warn": "!", "bad": "✗"}
PLAIN = {"ok": "+", "warn": "!", "bad": "x"}
COLOURS = {"ok": "32", "warn": "33", "bad": "1;31"}


def register_doctor(commands: "argparse._SubParsersAction[Any]") -> None:
    add_command(
        commands,
        "doctor",
        summary="check whether this machine can train, and what is wrong with it",
        usage="longshore doctor [--ranks N] [--json]",
        text=DOCTOR_HELP,
        options={"ranks": count(MOST_RANKS), "json": bool},
        run=run_doctor,
    )


def run_doctor(args: argparse.Namespace) -> None:
    place = ranks_from_environment()
    ranks = ranks_of_run(args.ranks, RunConfig().with_ranks(RANKS), place)
    setting = DoctorOptions(gpu_count(), ranks, Path("runs"))
    if place is not None and place.rank:
        _follow(setting, place)
        return
    report = DoctorReport(sys.stdout, is_json=args.json)
    for name, findings in examine(setting):
        report.add(name, findings)
    probe, error = _probe_ranks(report, setting, place)
    report.end(probe)
    if isinstance(error, TimeoutError):
        flush_and_exit(1)  # the probe still hangs in a thread, which would keep this process alive
    if report.count("bad"):
        raise SystemExit(1)


def _probe_ranks(
    report: "DoctorReport", setting: DoctorOptions, place: Ranks | None
) -> "tuple[RankProbe | None, Exception | None]":
    """Connects the ranks and reports; a failure is a finding."""
    if any(f.text.startswith("torch cannot be imported") for f in report.sections["torch"]):
        report.add("ranks", [bad("not tested, because torch cannot be imported")])
        return None, None
    try:
        probe = _probe_local(setting.ranks) if place is None else probe_as(place, ())
    except Exception as error:
        from longshore.doctor.ranks import failed

        report.add("ranks", [failed(error)])
        return None, error
    hint = [good("only gloo was tested; for NCCL start this command with torchrun, see --help")]
    more = _restarts() if place else hint if setting.gpus > 1 else []
    report.add("ranks", [*probe.findings, *more])
    return probe, None


def _restarts() -> list[Finding]:
    """Ranks that torchrun restarts find the addresses of dead ranks in the store they share."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if restarts == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return []
    return [
        warn(
            f"torchrun may restart the ranks (--max-restarts {restarts}); they would then wait "
            "forever for dead ranks, whose addresses are still in torchrun's store",
            "start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment",
        )
    ]


def _follow(setting: DoctorOptions, place: Ranks) -> None:
    """What the other ranks do; the first of each machine sends its warnings to rank 0."""
    remarks: list[Finding] = []
    if place.local_rank == 0:
        findings = [finding for _, section in examine(setting) for finding in section]
        remarks = [finding for finding in findings if finding.mark != "ok"]
    try:
        probe_as(place, tuple(remarks))
    except Exception as error:
        say(f"longshore: rank {place.rank}: {first_line(error)}", to_stderr=True)
        flush_and_exit(1)


def probe_as(place: Ranks, remarks: tuple[Finding, ...]) -> "RankProbe":
    """This process's part of the probe, on the device and backend that training would use."""
    from longshore.doctor.ranks import local_place, probe_ranks, with_time_limit
    from longshore.train.device import pick_backend, pick_device

    is_local = place.rendezvous.startswith("file://")
    device = pick_device("cpu" if is_local else "auto", place.local_rank)
    agent = os.environ.get("GROUP_RANK", "")  # torchrun's; otherwise all ranks are on one node
    node = int(agent) if agent.isdigit() and place.rendezvous == "env://" else 0
    own = local_place(place.rank, node=node, local_rank=place.local_rank, device=device)
    backend = pick_backend(device, place.local_size)
    own = replace(own, remarks=remarks)
    work = partial(probe_ranks, own, ranks=place, backend=backend, device=device)
    with loopback(place):
        return with_time_limit(LIMIT_S, work)


def _probe_local(ranks: int) -> "RankProbe":
    """Starts ranks on this machine, as `longshore train` does."""
    with temporary_folder("doctor-") as folder:
        answer = Path(folder) / "probe"
        launch(partial(_probe_and_write, answer), RunConfig(), ranks)
        probe: RankProbe = pickle.loads(answer.read_bytes())
        return probe


def _probe_and_write(answer: Path, config: RunConfig, place: Ranks) -> None:
    """One local rank's part; rank 0 writes the result to a file."""
    probe = probe_as(place, ())
    if place.rank == 0:
        answer.write_bytes(pickle.dumps(probe))


@dataclass(slots=True)
class DoctorReport:
    """Prints findings as they come, or all at the end as JSON."""

    stream: TextIO
    is_json: bool
    sections: dict[str, tuple[Finding, ...]] = field(default_factory=dict)

    def count(self, mark: str) -> int:
        findings = [finding for section in self.sections.values() for finding in section]
        return sum(finding.mark == mark for finding in findings)

    def add(self, name: str, findings: Iterable[Finding]) -> None:
        self.sections[name] = tuple(findings)
        if not self.is_json:
            self._write([name, *_lines(self.sections[name], self._width())])

    def end(self, probe: "RankProbe | None") -> None:
        warned, broken = self.count("warn"), self.count("bad")
        if self.is_json:
            ranks = [asdict(rank_place) for rank_place in probe.places] if probe else []
            sections = {name: [*map(asdict, section)] for name, section in self.sections.items()}
            data = {"ok": not broken, "sections": sections, "ranks": ranks}
            self._write([json.dumps(data, indent=1)])
            return
        warnings = f"; {warned} warning{'s' if warned > 1 else ''}" if warned else ""
        problems = "1 problem prevents" if broken == 1 else f"{broken} problems prevent"
        total = f"{problems} training" if broken else "everything that training needs is available"
        table = _table(probe, self._width()) if probe else []
        self._write([*table, "", f"{total}{warnings}"])

    def _width(self) -> int:
        if not self.stream.isatty():
            return WIDTH
        return max(40, min(100, shutil.get_terminal_size((WIDTH, 24)).columns))

    def _write(self, lines: list[str]) -> None:
        """With colours on a terminal; in characters that the stream can encode."""
        encoding = self.stream.encoding or "utf-8"
        lines = [printable(line) for line in lines]
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        if self.stream.isatty() and not plain:
            lines = [_coloured(line) for line in lines]
        text = "\n".join(lines) + "\n"
        try:
            text.encode(encoding)
        except UnicodeEncodeError:
            for mark, letter in MARKS.items():
                text = text.replace(letter, PLAIN[mark])
            text = text.replace("→", "->").encode(encoding, "replace").decode(encoding)
        self.stream.write(text)
        self.stream.flush()


def _coloured(line: str) -> str:
    """The line with its mark in colour; one that is not indented is bold."""
    for mark, letter in MARKS.items():
        if line.startswith(f"  {letter} "):
            return f"  \x1b[{COLOURS[mark]}m{letter}\x1b[0m{line[3:]}"
    return line if line[:1] in ("", " ") else f"\x1b[1m{line}\x1b[0m"


def _lines(findings: Iterable[Finding], width: int) -> list[str]:
    lines = []
    for finding in findings:
        for start, text in (f"  {MARKS[finding.mark]} ", finding.text), ("    → ", finding.way_out):
            indent = " " * len(start)
            lines += textwrap.wrap(text, width, initial_indent=start, subsequent_indent=indent)
    return lines


def _table(probe: "RankProbe", width: int) -> list[str]:
    """A row for each rank, up to ROWS."""
    rows = [["rank", "node", "local", "device", "lane", "CP groups, as lanes"]]
    for place in probe.places[:ROWS]:
        node = f"{place.node} {place.host}"[:20]
        own = (place.rank, node, place.local_rank, place.device, place.lane, place.groups_in_words)
        rows.append([str(cell) for cell in own])
    widths = [max(len(row[column]) for row in rows) for column in range(5)] + [0]
    lines = []
    for row in rows:
        line = "  " + "  ".join(map(str.ljust, row, widths))
        lines.append(line if len(line) <= width else line[: width - 1] + "…")
    more = len(probe.places) - ROWS
    return [*lines, f"  … and {more} more; --json has all"] if more > 0 else lines
