"""RunConfig: a run in six sections, read from a recipe and checked before torch is imported."""

from longshore.config.check import check_config, check_longest, decoder_config, planner_options
from longshore.config.folder import make_run_folder
from longshore.config.ranks import Ranks
from longshore.config.read import load_config, with_defaults
from longshore.config.sections import RunConfig

__all__ = [
    "Ranks",
    "RunConfig",
    "check_config",
    "check_longest",
    "decoder_config",
    "load_config",
    "make_run_folder",
    "planner_options",
    "with_defaults",
]
