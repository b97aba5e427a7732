"""Checks of model.code=transformers, whose models run as transformers wrote them. No torch.

In: a config. Out: nothing, or a ValueError that names the key and the way out. With parallel.tp 2:

    parallel.tp is 2, but model.code=transformers has no tensor parallelism; set parallel.tp=1, …
"""

import importlib.util
from pathlib import Path

from longshore.arch.decoder import DecoderConfig
from longshore.config.located import in_keys
from longshore.config.schema import ModelConfig, RunConfig

WITHOUT = {
    "tp": "tensor parallelism",
    "ep": "expert parallelism",
    "pp": "pipelines",
}


def check_code(config: RunConfig) -> None:
    """Refuses what models of transformers cannot have."""
    model = config.model
    if model.code == "longshore":
        return
    if not model.from_hf:
        raise ValueError(
            "model.code=transformers runs the code of a Hugging Face checkpoint; give its folder "
            "as model.from_hf, or leave model.code out"
        )
    for name in ("module", "aux_weight", "bias_update"):
        if getattr(model, name) not in ("", "auto"):
            raise ValueError(
                f"model.{name} works only with Longshore's own models; leave it out, or "
                "model.code=transformers"
            )
    for name, what in WITHOUT.items():
        if (size := getattr(config.parallel, name)) > 1:
            raise ValueError(
                f"parallel.{name} is {size}, but model.code=transformers has no {what}; set "
                f"parallel.{name}=1, or use model.code=longshore"
            )
    if config.graph.layers:
        raise ValueError(
            "graph.layers works only with Longshore's own models; leave it out, or use "
            "model.code=longshore"
        )
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            "model.code=transformers needs the package transformers; install longshore[hf]"
        )


def transformers_decoder(model: ModelConfig) -> DecoderConfig:
    """What the model of a folder costs, after a look at its keys."""
    from longshore.hf.config_file import CONFIG, load_object
    from longshore.hf.generic_keys import describe_decoder
    from longshore.hf.refused_keys import check_keys

    with in_keys("model.from_hf"):
        raw = load_object(Path(model.from_hf) / CONFIG)
        check_keys(raw)
        return describe_decoder(raw)
