"""What a policy is: a name, a function, and the properties that the rest of the code asks for.

In: the name in a plan's setting. Out: the Policy. A policy of Longshore's is registered once, in
plan/policies.py, and is then known to recipes, the command line, checks and pages:

    register_policy(Policy("static", static, one_cp_size=True, about="one CP size for all, …"))
    policy_named("static").one_cp_size           True

A plan may name a policy that cannot be imported here, such as the function "mine:greedy" of
another user. It has the default properties, so that its pages can be drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

DEFAULT_POLICY = "mixed"


@dataclass(frozen=True, slots=True)
class Policy:
    """How a step is packed and split."""

    name: str
    """As a recipe, the command line and a plan have it."""
    run: Callable[..., None]
    """Takes a Task and a Choice (plan/task.py) and offers rounds to the Choice."""
    about: str
    """One line for lists of policies."""
    one_cp_size: bool = False
    """All packs have one CP size, which the setting cp_size may choose."""
    fixed_packs: bool = False
    """Packs stay whole: rounds may be reordered for a pipeline, but not be split."""
    pads_to_longest: bool = False
    """Every sequence is padded to the longest of the step."""
    needs_packs: bool = False
    """It places packs that the caller made; other policies take none."""
    one_pack_per_lane: bool = False
    """A lane has at most one pack in a round."""


POLICIES: dict[str, Policy] = {}
"""By name, the default first."""


def register_policy(policy: Policy) -> None:
    if policy.name in POLICIES:
        raise ValueError(f"there is a policy {policy.name!r} already; choose another name")
    POLICIES[policy.name] = policy


def policy_named(name: str) -> Policy:
    """The policy, or the default properties under a name that is not registered."""
    return POLICIES.get(name) or Policy(name, _cannot_run, about="")


def policy_names(has: Callable[[Policy], bool]) -> tuple[str, ...]:
    """The names of the registered policies that have a property."""
    return tuple(name for name, policy in POLICIES.items() if has(policy))


def _cannot_run(*_: object) -> NoReturn:
    raise ValueError(
        "the policy is not registered, so it cannot plan; load your own with load_policy"
    )
