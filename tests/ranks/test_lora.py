"""LoRA on gloo ranks: factors get the gradients of each sequence alone; what is frozen has none."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.ranks import foreign
from tests.ranks.composed import composed, ranks_of
from tests.ranks.harness import run_ranks
from tests.ranks.hybrids import deepseek, hybrid
from tests.ranks.piped import deep, error_of
from tests.ranks.spine import VOCAB, alone, batches_of, exact, make_samples, worst
from tests.ranks.test_deepseek_v4 import tiny as deepseek_v4

from longshore.arch.decoder import LoRAConfig
from longshore.arch.presets import preset
from longshore.model import lora
from longshore.model.decoder import Decoder
from longshore.model.init import initial_block
from longshore.parallel.apply import Choices, parallelize
from longshore.parallel.shards import fill
from longshore.plan import make_plan
from longshore.plan.layout import parse_layout
from longshore.train.losses import make_loss
from longshore.train.step import Stepper

ALL = LoRAConfig(rank=3, alpha=6.0)
SOME = LoRAConfig(rank=2, alpha=5.0, targets=("q_proj", "o_proj", "layers.1.mlp.down_proj"))
CONFIGS = {
    "llama": lambda: preset("tiny-llama", vocab_size=VOCAB),
    "qwen3-moe": lambda: preset("tiny-qwen3-moe", vocab_size=VOCAB),
    "deepseek-v3": lambda: preset("tiny-deepseek-v3", vocab_size=VOCAB),
    "deepseek-v4": deepseek_v4,
    "hybrid": lambda: hybrid(experts=8),
    "tied": lambda: deep(3, tied=True),
    "deepseek": deepseek,
}
# (lanes, tp, pp, ep): (config, factors, layout or "", mode, recompute)
CASES = {
    (4, 1, 1, 1): [
        ("llama", ALL, "", "zero3", "none"),
        ("qwen3-moe", ALL, "", "zero2", "none"),
        ("deepseek-v3", ALL, "", "zero3", "blocks"),
        ("hybrid", ALL, "", "none", "none"),
        ("llama", SOME, "", "zero2", "blocks"),
        ("deepseek-v4", ALL, "", "zero3", "none"),
    ],
    (2, 2, 1, 2): [
        ("hybrid", ALL, "", "zero3", "none"),
        ("deepseek", ALL, "", "none", "blocks"),
    ],
    (2, 1, 2, 1): [
        ("tied", SOME, "E|tttL", "zero3", "none"),
        ("tied", SOME, "Ett|tL", "zero2", "none"),
        ("deepseek", ALL, "Et|tm|m|L", "zero3", "none"),
    ],
}
IN_EACH_RUN = {(4, 1, 1, 1): 4, (2, 2, 1, 2): 1, (2, 1, 2, 1): 1}
"""How many cases are run in each test run; all of them in `make fuzz`."""


def run_cases(lanes: int, tp: int, pp: int, ep: int, count: int) -> list[str]:
    lora.B_STD = 0.3  # a gets no gradient while b is 0
    faults = []
    with ranks_of(lanes=lanes, tp=tp, pp=pp, ep=ep) as (topology, groups):
        for number, (name, factors, text, mode, recompute) in enumerate(
            CASES[lanes, tp, pp, ep][:count]
        ):
            config, draw = replace(CONFIGS[name](), lora=factors), random.Random(number)
            depths = len(config.mtp)
            layout = text and parse_layout(text, pp=pp, layers=len(config.layers), depths=depths)
            lengths = [draw.choice((1, 2, 5, 17, 40)) for _ in range(8)] + [90]
            vpp = layout.vpp if layout else 1
            plan = make_plan(
                lengths, lanes=lanes, capacity=64, policy="mixed", pp=pp, vpp=vpp, align=tp
            )
            samples = make_samples(plan, number)
            choices = exact(mode=mode, recompute=recompute)
            result = composed(
                config, plan, samples, topology, groups, choices, layout=layout or None
            )
            if topology.rank == 0:
                want = alone(config, samples)
                assert all(map(lora.is_factor, want.gradients))
                assert all(gradient.any() for gradient in want.gradients.values())
                error, worst = error_of(result, want)
                if not error <= 1e-9:
                    faults.append(f"{name} {text} {mode}: {worst} is off by {error}")
    return faults


@pytest.mark.fuzz
@pytest.mark.parametrize("axes", CASES, ids=str)
def test_factors_get_the_gradients_of_each_sequence_alone(
    axes: tuple[int, int, int, int], is_fuzz: bool
) -> None:
    lanes, tp, pp, _ = axes
    count = len(CASES[axes]) if is_fuzz else IN_EACH_RUN[axes]
    for faults in run_ranks(lanes * tp * pp, run_cases, *axes, count, timeout=200):
        assert faults == []


def held_narrow(mode: str) -> list[str]:
    """Gradients that differ if what is frozen is held in the dtype of the arithmetic, float32."""
    lora.B_STD = 0.3
    config = replace(hybrid(), lora=ALL)
    with ranks_of(lanes=2) as (topology, groups):
        plan = make_plan([1, 17, 40, 5], lanes=2, capacity=40)
        batches = batches_of(plan, make_samples(plan), topology.lane, len(config.mtp))
        gradients = []
        for is_narrow in (False, True):
            with torch.device("meta"):
                model = Decoder(config).double()
                if is_narrow:
                    lora.hold_frozen(model, torch.float32)
            choices = Choices(mode=mode, dtype=torch.float32)
            parallelize(model, topology, groups, choices=choices)
            fill(model, topology.device, partial(initial_block, config, seed=3))
            kinds = {parameter.dtype for parameter in model.parameters()}
            assert (torch.float32 in kinds) == is_narrow
            Stepper(model, None, topology, mode, make_loss(), 0.0).gradients(batches, 1.0)
            named = {n: p for n, p in model.named_parameters() if p.requires_grad}
            assert all(p.dtype == p.grad.dtype == torch.float64 for p in named.values())
            gradients.append({n: p.grad.full_tensor() for n, p in named.items()})
    wide, narrow = gradients
    return [name for name, grad in wide.items() if not torch.equal(grad, narrow[name])]


@pytest.mark.parametrize("mode", ["zero3", "none"])
def test_frozen_weights_in_the_dtype_of_the_arithmetic_change_no_bit(mode: str) -> None:
    assert run_ranks(2, held_narrow, mode, timeout=100) == [[], []]


def with_factors(hf) -> None:
    """As model.lora does it."""
    linears = [(n, m) for n, m in hf.named_modules() if type(m) is torch.nn.Linear and ".mlp" in n]
    lora.add_factors(hf, LoRAConfig(2, 6.0, ("down_proj", "up_proj")), linears)


def with_peft(hf) -> None:
    """As a user does it, before adapt."""
    import peft

    targets = ["q_proj", "v_proj", "layers.1.mlp.down_proj"]
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=targets, bias="none")
    peft.inject_adapter_in_model(config, hf)


def run_foreign(changes: list) -> list[str]:
    faults, plan = [], make_plan([1, 17, 40, 5, 90], lanes=4, capacity=40, policy="mixed")
    samples = make_samples(plan)
    with ranks_of(lanes=4) as (topology, groups):
        for change in changes:
            foreign.in_float64("llama")
            hf = foreign.make_hf("llama")
            change(hf)
            draw = torch.Generator().manual_seed(1)
            for parameter in hf.parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                    parameter.data = 0.3 * noise
            choices = exact(mode="zero3")
            result = foreign.together(
                "llama", hf, plan, samples, topology, groups, choices, change=change
            )
            if topology.rank == 0:
                want = foreign.alone(hf, samples)
                assert want.gradients
                assert all("lora" in name for name in want.gradients)
                error, name = worst(result, want)
                if not error <= 1e-9:
                    faults.append(f"{change.__name__}: {name} is off by {error}")
    return faults


def test_factors_of_models_of_transformers() -> None:
    pytest.importorskip("peft")
    for faults in run_ranks(4, run_foreign, [with_factors, with_peft], timeout=100):
        assert faults == []
