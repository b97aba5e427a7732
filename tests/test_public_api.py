"""The public names: one list, what it costs to import them, and that each is where it says."""

import ast
import inspect
import subprocess
import sys

import pytest
from tests.lint import PACKAGE
from tests.test_docs import script

import longshore

# Whoever takes a name away, or another signature, breaks programs of others: CHANGELOG.md says so.
NAMES = """
BatchSize CPGroup CPGroups Choices CostProfile Counts Decoder DecoderConfig Field IndexedSteps
Loader MemorySource MicroBatch Pack PackContext Packing Piece Place Plan PlanSetting Policy Round
Rules RunConfig RunError SampleTokenizer SeqContext Sequence Shards Stats Step Store
StreamedSteps TokenizedSample Tokenizer Topology Trainer adapt begin_round check cut_shards
init_decoder lane_cuts lane_rows load_config load_profile make_layout make_plan make_topology merge
model_cost pack_lane pack_step parallelize policy_named policy_names preset samples_of send_back
shift stage_costs unpack whole_context
"""
ARGUMENTS = {
    "Trainer": "recipe overrides resume force signals on_step on_evaluation sections",
    "load_config": "recipe overrides values",
    "make_plan": (
        "lengths lanes capacity policy sync profile cp_size min_cp max_cp cp_sizes heads "
        "max_sequences align buckets tp ep pp vpp layout stage_costs packs rounds"
    ),
    "make_layout": "decoder pp vpp text length",
    "stage_costs": "decoder layout recompute length",
    "model_cost": "cost model lanes capacity shard dtype recompute ep",
    "pack_lane": "plan lane samples fields depths pad_id",
    "cut_shards": "plan samples cuts depths fields inputs",
    "pack_step": "plan lane shards counts buckets pad_id tables max_sequences",
    "unpack": "ctx values",
    "merge": "plan pieces",
    "send_back": "plan owners pieces group like",
    "shift": "shard real padded group fill",
    "make_topology": "lanes tp pp ep device",
    "StreamedSteps": (
        "samples planner batch topology fields everywhere packing before_plan stream"
    ),
    "IndexedSteps": "source planner batch seed shuffle topology packing before_plan groups",
}


def imported_for_types():
    """(module, name) of each import that only type checkers see."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {(node.module, alias.name) for node in block.body for alias in node.names}


def test_the_names_are_those_of_the_list():
    assert sorted(longshore.__all__) == sorted(NAMES.split())
    assert set(longshore.__all__) <= set(dir(longshore))


def test_types_modules_and_pages_have_the_same_names():
    here = {(f"longshore.{module}", name) for name, module in longshore._HOME.items()}
    assert imported_for_types() == here
    assert {name for _, name in here} == set(longshore.__all__)
    listed = [name for names in script("api_reference").GROUPS.values() for name in names.split()]
    assert sorted(listed) == sorted(longshore.__all__)


def test_a_name_is_defined_in_its_module():
    things = {name: getattr(longshore, name) for name in longshore.__all__}
    homes = {name: f"longshore.{longshore._HOME[name]}" for name in things}
    assert {name: thing.__module__ for name, thing in things.items()} == homes
    assert [name for name, thing in things.items() if not thing.__doc__] == []


def test_arguments_stay():
    signatures = {name: inspect.signature(getattr(longshore, name)) for name in ARGUMENTS}
    given = {name: " ".join(each.parameters) for name, each in signatures.items()}
    assert given == ARGUMENTS


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Tainer'"):
        _ = longshore.Tainer


def test_importing_loads_no_torch_and_planning_neither():
    code = (
        "import sys, longshore; assert 'numpy' not in sys.modules; "
        "from longshore import make_plan, load_config, preset; "
        "make_plan([5, 3], lanes=2, capacity=8); assert 'torch' not in sys.modules; "
        "print(longshore.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout[0].isdigit()
