"""`longshore report`: from run folders to one page.

In: the options of REPORT_HELP. Out: an HTML file, and a summary on stdout. `longshore report
runs/demo-1` writes runs/demo-1/report.html.
"""

import argparse
from pathlib import Path
from typing import Any

from longshore.cli.options import add_command, say
from longshore.files import reason
from longshore.report.pages import read_runs, report_summary, write_run_page

REPORT_HELP = """\
Writes a page about a run to look at in a browser: its losses, speed and memory, how well the cost
model predicts its rounds, its experts, its slowest steps and why, and the timeline of any step.
Several runs are drawn into the same charts, with the keys in which their configurations differ.
A run may still be training.

  RUN [RUN …]        the folders of runs, up to 8
  --html OUT.html    the page to write (default: report.html in the first run's folder)

example: longshore report runs/demo-1 runs/demo-2 --html compare.html"""


def register_report(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = add_command(
        commands,
        "report",
        summary="write a page about a run, or about several side by side",
        usage="longshore report RUN [RUN …] [--html OUT.html]",
        text=REPORT_HELP,
        options={"html": str},
        run=run_report,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help=argparse.SUPPRESS)


def run_report(args: argparse.Namespace) -> None:
    page = args.html or str(Path(args.runs[0]) / "report.html")
    try:
        data = read_runs(args.runs)
        write_run_page(page, data)
    except OSError as error:
        raise ValueError(f"{error.filename or page}: {reason(error)}") from None
    say("\n".join(report_summary(data)))
    say(f"page: {page} (open it in a browser)")
