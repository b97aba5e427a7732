"""What is fitted to measured seconds, with seconds made up from known costs."""

from dataclasses import fields

import pytest
import torch
from tests.advisor.machines import PART, make_machine

from longshore.advisor.calibrate import StepSample, UpdateSample, fit_overheads
from longshore.advisor.calibrate_parts import (
    AMOUNTS,
    PartSample,
    amount_of,
    cases_of,
    fit_part,
    references,
    work_of,
)
from longshore.advisor.machine import KINDS, FixedCosts
from longshore.advisor.step_time import fsdp_units
from longshore.arch.presets import PRESETS, preset
from longshore.arch.sparse_attention import SparseAttentionConfig
from longshore.model.decoder import Decoder
from longshore.model.norm_rope import Float32Parameters

FIXED = {
    "step": 1e-2,
    "round": 2e-3,
    "block": 3e-4,
    "round_parameter": 1e-9,
    "round_token": 1e-6,
    "step_parameter": 5e-9,
    "norm": 1e-9,
    "optimizer": 3e-9,
}


def sample(work, *, plain=1e-3):
    """Forward takes a quarter of the rest, as in PART."""
    rest = sum(getattr(PART, name) * amount for name, amount in amount_of(work).items())
    return PartSample(work, plain / 3 + rest / 4, plain + rest, plain / 3, plain)


def test_known_costs_of_attention_are_found_again():
    reference = references("cpu")[0]
    cases = cases_of("attention", "cpu")
    samples = [sample(work_of(reference, lengths, item=4, scan_chunk=32)) for lengths in cases]
    fitted = fit_part("x", samples, host=3.0, host_forward=1.0)
    for name in ("call", "value", "core", "sequence", "forward"):
        assert getattr(fitted.cost, name) == pytest.approx(getattr(PART, name), rel=1e-6), name
    assert fitted.error < 1e-9
    assert (fitted.cost.host, fitted.cost.host_forward) == (3.0, 1.0)
    assert fitted.cost.origin == "measured"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_kind_of_part_is_measured(device):
    kinds = {reference.kind for reference in references(device)}
    assert kinds == {*KINDS} - {"other"} == {*AMOUNTS}


def test_the_presets_have_no_other_kinds():
    """But for sparse attention: its time follows from its FLOPs until it has kernels to measure."""
    parts = [part for name in PRESETS for part in preset(name).parts]
    others = {type(part) for part in parts if part.timed_as == "other"}
    assert others == {SparseAttentionConfig}
    assert {part.timed_as for part in parts} == {*KINDS} - {"embedding", "head"}


def step_sample(rounds, blocks, parameters, tokens):
    device = FIXED["step"] + rounds * FIXED["round"] + rounds * blocks * FIXED["block"]
    device += parameters * (rounds * FIXED["round_parameter"] + FIXED["step_parameter"])
    device += rounds * tokens * FIXED["round_token"]
    host = 1e-3 + rounds * (2e-4 + blocks * 5e-5)
    return StepSample(rounds, blocks, parameters, tokens, device, device + 1e-3, host)


def test_known_overheads_are_found_again():
    sizes = [(2, 10**6, 64), (6, 3 * 10**6, 64), (2, 10**7, 64), (2, 10**6, 512)]
    steps = [step_sample(rounds, *size) for size in sizes for rounds in (1, 3)]
    updates = [UpdateSample(n, n * FIXED["norm"], n * FIXED["optimizer"]) for _, n, _ in sizes]
    costs = fit_overheads(make_machine(byte=1e-9, message=2e-9).fixed, steps, updates)
    hosts = {"step_host": 1e-3, "round_host": 2e-4, "block_host": 5e-5}
    for name, seconds in {**FIXED, **hosts, "byte": 1e-9, "message": 2e-9}.items():
        assert getattr(costs, name).seconds == pytest.approx(seconds, rel=1e-5), name
    assert {each.name for each in fields(FixedCosts)} == {
        *FIXED,
        *hosts,
        *("byte", "message", "graph_host"),
    }


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("tiny")])
def test_units_of_fsdp_are_counted_as_the_model_has_them(name):
    with torch.device("meta"):
        model = Decoder(preset(name))
    blocks = [*model.layers.values(), *model.mtp.values()]
    uncast = [module for module in model.modules() if isinstance(module, Float32Parameters)]
    assert fsdp_units(preset(name)) == len(blocks) + len(uncast)
