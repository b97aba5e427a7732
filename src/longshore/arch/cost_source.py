"""What plan.cost may name: a shipped machine profile, or a JSON file of either kind. No torch.

In: a name such as "h200", or a path. Out: a CostProfile, or a MachineProfile, from which the run's
model and capacity give one. The kinds differ by the key "format", which only machines have.

    read_cost("h200")           MachineProfile
    read_cost("mine.json")      CostProfile, if it has linear, quadratic, …
"""

import json
from pathlib import Path

from longshore.arch.machine import (
    MachineProfile,
    is_machine,
    load_machine,
    parse_machine,
    profile_names,
)
from longshore.plan.cost import CostProfile, parse_profile


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
