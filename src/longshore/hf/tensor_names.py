"""The names of a folder's tensors, from the headers of its files alone. No torch.

In: a folder. Out: the names, or None where it has no weights. A safetensors file begins with the
length of its header, 8 bytes, and the header, JSON:

    read_tensor_names("DeepSeek-V3")    {"lm_head.weight", "model.layers.61.eh_proj.weight", …}

Whether the files are complete and fit the config is checked in hf/tensor_files.py and
hf/checkpoint.py.
"""

import json
from pathlib import Path

LONGEST_HEADER = 100_000_000


def read_tensor_names(folder: Path, stem: str = "model") -> frozenset[str] | None:
    """Names of the tensors; None where there are no weights, or broken ones."""
    try:
        if (single := folder / f"{stem}.safetensors").is_file():
            names = _header(single)
        else:
            index = folder / f"{stem}.safetensors.index.json"
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return frozenset(names) - {"__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _header(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > LONGEST_HEADER:
            raise ValueError(f"{path} has a header of {size} bytes")
        header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise ValueError(f"{path} has no header")
    return header
