"""Reads the metrics of a run back."""

import json
from pathlib import Path


def read_metrics(path):
    """The steps of a metrics file, without an incomplete last line."""
    lines = Path(path).read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]
