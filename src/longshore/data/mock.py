"""Mock data: sequences with chosen lengths and a content that can be learned.

In: where the lengths come from, how many sequences, a vocabulary size, a seed. Out: an indexed
source that stores only the lengths and generates the tokens of a sequence on access. The keys are
Megatron's:

    {"mode": "file", "path": "lengths.csv"}        one length a line, again from the top at its end
    {"mode": "distribution", "type": "lognormal", "min_seq_len": 16, "max_seq_len": 65536,
     "mean_seq_len": 2048, "lognormal_sigma": 1.1}
    {"mode": "distribution", "type": "uniform", "min_seq_len": 16, "max_seq_len": 4096}
    {"mode": "distribution", "type": "fixed", "mean_seq_len": 1024}

`mean_seq_len` is the mean before clipping: the lognormal's median is 2048·exp(−1.1²/2) = 1118.

A sequence counts upwards in steps of its own, 1 to 4, over the first 64 ids (fewer in a smaller
vocabulary), with one token in 16 replaced by any id: 7 9 11 13 98 17 19 … So a model soon learns
the ids, then the next four candidates, then to read the step from the tokens before.
"""

import hashlib
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longshore.data.source import Field, TokenizedSample, checked_index
from longshore.plan.cost import Ints
from longshore.plan.lengths_file import read_lengths

IDS, STEPS, NOISE = 64, 4, 16
LARGEST_SEED = 2**63 - 1

Draw = Callable[[Mapping[str, Any], np.random.Generator, int], NDArray[np.float64]]
"""Draws a number of lengths; takes the keys of its type."""


def _lognormal(
    keys: Mapping[str, Any], random: np.random.Generator, count: int
) -> NDArray[np.float64]:
    sigma = keys["lognormal_sigma"]
    median = math.log(keys["mean_seq_len"]) - sigma**2 / 2
    with np.errstate(over="ignore"):
        drawn = np.exp(median + sigma * random.standard_normal(count))
    return np.asarray(np.clip(np.rint(drawn), keys["min_seq_len"], keys["max_seq_len"]))


def _uniform(
    keys: Mapping[str, Any], random: np.random.Generator, count: int
) -> NDArray[np.float64]:
    least = keys["min_seq_len"]
    # NumPy keeps the raw bits of a generator stable over versions, but not its distributions.
    bits: NDArray[np.uint64] = random.bit_generator.random_raw(count)
    uniform: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.asarray(least + np.floor(uniform * (keys["max_seq_len"] - least + 1)))


def _fixed(keys: Mapping[str, Any], random: np.random.Generator, count: int) -> NDArray[np.float64]:
    return np.full(count, keys["mean_seq_len"], dtype=np.float64)


TYPES: dict[str, tuple[Draw, tuple[str, ...]]] = {
    "lognormal": (_lognormal, ("min_seq_len", "max_seq_len", "mean_seq_len", "lognormal_sigma")),
    "uniform": (_uniform, ("min_seq_len", "max_seq_len")),
    "fixed": (_fixed, ("mean_seq_len",)),
}


class MockSource:
    """An indexed source of mock sequences. `count` may be None for a file: one for each line."""

    fields: tuple[Field, ...] = ()

    def __init__(
        self, config: Mapping[str, Any], *, count: int | None = None, vocab_size: int, seed: int = 0
    ) -> None:
        self._vocab_size = _whole(vocab_size, "vocab_size", least=2, most=2**31)
        self._seed = _whole(seed, "seed", least=0, most=LARGEST_SEED)
        number = None if count is None else _whole(count, "count", least=1, most=2**40)
        self.lengths = mock_lengths(config, count=number, seed=self._seed)
        self.loss_tokens: Ints = self.lengths - 1

    @property
    def digest(self) -> str:
        """Identifies all that decides the tokens."""
        about = f"mock {self._vocab_size} {self._seed} ".encode()
        return hashlib.sha256(about + self.lengths.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TokenizedSample:
        i = checked_index(index, len(self))
        length = int(self.lengths[i])
        bits = np.random.Philox(key=self._seed, counter=[0, 0, i, 1]).random_raw(length + 1)
        ids = min(IDS, self._vocab_size)
        start, step = int(bits[0] >> 8) % ids, 1 + int(bits[0] & 0xFF) % STEPS
        tokens = (start + step * np.arange(length)) % ids
        noise = bits[1:] % NOISE == 0
        tokens[noise] = (bits[1:][noise] >> 8) % self._vocab_size
        return TokenizedSample(i, tokens.astype(np.int32), np.ones(length, dtype=np.bool_))

    def mask_head(self, index: int, count: int) -> NDArray[np.bool_]:
        length = int(self.lengths[checked_index(index, len(self))])
        return np.ones(min(count, length), dtype=np.bool_)


def mock_lengths(config: Mapping[str, Any], *, count: int | None, seed: int) -> Ints:
    """The lengths that a mock configuration asks for."""
    mode = config.get("mode")
    if mode == "file":
        _check_keys(config, ("mode", "path"), "mode 'file'")
        lengths = np.array(read_lengths(config["path"]).lengths, dtype=np.int64)
        return lengths if count is None else np.resize(lengths, count)
    if mode == "distribution":
        if count is None:
            raise ValueError("a distribution needs data.count, the number of sequences to draw")
        draw, keys = _parse_distribution(config)
        random = np.random.Generator(np.random.Philox(key=seed))
        return draw(keys, random, count).astype(np.int64)
    raise ValueError(f"mode is {mode!r}; it must be 'file' or 'distribution'")


def _parse_distribution(config: Mapping[str, Any]) -> tuple[Draw, dict[str, Any]]:
    """What draws the lengths, and the keys that it reads, checked; others are refused."""
    kind = config.get("type")
    if not isinstance(kind, str) or kind not in TYPES:
        raise ValueError(f"type is {kind!r}; it must be one of {', '.join(TYPES)}")
    draw, names = TYPES[kind]
    _check_keys(config, ("mode", "type", *names), f"type {kind!r}")
    keys: dict[str, Any] = {}
    for name in names:
        if name in ("min_seq_len", "max_seq_len") or kind == "fixed":
            keys[name] = _whole(config[name], name, least=1, most=2**40)
        else:
            keys[name] = _number(config[name], name)
    if "min_seq_len" in keys and keys["min_seq_len"] > keys["max_seq_len"]:
        raise ValueError(
            f"min_seq_len is {keys['min_seq_len']}; it must be at most max_seq_len, which is "
            f"{keys['max_seq_len']}"
        )
    if kind == "lognormal" and keys["mean_seq_len"] <= 0:
        raise ValueError(f"mean_seq_len is {keys['mean_seq_len']}; it must be > 0")
    return draw, keys


def _check_keys(config: Mapping[str, Any], keys: tuple[str, ...], what: str) -> None:
    takes = ", ".join(keys)
    for key in config:
        if key not in keys:
            raise ValueError(f"unknown key {key!r} for {what}; it takes {takes}")
    for key in keys:
        if key not in config:
            raise ValueError(f"{key!r} is missing; {what} takes {takes}")


def _whole(value: object, name: str, *, least: int, most: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # what is no integer raises
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not least <= number <= most:
        raise ValueError(f"{name} is {value!r}; it must be a whole number from {least} to {most}")
    return number


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}; it must be a number")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value}; it must be finite and not negative")
    return float(value)
