"""What the planner's tests share: profiles, how many examples to run, and random lengths."""

import numpy as np
from hypothesis import settings

from longshore.plan import CostProfile

FREE = CostProfile(linear=1.0, quadratic=1.9484e-5, gather=(0.0, 0.0), node=8, pack=0.0, round=0.0)
CHARGED = CostProfile(
    linear=1.0, quadratic=1.9484e-5, gather=(0.01, 0.08), node=8, pack=64.0, round=0.0
)
# One second a token, so times can be read off by hand.
TOKENS = CostProfile(linear=1.0, quadratic=0.0, gather=(0.0, 0.0), node=8, pack=0.0, round=0.0)


def examples(usual: int, *, fuzz: int = 10_000) -> int:
    """How many random problems to try: a fixed sample, or many under `make fuzz`."""
    return fuzz if settings.get_current_profile_name() == "fuzz" else usual


def long_tail(seed: int, count: int, *, most: int) -> list[int]:
    """Lognormal lengths, median 1024, sigma 1.5, clipped at `most`."""
    drawn = np.random.default_rng(seed).lognormal(np.log(1024), 1.5, count)
    return [int(n) for n in np.clip(np.rint(drawn), 1, most)]
