"""Writes advice as one HTML file that works offline: memory and speed of each candidate, reasons.

In: the data of run/advise_answer.py. Out: a file that contains its styles, script and data. A
candidate is a bar of its memory, part by part, against a line at the memory that may be used, and a
bar of its tokens/s.

    write_advise_page("advice.html", data)
"""

from pathlib import Path

from longshore.files import write_atomically
from longshore.report.advise_text import MEMORY_NAMES, headline
from longshore.report.page_data import Json
from longshore.report.pages import page_of

STYLES = ("plan_page.css", "advise_page.css")
SCRIPTS = ("advise_page.js",)


def write_advise_page(path: str | Path, data: Json) -> None:
    write_atomically(path, advise_page(data))


def advise_page(data: Json) -> str:
    """The HTML of the page with its data."""
    shown = {**data, "headline": headline(data), "memory_names": MEMORY_NAMES}
    return page_of("advise_page.html", shown, styles=STYLES, scripts=SCRIPTS)
