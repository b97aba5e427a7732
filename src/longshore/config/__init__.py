"""RunConfig: a run in six sections, read from a recipe and checked before torch is imported."""

from longshore.config.check import check_config, check_longest, decoder_config, planner_setting
from longshore.config.load import load_config, with_defaults
from longshore.config.schema import RunConfig

__all__ = [
    "RunConfig",
    "check_config",
    "check_longest",
    "decoder_config",
    "load_config",
    "planner_setting",
    "with_defaults",
]
