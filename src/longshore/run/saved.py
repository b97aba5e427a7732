"""The model of one of a run's checkpoints, to be exported without any ranks.

In: RUN/checkpoints/step-N. Out: its decoder, from RUN/config.toml, and its tensors, in the order in
which the run itself would export them.
"""

from dataclasses import replace
from pathlib import Path

from longshore.config.check import decoder_config
from longshore.config.load import load_config
from longshore.hf.lora import base_from_json
from longshore.hf.weights import SavedWeights
from longshore.model.lora import is_factor
from longshore.parallel.pipeline.stages import tensor_names
from longshore.run.folder import CONFIG
from longshore.train.checkpoint_files import DamagedError, read_index
from longshore.train.checkpoint_tensors import CheckpointTensors


def open_checkpoint(folder: Path, *, base: Path | None) -> SavedWeights:
    """base: where the Hugging Face folder that the run began with is now; None: where it was."""
    path = folder.resolve().parent.parent / CONFIG
    if not path.is_file():
        raise ValueError(
            f"{folder} is not in a run's folder: {path}, which describes its model, does not exist"
        )
    model = load_config(str(path)).model
    if model.from_hf and base is not None:
        model = replace(model, from_hf=str(base))
    if model.from_hf and not Path(model.from_hf).is_dir():
        raise ValueError(
            f"the run began with {model.from_hf}, which does not exist; name its folder with --base"
        )
    config = decoder_config(model)
    try:
        names = tensor_names(config) if model.code == "longshore" else _saved_names(folder)
        if config.lora is not None:
            names = [*filter(is_factor, names)]
        tensors = CheckpointTensors(folder, names)
    except DamagedError as error:
        raise ValueError(f"{error}; export another checkpoint") from None
    began = base or (Path(model.from_hf) if model.from_hf else None)
    lora = base_from_json(tensors.index.base) if config.lora else None
    return SavedWeights(config=config, base=began, tensors=tensors, lora=lora, code=model.code)


def _saved_names(folder: Path) -> list[str]:
    """Of all parameters and buffers of a model whose names only transformers knows."""
    names = read_index(folder).tensors
    return [name.removeprefix("model.") for name in names if name.startswith("model.")]
