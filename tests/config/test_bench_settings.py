"""The settings that benches name in text, which mypy cannot check, exist and fit together."""

import importlib
from itertools import product
from pathlib import Path

import pytest

from longshore.config.check import check_config
from longshore.config.load import load_config

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def module_of(monkeypatch):
    """A bench's modules, which find each other as scripts do."""
    monkeypatch.syspath_prepend(str(BENCH))
    # bench/gpu.py sets it; here it is as before afterwards.
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    return importlib.import_module


def test_the_cases_of_one_gpu(module_of):
    cases = module_of("gpu_cases")
    for name, smoke in product(cases.CASES, (False, True)):
        check_config(load_config(None, cases.words_of(name, smoke=smoke)), 1)


def test_the_forms_with_and_without_graphs(module_of):
    graphs = module_of("gpu_graphs")
    changes = [*graphs.FORMS.values(), *graphs.VARIANTS.values()]
    for name, models, more in product(graphs.MODELS, (graphs.MODELS, graphs.SIX_LAYERS), changes):
        words = graphs.words(name, 2048, *more, smoke=False, models=models)
        check_config(load_config(None, words), 1)


@pytest.mark.parametrize("smoke", [False, True])
def test_the_curves_of_experts(module_of, smoke):
    words = module_of("gpu_curves").moe_recipe(smoke=smoke, steps=50)
    check_config(load_config(None, [*words, "parallel.tp=2", "parallel.ep=4"]), 4)


def test_the_lengths_of_sparse_attention(module_of):
    words = module_of("gpu_sparse").words(4096, smoke=False)
    check_config(load_config(None, words), 1)
