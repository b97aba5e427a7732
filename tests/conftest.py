"""Hypothesis profiles: a fixed sample for every run, many fresh examples for `make fuzz`."""

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", derandomize=True, max_examples=50, deadline=None, print_blob=True
)
settings.register_profile(
    "fuzz",
    derandomize=False,
    max_examples=10_000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
settings.load_profile(PROFILE)


@pytest.fixture
def is_fuzz() -> bool:
    """Whether this is `make fuzz`, which takes its time."""
    return PROFILE == "fuzz"
