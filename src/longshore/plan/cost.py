"""The cost model: what a pack costs each of its lanes, in estimated seconds.

In: a profile (a few numbers, from JSON or built in). Out: seconds, or the same as integers for
comparisons.

A pack of CP size k costs each of its lanes

    pack + Σ (linear·padded + quadratic·length²)/k + gather[k > node]·Σ padded·(k−1)/k

with no gather at k = 1, and a round adds `round`. A lane whose tokens are rounded up by P, to a
multiple or to a bucket, runs them as one more sequence: linear·P + quadratic·P². With linear 1,
quadratic 0, gather (0.01, 0.08), node 8 and pack 64, one sequence of 4096 tokens costs 4160 at k =
1, and 64 + 1024 + 0.01·4096·3/4 = 1118.72 at k = 4.

Plans are compared by integers only, so that every rank and platform decides alike: `CostTable`
rounds each sequence's cost at each CP size to a whole number of quanta once, and all sums are exact
from there on.

StageCosts: how the stages of a pipeline share what a round costs.

In: for each stage its forward and backward, in any unit. Out: whole numbers that say what part of
an average rank's cost each stage has, of the linear part and of the quadratic part apart.

A profile says what a round costs an average rank, forward and backward together. Two ranks of one
stage, backward twice the forward, the second stage twice as expensive as the first: with `whole` 9
the first stage has 2 + 4 parts and the second 4 + 8, and all together 18 = pp · whole.

Where experts are split over ranks, lanes meet inside every layer that has them: before the experts
and after them. Then a stage takes the slowest lane's time up to the experts, and the slowest lane's
time in them. The first are the mixers, the second is token-wise: it grows with tokens only, so it
is a part of the linear part.
"""

import json
import math
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

SMALLEST, LARGEST = 1e-30, 1e15
"""Of a profile's coefficients: beyond, costs would not fit into numbers."""


@dataclass(frozen=True, slots=True)
class CostProfile:
    """The coefficients of the cost model, in seconds."""

    linear: float
    """Of a token, padding included."""
    quadratic: float
    """Of a squared length."""
    gather: tuple[float, float]
    """Of a token that a lane gathers: inside a node, across nodes."""
    node: int
    """Lanes of a node."""
    pack: float
    """Of a pack."""
    round: float
    """Of a round."""
    message: float = 0.0
    """Of a token that a pipeline stage hands to the next; no GPU is busy with it."""
    curve: tuple[tuple[int, float], ...] = field(default=(), repr=False)
    """(length, amount) in rising order: what stands for the squared length where a model's cost
    grows otherwise, with straight lines in between; (): the squared length itself."""

    def __post_init__(self) -> None:
        numbers = {**asdict(self), "gather[0]": self.gather[0], "gather[1]": self.gather[1]}
        del numbers["gather"], numbers["curve"]
        for name, value in numbers.items():
            if not (value == 0 or SMALLEST <= value <= LARGEST):
                raise ValueError(
                    f"cost profile: {name} is {value}; "
                    f"it must be 0, or from {SMALLEST} to {LARGEST}"
                )
        if self.linear == 0 and self.quadratic == 0:
            raise ValueError(
                "cost profile: linear and quadratic are both 0; at least one must be positive"
            )
        if self.node < 1:
            raise ValueError(f"cost profile: node is {self.node}; a node has at least 1 lane")
        _check_curve(self.curve)

    def as_json(self) -> dict[str, Any]:
        data = {**asdict(self), "gather": list(self.gather)}
        curve = [list(knot) for knot in data.pop("curve")]
        return {**data, "curve": curve} if curve else data

    def squares(self, lengths: Ints) -> NDArray[np.float64]:
        """The squared lengths, or what stands for them; past its end a curve goes straight on."""
        if not self.curve:
            return lengths.astype(np.float64) ** 2
        knots, amounts = (
            np.array(column, dtype=np.float64) for column in zip(*self.curve, strict=True)
        )
        inside = np.where(lengths > 0, np.interp(lengths, knots, amounts), 0.0)
        if len(knots) == 1:
            return inside
        slope = (amounts[-1] - amounts[-2]) / (knots[-1] - knots[-2])
        past = np.maximum(lengths - knots[-1], 0.0)
        result: NDArray[np.float64] = inside + slope * past
        return result

    def square(self, length: int) -> float:
        """Of one length."""
        if not self.curve:
            return float(length) ** 2
        return float(self.squares(np.array([length], dtype=np.int64))[0])

    def on_ranks(self, *, tp: int, pp: int) -> "CostProfile":
        """The profile of one GPU when the model is split over the tp × pp GPUs of a lane.

        Each does its part of the arithmetic, and fetches its part of what a lane gathers. A pack
        costs the kernel launches of a stage's layers, as many with tensor parallelism. A node has
        fewer lanes. What TP exchanges is left out; a stage hands whole tokens to the next.
        """
        each = tp * pp
        return CostProfile(
            linear=self.linear / each,
            quadratic=self.quadratic / each,
            gather=(self.gather[0] / each, self.gather[1] / each),
            node=max(1, self.node // tp),
            pack=self.pack / pp,
            round=self.round / pp,
            message=self.message,
            curve=self.curve,
        )

    def sequence_cost(self, length: int, padded: int, cp_size: int) -> float:
        """Seconds that a sequence adds to each lane of its pack."""
        cost = (self.linear * padded + self.quadratic * self.square(length)) / cp_size
        if cp_size > 1:
            cost += self.gather[cp_size > self.node] * padded * (cp_size - 1) / cp_size
        return cost

    def ideal(self, lengths: Seq[int]) -> float:
        """Seconds of one lane for all the arithmetic of these lengths: no padding, no exchange."""
        squares = self.squares(np.asarray(lengths, dtype=np.int64)).tolist()
        pairs = zip(lengths, squares, strict=True)
        return math.fsum(self.linear * n + self.quadratic * square for n, square in pairs)


TOO_MANY = 1 << 48
"""Tokens that fit no lane."""
EMPTY_TOKENS = 16
"""Tokens of a lane without packs before rounding: enough for 16 tensor parallel ranks."""


@dataclass(frozen=True, slots=True)
class LanePadding:
    """Up to what a lane's tokens in a round are padded."""

    align: int = 1
    """To a multiple of this."""
    buckets: tuple[int, ...] = ()
    """And then to one of these, rising; (): no further."""
    empty: int = 0
    """Tokens of a lane without packs, before they are padded."""

    def __bool__(self) -> bool:
        return self.align > 1 or bool(self.buckets)

    @property
    def most(self) -> int:
        """The most tokens that are added to a lane."""
        return self.buckets[-1] if self.buckets else self.empty + self.align

    def totals(self, tokens: Ints) -> Ints:
        """Tokens of lanes whose packs have these."""
        aligned: Ints = -(-np.where(tokens > 0, tokens, self.empty) // self.align) * self.align
        if not self.buckets:
            return aligned
        sizes = np.array(self.buckets, dtype=np.int64)
        bucket = sizes[np.minimum(np.searchsorted(sizes, aligned), len(sizes) - 1)]
        return np.maximum(aligned, bucket)


NO_PADDING = LanePadding()


def _check_curve(curve: tuple[tuple[int, float], ...]) -> None:
    for (length, amount), (longer, more) in zip(((0, 0.0), *curve), curve, strict=False):
        if longer <= length or not amount <= more <= LARGEST**2:
            raise ValueError(
                f"cost profile: curve goes from {(length, amount)} to {(longer, more)}; lengths "
                "must rise from 1 on, and amounts must not fall or be below 0"
            )


# An estimate for Qwen3-8B on H100s, from its arithmetic and 400 TFLOP/s; not measured. One token of
# the linear layers takes 6 · 8.2e9 FLOP / 4e14 FLOP/s = 1.23e-4 s; the other coefficients are in
# units of that.
TOKEN_SECONDS = 1.23e-4
BUILT_IN = CostProfile(
    linear=TOKEN_SECONDS,
    quadratic=TOKEN_SECONDS * 1.9484e-5,
    gather=(TOKEN_SECONDS * 0.01, TOKEN_SECONDS * 0.08),
    node=8,
    pack=TOKEN_SECONDS * 64,
    round=0.0,
    # 4,096 channels of 2 bytes at 50 GB/s.
    message=TOKEN_SECONDS * 0.0013,
)
OPTIONAL_KEYS = ("message", "curve")


def load_profile(path: str | Path) -> CostProfile:
    """Reads a profile from JSON; every key but `message` must be there and no other."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"cost profile {path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cost profile {path}: is not JSON ({error})") from None
    return parse_profile(data, str(path))


def names_machine(name: str) -> bool:
    """Whether this is no cost profile in JSON, but a machine: a name, or a file with a "format".

    What a model costs on a machine is the advisor's to say (advisor/step_time.py:model_cost).
    """
    try:
        data = json.loads(Path(name).read_text())
    except OSError:
        return True
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and "format" in data


def parse_profile(data: object, name: str) -> CostProfile:
    keys = [key for key in CostProfile.__slots__ if key not in OPTIONAL_KEYS]
    if not isinstance(data, dict) or sorted({*data} - {*OPTIONAL_KEYS}) != sorted(keys):
        raise ValueError(
            f"cost profile {name}: must be an object with exactly the keys {', '.join(keys)}, and "
            f"with a pipeline {', '.join(OPTIONAL_KEYS)}"
        )
    curve = _parsed_curve(data.get("curve", []), name)
    data = {key: value for key, value in data.items() if key != "curve"}
    gather = data["gather"]
    if not isinstance(gather, list) or len(gather) != 2:
        raise ValueError(f"cost profile {name}: gather must be [inside a node, across nodes]")
    for key, value in [*data.items(), ("gather", gather[0]), ("gather", gather[1])]:
        if value is gather:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"cost profile {name}: {key} holds {value!r}, which is not a number")
        if value > LARGEST:
            raise ValueError(f"cost profile {name}: {key} is more than {LARGEST}")
    if not 1 <= data["node"] < 1 << 30 or data["node"] != int(data["node"]):
        raise ValueError(
            f"cost profile {name}: node is {data['node']}; it must be a whole number of lanes"
        )
    return CostProfile(
        linear=float(data["linear"]),
        quadratic=float(data["quadratic"]),
        gather=(float(gather[0]), float(gather[1])),
        node=int(data["node"]),
        pack=float(data["pack"]),
        round=float(data["round"]),
        message=float(data.get("message", 0.0)),
        curve=curve,
    )


def _parsed_curve(value: object, name: str) -> tuple[tuple[int, float], ...]:
    knots = value if isinstance(value, list) else None
    if knots is None or not all(isinstance(knot, list) and len(knot) == 2 for knot in knots):
        raise ValueError(f"cost profile {name}: curve must be a list of [length, amount]")
    for knot in knots:
        if any(isinstance(n, bool) or not isinstance(n, int | float) for n in knot):
            raise ValueError(f"cost profile {name}: curve has {knot}, which are not two numbers")
    return tuple((int(length), float(amount)) for length, amount in knots)


class CostTable:
    """Integer costs and tokens of every sequence at every legal CP size.

    `cost[i, j]` quanta and `tokens[i, j]` tokens fall on each lane when sequence i runs at
    `sizes[j]`. One second is `scale` quanta, a power of two chosen so that no sum over all
    sequences and lanes leaves 64 bits and the most expensive sequence takes about 2^40 quanta.
    """

    def __init__(
        self,
        lengths: Ints,
        *,
        sizes: tuple[int, ...],
        profile: CostProfile,
        padding: LanePadding = NO_PADDING,
    ) -> None:
        self.sizes = sizes
        self.padding = padding
        k = np.array(sizes, dtype=np.int64)
        step = np.where(k == 1, 1, 2 * k)
        padded = -(-lengths[:, None] // step) * step
        self.tokens: Ints = padded // k
        size = k.astype(np.float64)
        gather = np.where(k > profile.node, profile.gather[1], profile.gather[0]) * (size - 1)
        square = profile.squares(lengths)
        area = profile.linear * padded + profile.quadratic * square[:, None] + gather * padded
        fixed = profile.pack + profile.round
        ceiling = float(area.max() + fixed * size.max()) * 4 * len(lengths)
        if padding:
            # Rounds are no more than sequences, and pad every lane.
            ceiling += profile.sequence_cost(padding.most, padding.most, 1) * 4 * len(lengths)
        tallest = float((area / size).max() + fixed)
        self.scale = 2.0 ** min(61 - math.frexp(ceiling)[1], 40 - math.frexp(tallest)[1])
        self.cost: Ints = np.rint(area / size * self.scale).astype(np.int64)
        self.pack = round(profile.pack * self.scale)
        self.round = round(profile.round * self.scale)
        self._profile = profile
        self._square = square

    def lane_padding(self, tokens: Ints) -> tuple[Ints, Ints, Ints]:
        """Tokens that are added to lanes whose packs have these, linear and quadratic quanta."""
        added = self.padding.totals(tokens) - tokens
        squares = self._profile.squares(added)
        linear = np.rint(self._profile.linear * added * self.scale).astype(np.int64)
        quadratic = np.rint(self._profile.quadratic * squares * self.scale).astype(np.int64)
        return added, linear, quadratic

    def least_padding(self) -> Ints:
        """Quanta that lanes of sequences alone cost besides, by tokens only: more may join them."""
        added = self.padding.totals(self.tokens) - self.tokens
        quanta: Ints = int(self._profile.linear * self.scale) * added
        return quanta

    @property
    def message(self) -> float:
        """Quanta of a token that one stage hands to the next."""
        return self._profile.message * self.scale

    def quadratic(self, cp_size: int) -> list[int]:
        """What of each sequence's cost grows with its squared length or is gathered, in quanta."""
        column = self.sizes.index(cp_size)
        profile = self._profile
        across = profile.gather[cp_size > profile.node] * (cp_size - 1)
        part = profile.quadratic * self._square / cp_size + across * self.tokens[:, column]
        whole = np.rint(part * self.scale).astype(np.int64)
        quanta: list[int] = np.minimum(whole, self.cost[:, column]).tolist()
        return quanta

    def without_tokens(self, quanta: int) -> "CostTable":
        """The same costs without these quanta of each token."""
        return self._with(self.sizes, np.maximum(self.cost - quanta * self.tokens, 1), self.tokens)

    def part(self, rows: Ints, sizes: tuple[int, ...]) -> "CostTable":
        """The same costs for some sequences, in the given order, at some of the sizes."""
        columns = [self.sizes.index(size) for size in sizes]
        return self._with(sizes, self.cost[rows][:, columns], self.tokens[rows][:, columns])

    def joined(self, groups: Seq[Seq[int]]) -> "CostTable":
        """One row for each group of sequences: their sums."""
        flat = np.array([i for group in groups for i in group], dtype=np.int64)
        starts = np.cumsum([0, *(len(group) for group in groups)])[:-1]
        cost, tokens = (np.add.reduceat(a[flat], starts) for a in (self.cost, self.tokens))
        return self._with(self.sizes, cost, tokens)

    def only(self, legal: NDArray[np.bool_]) -> "CostTable":
        """The same in which a row at a size that is not legal for it has too many tokens to fit."""
        return self._with(self.sizes, self.cost, np.where(legal, self.tokens, TOO_MANY))

    def _with(self, sizes: tuple[int, ...], cost: Ints, tokens: Ints) -> "CostTable":
        """Without squared lengths: `quadratic` is for the whole table."""
        other = copy(self)
        other.sizes, other.cost, other.tokens = sizes, cost, tokens
        return other

    def seconds(self, quanta: int) -> float:
        return quanta / self.scale


FINE = 1 << 20
"""Parts of a rank's cost where stages differ."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Parts of an average rank's cost; the parts of all stages add up to pp · whole."""

    forward_linear: tuple[int, ...]
    """Of each stage's forward, in the part that grows with tokens."""
    backward_linear: tuple[int, ...]
    """Of its backward."""
    forward_quadratic: tuple[int, ...]
    """Of its forward, in the part that grows with squared lengths, and in what is gathered."""
    backward_quadratic: tuple[int, ...]
    """Of its backward."""
    streams: tuple[int, ...]
    """How many rows a stage sends on for each token."""
    whole: int
    """The parts of an average rank: a walk's unit is 1/whole quantum."""
    forward_tokenwise: tuple[int, ...] = field(default=(), repr=False)
    """Of each stage's forward_linear, what runs between meetings of its own; (): all of it."""
    backward_tokenwise: tuple[int, ...] = field(default=(), repr=False)
    """Of its backward_linear."""

    @property
    def stages(self) -> int:
        return len(self.streams)

    @property
    def tokenwise(self) -> tuple[int, ...]:
        """The token-wise parts of all forwards, then of all backwards."""
        forward = self.forward_tokenwise or self.forward_linear
        return forward + (self.backward_tokenwise or self.backward_linear)

    def of_rank(self, rank: int, pp: int) -> tuple[int, int]:
        """The linear and quadratic parts of all a rank's stages."""
        linear = self.forward_linear[rank::pp] + self.backward_linear[rank::pp]
        quadratic = self.forward_quadratic[rank::pp] + self.backward_quadratic[rank::pp]
        return sum(linear), sum(quadratic)


@lru_cache(maxsize=64)
def equal_stages(pp: int, vpp: int) -> StageCosts:
    """All stages alike, backward twice the forward."""
    one, two = (1,) * (pp * vpp), (2,) * (pp * vpp)
    return StageCosts(one, two, one, two, one, 3 * vpp)


def share_out(
    *,
    linear: Seq[tuple[int, int]],
    quadratic: Seq[tuple[int, int]],
    streams: Seq[int],
    pp: int,
    tokenwise: Seq[tuple[int, int]] = (),
) -> StageCosts:
    """From each stage's (forward, backward) in any unit; a part that is 0 everywhere is even.

    tokenwise: what of `linear` is token-wise, in the same unit; without it, all.
    """
    pairs = [_parts(costs, pp * FINE) for costs in (linear, quadratic)]
    (forward_linear, backward_linear), (forward_quadratic, backward_quadratic) = pairs
    return StageCosts(
        forward_linear,
        backward_linear,
        forward_quadratic,
        backward_quadratic,
        tuple(streams),
        FINE,
        *_of_linear(tokenwise, linear, (forward_linear, backward_linear)),
    )


def _of_linear(
    tokenwise: Seq[tuple[int, int]],
    linear: Seq[tuple[int, int]],
    parts: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The token-wise share of each part, rounded down."""
    if not tokenwise:
        return (), ()
    forward, backward = (
        tuple(
            part * some[way] // max(1, whole[way])
            for part, some, whole in zip(parts[way], tokenwise, linear, strict=True)
        )
        for way in (0, 1)
    )
    return forward, backward


def _parts(costs: Seq[tuple[int, int]], total: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Whole numbers in these proportions whose sum is the total: each ends where its sum does."""
    flat = [cost for pair in costs for cost in pair]
    if not sum(flat):
        flat = [1, 2] * len(costs)
    whole = sum(flat)
    parts, before, ended = [], 0, 0
    for cost in flat:
        before += cost
        end = before * total // whole
        parts.append(end - ended)
        ended = end
    return tuple(parts[0::2]), tuple(parts[1::2])
