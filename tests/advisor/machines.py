"""A machine made up for tests: round numbers, so that predictions can be computed by hand."""

from dataclasses import fields, replace

from longshore.advisor.machine import (
    Coefficient,
    FixedCosts,
    GatherCost,
    MachineProfile,
    PartCost,
    ProductTimes,
)

PART = PartCost(
    kind="attention",
    reference="made up",
    origin="measured",
    head_dim=16,
    channels=128,
    call=1e-4,
    value=1e-9,
    core=1e-11,
    sequence=1e-8,
    weight=0.0,
    forward=0.25,
    host=2e-4,
    host_forward=5e-5,
)


def make_machine(*, host=1.0, **fixed):
    """Every part costs as PART does; host: times all host seconds; fixed: seconds by name."""
    kinds = ("attention", "mla", "mamba", "delta", "mlp", "experts", "embedding", "head")
    costs = {
        each.name: Coefficient(fixed.get(each.name, 0.0), "measured") for each in fields(FixedCosts)
    }
    part = replace(PART, host=host * PART.host, host_forward=host * PART.host_forward)
    return MachineProfile(
        device="made up",
        dtype="float32",
        torch="2.11",
        notes=("for tests",),
        node=8,
        scan_chunk=64,
        products=ProductTimes(origin="measured", flop=1e-11),
        parts=tuple(replace(part, kind=kind) for kind in kinds),
        fixed=FixedCosts(**costs),
        gather=(GatherCost(8, 1e-9, "arithmetic"), GatherCost(16, 4e-9, "arithmetic")),
    )
