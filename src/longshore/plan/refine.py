"""Corrects a cost profile by the measured times of rounds.

In: a plan, and the seconds that its rounds took. Out: factors for the profile's coefficients. No
torch, no clock and no randomness: every rank computes the same bits from the same numbers.

A round takes as long as its slowest lane. `round_parts` says what that lane has of each part: its
tokens, its squared lengths, the tokens it gathers, its packs. Measured seconds are then a sum of
these amounts times the profile's coefficients, and `refit` looks for one factor for each. Rounds of
(100 tokens, 1000 squared) and (100, 4000) that took 2 and 5 s, under a profile of 0.01 s a token
and 0.0001 s a squared length, were predicted at 1.1 and 1.4 s; the factors 1 and 10 explain them.

A factor common to all parts does not change plans; it is the median of measured / predicted, and
has no limit. Relative to it a part may change by 16 times at most, and a part that the rounds say
nothing about (all of them have the same share of it) keeps its factor.
"""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from longshore.plan.cost import LARGEST, SMALLEST, CostProfile
from longshore.plan.simulate import meetings, run_lengths
from longshore.plan.types import Plan, PlanSetting, Round

Floats = NDArray[np.float64]

PARTS = ("linear", "quadratic", "gather inside a node", "gather across nodes", "pack", "round")
EVEN = (1.0,) * len(PARTS)
MOST_ROUNDS = 64
"""Rounds of a step that are used; where lanes wait only once a step there may be thousands."""
FARTHEST = 16.0
"""How far a part's factor may be from the common one, both ways."""
RIDGE = 1e-3
"""How strongly parts hold on to their factors, against a mean squared error of 1."""
FEWEST = 8
"""Rounds that a correction needs."""
LEAST_CHANGE = 0.01
"""A correction that changes all coefficients by less is not applied."""
TRIMMED = (5.0, 0.02)
"""Deviations from the median, and the least error, from which on a round is left out."""
DIGITS = 6
"""Significant digits of a factor."""
SWEEPS = 5000


@dataclass(frozen=True, slots=True)
class RoundParts:
    """Lanes that wait for each other in a round, and what the slowest of them has of each part."""

    round: int
    lanes: range
    kind: int
    """The largest CP size of their packs."""
    amounts: tuple[float, ...]
    """Amounts of PARTS: predicted seconds are their sum, each times its coefficient."""


@dataclass(frozen=True, slots=True)
class ObservedRound:
    """What a round has of each part, and what it took."""

    kind: int
    amounts: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Correction:
    """Factors for a profile's coefficients: `scale` times the factor of the part."""

    scale: float = 1.0
    parts: tuple[float, ...] = EVEN
    fits: int = 0
    """How often it was changed."""

    @property
    def factors(self) -> tuple[float, ...]:
        return tuple(self.scale * part for part in self.parts)

    def applied(self, profile: CostProfile) -> CostProfile:
        linear, quadratic, inside, across, pack, round_ = (
            _valid(value * factor)
            for value, factor in zip(coefficients(profile), self.factors, strict=True)
        )
        return replace(
            profile,
            linear=linear,
            quadratic=quadratic,
            gather=(inside, across),
            pack=pack,
            round=round_,
            message=_valid(profile.message * self.scale),
        )


UNCORRECTED = Correction()


KindRatio = tuple[int, int, float, float, float]
"""A kind (the largest CP size), its rounds, and their medians of measured / predicted: under the
profile that the run began with, the one before this fit, and the one after it."""


@dataclass(frozen=True, slots=True)
class Refit:
    """What a window of rounds says about a profile."""

    correction: Correction
    """The correction from here on."""
    is_changed: bool
    """Whether it differs from the one before."""
    rounds: int
    """Rounds that it follows from."""
    left_out: int
    """Rounds that fit to no factors: a compilation, a hiccup."""
    errors: tuple[float, float, float]
    """The median relative error under the first profile, before and after."""
    kinds: tuple[KindRatio, ...]
    """By rising CP size."""


def coefficients(profile: CostProfile) -> tuple[float, ...]:
    return (profile.linear, profile.quadratic, *profile.gather, profile.pack, profile.round)


def predicted_seconds(amounts: Seq[float], profile: CostProfile) -> float:
    return math.fsum(map(float.__mul__, amounts, coefficients(profile)))


def round_parts(plan: Plan) -> list[RoundParts]:
    """The parts of each round of a plan; of at most MOST_ROUNDS, evenly chosen."""
    setting = plan.setting
    entries = [
        (number, round_, lanes)
        for number, round_ in enumerate(plan.rounds)
        for lanes in meetings(round_, setting.lanes, setting.sync)
    ]
    count = min(MOST_ROUNDS, len(entries))
    chosen = [entries[i * len(entries) // count] for i in range(count)]
    lengths = run_lengths(setting, [sequence.length for sequence in plan.sequences])
    squares = setting.profile.squares(lengths).tolist()
    amounts: dict[int, Floats] = {}
    parts = []
    for number, round_, lanes in chosen:
        if number not in amounts:
            amounts[number] = _lane_amounts(round_, setting, squares)
        kinds = [pack.cp_size for pack in round_.packs if pack.first_lane in lanes]
        slowest = _slowest(amounts[number][:, lanes.start : lanes.stop], setting)
        parts.append(RoundParts(number, lanes, max(kinds, default=1), slowest))
    return parts


def _lane_amounts(round_: Round, setting: PlanSetting, squares: Seq[float]) -> Floats:
    """What each lane has of each part in a round, [part, lane]."""
    amounts = np.zeros((len(PARTS), setting.lanes))
    amounts[-1] = 1
    for pack in round_.packs:
        lanes, size = slice(pack.lanes.start, pack.lanes.stop), pack.cp_size
        amounts[0, lanes] += pack.tokens_per_lane
        amounts[1, lanes] += sum(map(squares.__getitem__, pack.sequences)) / size
        amounts[3 if size > setting.profile.node else 2, lanes] += pack.tokens_per_lane * (size - 1)
        amounts[4, lanes] += 1
    if setting.padding:
        tokens = amounts[0].astype(np.int64)
        added = setting.padding.totals(tokens) - tokens
        amounts[0] += added
        amounts[1] += setting.profile.squares(added)
    return amounts


def _slowest(amounts: Floats, setting: PlanSetting) -> tuple[float, ...]:
    """The amounts of the lane that costs most.

    Where lanes meet inside the layers, those of the slowest mixers, and the tokens of the lane that
    has most in what is token-wise.
    """
    costs = amounts * np.array(coefficients(setting.profile))[:, None]
    shares, apart = setting.shares, 0.0
    if setting.synced:
        linear = sum((*shares.forward_linear, *shares.backward_linear))
        apart = sum(shares.tokenwise) / linear
    costs[0] *= 1 - apart
    total = costs[0] + costs[1] + costs[2] + costs[3] + costs[4] + costs[5]
    slowest = amounts[:, int(total.argmax())].copy()
    if apart:
        slowest[0] = (1 - apart) * slowest[0] + apart * amounts[0].max()
    values: list[float] = slowest.tolist()
    return tuple(values)


def refit(
    rounds: Seq[ObservedRound], base: CostProfile, correction: Correction = UNCORRECTED
) -> Refit | None:
    """Corrects the correction of a profile; None if too few rounds were measured.

    base: the profile without any correction.
    """
    former, correction = correction, _centred(correction)
    profile = correction.applied(base)
    known = [
        each
        for each in rounds
        if each.seconds > 0
        and predicted_seconds(each.amounts, profile) > 0
        and predicted_seconds(each.amounts, base) > 0
    ]
    if len(known) < FEWEST:
        return None
    kept, fitted = _fit(known, profile, correction)
    new = _damped(correction, *fitted)
    better = _squared_error(kept, new.applied(base)) < _squared_error(kept, profile)
    is_changed = better and _change(correction, new) >= LEAST_CHANGE
    if not is_changed:
        new = former
    profiles = (base, profile, new.applied(base))
    return Refit(
        correction=new,
        is_changed=is_changed,
        rounds=len(kept),
        left_out=len(known) - len(kept),
        errors=_errors(known, profiles),
        kinds=_kinds(known, profiles),
    )


def _centred(correction: Correction) -> Correction:
    """The same factors; where a part is at its limit the common one is the middle of them.

    The first common factor follows from rounds in which parts are still wrong. With true factors of
    0.1 and 10 it may be 3, and 0.1 is then too far from it, though not from 10.
    """
    low, high = min(correction.parts), max(correction.parts)
    if low > 1 / FARTHEST and high < FARTHEST:
        return correction
    middle = math.sqrt(low * high)
    parts = tuple(part / middle for part in correction.parts)
    return replace(correction, scale=correction.scale * middle, parts=parts)


def _fit(
    rounds: list[ObservedRound], profile: CostProfile, correction: Correction
) -> tuple[list[ObservedRound], tuple[float, list[float]]]:
    """The rounds that agree with each other, and the common and each part's change they ask for."""
    kept = rounds
    for _ in range(3):
        scale, gains = _solved(kept, profile, correction)
        parts = [scale * gain for gain in gains]
        values = coefficients(profile)
        errors = [
            math.fsum(p * v * x for p, v, x in zip(parts, values, each.amounts, strict=True))
            / each.seconds
            - 1
            for each in rounds
        ]
        middle = median(errors)
        spread = 1.4826 * median(abs(error - middle) for error in errors)
        limit = max(TRIMMED[0] * spread, TRIMMED[1])
        before = kept
        kept = [r for r, e in zip(rounds, errors, strict=True) if abs(e - middle) <= limit]
        if kept == before:
            break
    return kept, _solved(kept, profile, correction)


def _solved(
    rounds: Seq[ObservedRound], profile: CostProfile, correction: Correction
) -> tuple[float, list[float]]:
    """The factor common to all parts, and the changes g of the parts that minimise

    mean (Σ share · g − 1)² + RIDGE · Σ (g − 1)²

    where a share is a part's predicted seconds relative to those measured. All sums are exact, so
    they do not depend on the order or on the machine.
    """
    scale = median(each.seconds / predicted_seconds(each.amounts, profile) for each in rounds)
    shares = [
        [scale * value * each.amounts[part] / each.seconds for each in rounds]
        for part, value in enumerate(coefficients(profile))
    ]
    return scale, _least_squares(shares, correction.parts)


def _least_squares(shares: list[list[float]], parts: Seq[float]) -> list[float]:
    """Coordinate descent: the function is strictly convex, and each limit is on one g alone."""
    count, size = len(shares[0]), len(shares)
    right = [math.fsum(column) / count + RIDGE for column in shares]
    matrix = [
        [
            math.fsum(map(float.__mul__, a, b)) / count + RIDGE * (i == j)
            for j, b in enumerate(shares)
        ]
        for i, a in enumerate(shares)
    ]
    limits = [(1 / FARTHEST / part, FARTHEST / part) for part in parts]
    gains = [1.0] * size
    for _ in range(SWEEPS):
        largest = 0.0
        for i, (low, high) in enumerate(limits):
            others = math.fsum(matrix[i][j] * gains[j] for j in range(size) if j != i)
            gain = min(max((right[i] - others) / matrix[i][i], low), high)
            largest = max(largest, abs(gain - gains[i]))
            gains[i] = gain
        if largest < 1e-11:
            break
    return gains


def _damped(correction: Correction, scale: float, gains: Seq[float]) -> Correction:
    """The first change is applied whole, of later ones the square root, so that noise averages out.

    A square root is the same on every machine; other powers are not.
    """
    share = math.sqrt if correction.fits else float
    parts = tuple(
        min(max(_rounded(part * share(gain)), 1 / FARTHEST), FARTHEST)
        for part, gain in zip(correction.parts, gains, strict=True)
    )
    return Correction(_rounded(correction.scale * share(scale)), parts, correction.fits + 1)


def _change(old: Correction, new: Correction) -> float:
    """The largest relative change of a factor."""
    pairs = zip(old.factors, new.factors, strict=True)
    return max(max(before / after, after / before) - 1 for before, after in pairs)


def _squared_error(rounds: Seq[ObservedRound], profile: CostProfile) -> float:
    errors = (predicted_seconds(each.amounts, profile) / each.seconds - 1 for each in rounds)
    return math.fsum(error * error for error in errors)


def _errors(rounds: Seq[ObservedRound], profiles: Seq[CostProfile]) -> tuple[float, float, float]:
    first, before, after = (
        median(abs(predicted_seconds(r.amounts, profile) / r.seconds - 1) for r in rounds)
        for profile in profiles
    )
    return first, before, after


def _kinds(rounds: Seq[ObservedRound], profiles: Seq[CostProfile]) -> tuple[KindRatio, ...]:
    ratios = []
    for kind in sorted({each.kind for each in rounds}):
        of_kind = [each for each in rounds if each.kind == kind]
        first, before, after = (
            median(each.seconds / predicted_seconds(each.amounts, profile) for each in of_kind)
            for profile in profiles
        )
        ratios.append((kind, len(of_kind), first, before, after))
    return tuple(ratios)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS - 1}e}")


def _valid(value: float) -> float:
    """Within the limits of a profile; 0 stays 0."""
    return min(max(value, SMALLEST), LARGEST) if value else 0.0
