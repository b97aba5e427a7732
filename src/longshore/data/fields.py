"""Extra fields: values that travel with a sequence, such as advantages or a sample's id.

In: what a row holds besides tokens and loss mask. Out: one array for each declared field, or a
ValueError: it names an undeclared field, a missing one or one of the wrong length. Nothing is
dropped or cast silently. With `weight:per_token:float32` and `sample_id:per_sequence:int64`
declared, a sequence of three tokens that carries

    {"weight": [0.5, 0.5, 1], "sample_id": 17}

gets a float32 array of shape (3,) and an int64 array of shape (). A field declared `per_target`
(advantages, old log-probabilities) has one value for each token too, but belongs to it as a target:
it is shifted where labels are. Rows of numbers have a shape: `experts:per_token:int16:4x2`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Per = Literal["token", "target", "sequence"]

PER = ("token", "target", "sequence")
INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8")
FLOATS = ("float16", "float32", "float64")
TAKEN = ("id", "tokens", "loss_mask", "loss_tokens", "checksum", "boundaries", "positions")


@dataclass(frozen=True, slots=True)
class Field:
    """A declared field: (length, *shape) values per token or target, (*shape) per sequence."""

    name: str
    per: Per
    dtype: str
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in TAKEN:
            raise ValueError(
                f"field {self.name!r}: the name must be an identifier, and not one of the "
                f"reserved names {', '.join(TAKEN)}"
            )
        if self.per not in PER:
            raise ValueError(
                f"field {self.name}: is declared per {self.per!r}; it must be one of "
                f"{', '.join(PER)}"
            )
        if self.dtype not in (*INTEGERS, *FLOATS):
            raise ValueError(
                f"field {self.name}: its dtype is {self.dtype!r}; it must be one of "
                f"{', '.join((*INTEGERS, *FLOATS))}"
            )
        if min(self.shape, default=1) < 1:
            raise ValueError(
                f"field {self.name}: shape {self.shape} has no values; each dim must be 1 or more"
            )

    @property
    def width(self) -> int:
        """Numbers in one value."""
        return prod(self.shape)

    def array_shape(self, length: int) -> tuple[int, ...]:
        """The shape of this field's array for a sequence of `length` tokens."""
        return self.shape if self.per == "sequence" else (length, *self.shape)

    def __str__(self) -> str:
        text = f"{self.name}:per_{self.per}:{self.dtype}"
        return f"{text}:{'x'.join(map(str, self.shape))}" if self.shape else text


def parse_field(text: str) -> Field:
    """A field from `name:per_token:dtype`, as a command line gives it; str(field) undoes it."""
    match = re.fullmatch(r"(\w+):per_(\w+):(\w+)(?::([0-9]{1,9}(?:x[0-9]{1,9})*))?", text)
    if not match:
        raise ValueError(
            f"field {text!r}: must be name:per_token:dtype, name:per_target:dtype or "
            "name:per_sequence:dtype, followed by :4x2 if each value has a shape"
        )
    name, per, dtype, shape = match.groups()
    sizes = tuple(int(size) for size in shape.split("x")) if shape else ()
    return Field(name, cast(Per, per), dtype, sizes)  # Field refuses any other


def check_declared(fields: Sequence[Field]) -> tuple[Field, ...]:
    """The fields as a tuple; one name is declared once."""
    names = [field.name for field in fields]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"field {name}: is declared more than once")
    return tuple(fields)


def collect_fields(
    given: Mapping[str, object], fields: Sequence[Field], *, length: int, where: str
) -> dict[str, Array]:
    """The declared fields of one sequence as arrays, in the order of their declaration."""
    for name in given:
        if not any(field.name == name for field in fields):
            raise ValueError(
                f"{where}: field {name!r} is not declared; declare it as {name}:per_target:float32 "
                f"or {name}:per_sequence:float32, or leave it out of the data"
            )
    arrays = {}
    for field in fields:
        if field.name not in given:
            raise ValueError(f"{where}: the declared field {field.name!r} is missing")
        array = _as_array(given[field.name], field, where)
        wanted = field.array_shape(length)
        if array.shape != wanted:
            raise ValueError(
                f"{where}: field {field.name!r} holds {_shape(array.shape)}; declared "
                f"per {field.per}, with {length} tokens, it must hold {_shape(wanted)}"
            )
        arrays[field.name] = array
    return arrays


def _as_array(value: object, field: Field, where: str) -> Array:
    """The value in the field's dtype. Floats are rounded to it; whole numbers must fit exactly."""
    try:
        raw = np.asarray(value)
    except (ValueError, OverflowError, TypeError, RuntimeError):  # the last two of tensors
        raw = np.asarray(None)
    if raw.dtype.kind not in "biuf":
        raise ValueError(f"{where}: field {field.name!r} holds {_shown(value)}, not numbers")
    if field.dtype not in FLOATS and raw.dtype.kind == "f" and (np.abs(raw) >= 2.0**53).any():
        raise ValueError(
            f"{where}: field {field.name!r} holds {_shown(value)} as floats, which may have been "
            "rounded: from 2^53 on they do not hold every whole number; write whole numbers"
        )
    with np.errstate(all="ignore"):
        array = raw.astype(field.dtype)
    if field.dtype in FLOATS:
        fits = np.array_equal(np.isinf(array), np.isinf(raw))
    else:
        fits = np.array_equal(array, raw)
    if not fits:
        raise ValueError(
            f"{where}: field {field.name!r} holds {_shown(value)}, which {field.dtype} cannot "
            "hold; declare a wider dtype"
        )
    return array


def _shape(shape: tuple[int, ...]) -> str:
    return f"{' × '.join(map(str, shape))} values" if shape else "one value"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
