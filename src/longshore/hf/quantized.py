"""Quantized checkpoints, refused by name before anything is trained. No torch.

In: config.json of a folder, and the headers of its files. Out: nothing, or a ValueError that says
how the weights are quantized and how to get a folder of plain weights. Training needs weights that
small steps can change; those of FP8 or 4 bits are rounded, and their scales are tensors of their
own.

    refuse_quantized({"quantization_config": {"quant_method": "mxfp4"}})     … Mxfp4Config(…) …
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longshore.hf.tensor_map import read_header

KEYS = ("quantization_config", "compression_config")
LOAD = "load it in transformers with quantization_config={}(dequantize=True), and save it again"
WAYS_OUT = {
    "fp8": ("FP8", LOAD.format("FineGrainedFP8Config")),
    "fbgemm_fp8": ("FP8", "use the bfloat16 folder that it was made from"),
    "mxfp4": ("MXFP4, as gpt-oss is published", LOAD.format("Mxfp4Config")),
    "bitsandbytes": (
        "bitsandbytes, 8 or 4 bits",
        "load it in transformers, call dequantize() and save_pretrained() it",
    ),
    "gptq": ("GPTQ", "use the unquantized folder that it was made from"),
    "awq": ("AWQ", "use the unquantized folder that it was made from"),
}
"""For each quant_method what it is, and how to get plain weights."""
OTHER = "use the unquantized folder that it was made from"
FLOAT8 = "F8_"
PACKED = (".qweight", ".weight_packed", ".weight_scale_inv", "_proj_blocks", ".quant_state.")
"""Parts of names that only quantized weights have."""


def refuse_quantized(raw: Mapping[str, Any]) -> None:
    """By the keys of config.json, those of a text model inside another included."""
    inner = raw.get("text_config")
    for keys in (raw, inner if isinstance(inner, Mapping) else {}):
        for key in KEYS:
            if not keys.get(key):
                continue
            about = keys[key]
            method = about.get("quant_method", "?") if isinstance(about, Mapping) else about
            name, way_out = WAYS_OUT.get(str(method), ("", OTHER))
            what = f"{method}: {name}" if name and name.lower() != method else str(method)
            raise ValueError(
                f"{key} says that the weights are quantized ({what}); only float weights can be "
                f"trained: {way_out}"
            )


def refuse_quantized_files(folder: str | Path) -> None:
    """By the numbers and names in its files; a folder without readable weights passes."""
    folder = Path(folder)
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            header = read_header(path)
        except (OSError, ValueError):
            continue  # the error comes when its tensors are read
        for name, entry in header.items():
            dtype = str(entry.get("dtype", "")) if isinstance(entry, dict) else ""
            if dtype.startswith(FLOAT8) or any(part in name for part in PACKED):
                raise ValueError(
                    f"{path.name} has the tensor {name} of {dtype}: its weights are quantized"
                    f"{' to FP8' if dtype.startswith(FLOAT8) else ''}; only float weights can be "
                    f"trained, so convert the folder to bfloat16, or {OTHER}"
                )
