"""What the benchmarks share: the machine in words, Markdown tables, and sections of RESULTS.md.

In: rows of text. Out: Markdown. Each benchmark owns the section between its own two comments, such
as `<!-- planner: begin -->` and `<!-- planner: end -->`, and leaves the rest of the page alone.
"""

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TITLE = "# Benchmark results\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    safe = [[cell.replace("|", "\\|") for cell in cells] for cells in lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in safe) + "\n"


def one_line(error: Exception) -> str:
    """An error as a table's cell can hold it."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:80]}" if text else type(error).__name__


def machine(packages: Sequence[str]) -> str:
    """The machine a benchmark ran on, in a line, with the versions of these packages."""
    parts = [_cpu(), f"{os.cpu_count()} cores", f"Python {platform.python_version()}"]
    if "torch" in packages:
        import torch

        parts = ([torch.cuda.get_device_name()] if torch.cuda.is_available() else []) + parts
    for package in packages:
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            parts.append(f"{package} not installed")
    return ", ".join(parts)


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write_section(path: Path, name: str, text: str) -> None:
    """Puts `text` between the section's two comments, at the page's end where it has none yet."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    section = f"{begin}\n{text.strip()}\n{end}\n"
    page = path.read_text() if path.exists() else TITLE
    before, found, rest = page.partition(begin)
    if not found:
        path.write_text(f"{page.rstrip()}\n\n{section}")
        return
    _, closed, after = rest.partition(end)
    if not closed:
        raise ValueError(f"{path}: has {begin} without {end}; put it back, or remove both")
    path.write_text(before + section + after.removeprefix("\n"))
