"""Longshore: packed training with dynamic context parallelism.

The public names, each imported from its module when it is first used, so that `import longshore`
costs nothing and does not load torch; docs/api.md lists them with their signatures.

    from longshore import Trainer, make_plan
"""

# Nothing is imported here: `python -m longshore.cli.main` has the working folder first on its path,
# until cli/main.py has put it last. Type checkers take a variable of this name as true.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from longshore.advisor.step_time import model_cost
    from longshore.arch.costs import make_layout, stage_costs
    from longshore.arch.decoder import DecoderConfig
    from longshore.arch.presets import preset
    from longshore.batch import Counts, CPGroup, MicroBatch, PackContext, SeqContext, whole_context
    from longshore.config.load import load_config
    from longshore.config.schema import RunConfig
    from longshore.data.exchange import send_back
    from longshore.data.pack import (
        Piece,
        Shards,
        cut_shards,
        lane_cuts,
        merge,
        pack_lane,
        pack_step,
        unpack,
    )
    from longshore.data.source import BatchSize, Field, MemorySource, Place, TokenizedSample
    from longshore.data.steps import IndexedSteps, Loader, Packing, Step, StreamedSteps
    from longshore.data.store import Store
    from longshore.data.tokenize import Rules, SampleTokenizer, Tokenizer, lane_rows, samples_of
    from longshore.distributed.topology import CPGroups, Topology, make_topology
    from longshore.hf.adapter import adapt
    from longshore.model.decoder import Decoder
    from longshore.model.init import init_decoder
    from longshore.parallel.apply import Choices, parallelize
    from longshore.parallel.fsdp import begin_round
    from longshore.parallel.shift import shift
    from longshore.plan.check import check
    from longshore.plan.cost import CostProfile, load_profile
    from longshore.plan.planner import make_plan
    from longshore.plan.types import (
        Pack,
        Plan,
        PlanSetting,
        Policy,
        Round,
        Sequence,
        Stats,
        policy_named,
        policy_names,
    )
    from longshore.run.trainer import Trainer
    from longshore.train.supervision import RunError

_NAMES_OF = {
    "advisor.step_time": "model_cost",
    "arch.costs": "make_layout stage_costs",
    "arch.decoder": "DecoderConfig",
    "arch.presets": "preset",
    "batch": "Counts CPGroup MicroBatch PackContext SeqContext whole_context",
    "config.load": "load_config",
    "config.schema": "RunConfig",
    "data.exchange": "send_back",
    "data.pack": "Piece merge pack_step unpack pack_lane Shards cut_shards lane_cuts",
    "data.source": "BatchSize Place Field MemorySource TokenizedSample",
    "data.steps": "IndexedSteps Loader Packing Step StreamedSteps",
    "data.store": "Store",
    "data.tokenize": "Rules SampleTokenizer Tokenizer lane_rows samples_of",
    "distributed.topology": "CPGroups Topology make_topology",
    "hf.adapter": "adapt",
    "model.decoder": "Decoder",
    "model.init": "init_decoder",
    "parallel.apply": "Choices parallelize",
    "parallel.fsdp": "begin_round",
    "parallel.shift": "shift",
    "plan.check": "check",
    "plan.cost": "CostProfile load_profile",
    "plan.planner": "make_plan",
    "plan.types": "Policy policy_named policy_names Pack Plan PlanSetting Round Sequence Stats",
    "run.trainer": "Trainer",
    "train.supervision": "RunError",
}
_HOME = {name: module for module, names in _NAMES_OF.items() for name in names.split()}

__all__ = [
    "BatchSize",
    "CPGroup",
    "CPGroups",
    "Choices",
    "CostProfile",
    "Counts",
    "Decoder",
    "DecoderConfig",
    "Field",
    "IndexedSteps",
    "Loader",
    "MemorySource",
    "MicroBatch",
    "Pack",
    "PackContext",
    "Packing",
    "Piece",
    "Place",
    "Plan",
    "PlanSetting",
    "Policy",
    "Round",
    "Rules",
    "RunConfig",
    "RunError",
    "SampleTokenizer",
    "SeqContext",
    "Sequence",
    "Shards",
    "Stats",
    "Step",
    "Store",
    "StreamedSteps",
    "TokenizedSample",
    "Tokenizer",
    "Topology",
    "Trainer",
    "adapt",
    "begin_round",
    "check",
    "cut_shards",
    "init_decoder",
    "lane_cuts",
    "lane_rows",
    "load_config",
    "load_profile",
    "make_layout",
    "make_plan",
    "make_topology",
    "merge",
    "model_cost",
    "pack_lane",
    "pack_step",
    "parallelize",
    "policy_named",
    "policy_names",
    "preset",
    "samples_of",
    "send_back",
    "shift",
    "stage_costs",
    "unpack",
    "whole_context",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("longshore")
    if name not in _HOME:
        raise AttributeError(f"module 'longshore' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"longshore.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
