import pytest

from longshore.plan.policies import static
from longshore.plan.types import POLICIES, Policy, policy_named, policy_names, register_policy


def test_every_policy_is_registered_with_its_properties():
    assert list(POLICIES) == ["mixed", "dynamic", "balanced", "static", "padded", "given"]
    assert policy_names(lambda policy: policy.one_cp_size) == ("balanced", "static", "padded")
    assert policy_names(lambda policy: policy.fixed_packs) == ("static", "padded", "given")
    assert policy_names(lambda policy: policy.pads_to_longest) == ("padded",)
    assert policy_names(lambda policy: policy.needs_packs) == ("given",)
    assert policy_names(lambda policy: not policy.one_pack_per_lane) == ("mixed", "given")
    assert all(policy.name == name and policy.about for name, policy in POLICIES.items())


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="there is a policy 'static' already"):
        register_policy(Policy("static", static, about="another"))
    assert POLICIES["static"].about != "another"


def test_an_unknown_name_has_the_default_properties():
    policy = policy_named("mine:greedy")
    assert (policy.name, policy.pads_to_longest, policy.one_pack_per_lane) == (
        "mine:greedy",
        False,
        False,
    )
    with pytest.raises(ValueError, match="not registered"):
        policy.run(None, None)
