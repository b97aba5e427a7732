"""What plan.cost may name: a shipped machine profile, or a JSON file of either kind. No torch.

In: a name such as "h200", or a path. Out: a CostProfile, or a MachineProfile, from which the run's
model and capacity give one. The kinds differ by the key "format", which only machines have.

    read_cost("h200")           MachineProfile
    read_cost("mine.json")      CostProfile, if it has linear, quadratic, …
    model_cost("h200", preset("qwen3-8b"), lanes=8, capacity=16384)     CostProfile
"""

import json
from pathlib import Path

from longshore.advisor.machine import (
    MachineProfile,
    is_machine,
    load_machine,
    parse_machine,
    profile_names,
)
from longshore.advisor.step_time import RunShape, cost_profile
from longshore.arch.decoder import DecoderConfig
from longshore.plan.cost import CostProfile, parse_profile


def model_cost(
    cost: str | Path | MachineProfile | CostProfile,
    model: DecoderConfig,
    *,
    lanes: int,
    capacity: int,
    shard: str = "zero3",
    dtype: str | None = None,
    recompute: bool = False,
    ep: int = 1,
) -> CostProfile:
    """The planner's costs of a model, for `make_plan(…, profile=…)`.

    cost: a machine profile, which `longshore calibrate` writes or Longshore ships, such as "h200";
    a CostProfile is returned as it is. shard: zero3, zero2 or none. dtype: None for the profile's.
    recompute: whether blocks run again in backward. ep: ranks that experts are split over.
    """
    source = read_cost(str(cost)) if isinstance(cost, str | Path) else cost
    if isinstance(source, CostProfile):
        return source
    shape = RunShape(
        lanes=lanes, shard=shard, dtype=dtype or source.dtype, recompute=recompute, ep=ep
    )
    return cost_profile(source, model, capacity=capacity, shape=shape)


def read_cost(name: str) -> CostProfile | MachineProfile:
    """The profile of that name or file."""
    if name in profile_names() and not Path(name).exists():
        return load_machine(name)
    try:
        data = json.loads(Path(name).read_text())
    except OSError as error:
        raise ValueError(
            f"cost profile {name}: cannot be read ({error.strerror}); known names are "
            f"{', '.join(profile_names())}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cost profile {name}: is not JSON ({error})") from None
    return parse_machine(data, name) if is_machine(data) else parse_profile(data, name)
