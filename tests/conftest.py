"""Hypothesis profiles: a fixed sample for every run, many fresh examples for `make fuzz`."""

import os

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
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
