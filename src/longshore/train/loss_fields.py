"""Fields of the data that a loss reads, and whether the data declare them so.

In: what a loss needs, and the declared fields. Out: nothing, or an error that shows a declaration
which fits. DPO's NeededField("pair", ("sequence",), is_integer=True) is one whole number for each
sequence; a field declared pair:per_target:float32 gives

    loss is dpo, which reads pair as pair:per_sequence:int64; declare it so, not pair:per_target:…
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longshore.data.source import (
    ADVANTAGES,
    OLD_LOGPROBS,
    PAIR,
    REF_LOGPROBS,
    SIGN,
    TEACHER_IDS,
    TEACHER_LOGPROBS,
    Field,
    Per,
)

SOURCES = {
    ADVANTAGES: "; give each row a column of this name: one number, or a list with one per token",
    OLD_LOGPROBS: "; sampling writes it, or longshore score with --field old_logprobs",
    REF_LOGPROBS: "; longshore score DATA --model BASE --out SCORED writes it",
}
"""Where data get a field from."""


@dataclass(frozen=True, slots=True)
class NeededField:
    """A field that a loss reads."""

    name: str
    """As the data declare it."""
    per: tuple[Per, ...] = ("target",)
    """What one value belongs to: one of these."""
    dims: int = 0
    """Dimensions of one value: 0 for a number, 1 for k numbers; those of a loss have the same k."""
    is_integer: bool = False
    """Whether values are whole numbers; else any."""

    def fits(self, spec: Field) -> bool:
        is_kind = not self.is_integer or "int" in spec.dtype
        return spec.per in self.per and len(spec.shape) == self.dims and is_kind

    def __str__(self) -> str:
        """Declarations that fit, for example."""
        dtype, shape = "int64" if self.is_integer else "float32", ":8" * self.dims
        return " or ".join(f"{self.name}:per_{per}:{dtype}{shape}" for per in self.per)


def needed_fields(loss: str, options: Mapping[str, Any]) -> tuple[NeededField, ...]:
    """The fields that a ready loss reads with these options; () for any other."""
    if loss == "dpo":
        pair, sign = (NeededField(name, ("sequence",), is_integer=True) for name in (PAIR, SIGN))
        reference = NeededField(REF_LOGPROBS, ("target", "sequence"))
        return (pair, sign) if options.get("reference_free") else (pair, sign, reference)
    if loss in ("grpo", "ppo"):
        fields = [NeededField(ADVANTAGES, ("target", "sequence"))]
        fields += [] if options.get("on_policy") else [NeededField(OLD_LOGPROBS)]
        return (*fields, *([NeededField(REF_LOGPROBS)] if options.get("kl") else []))
    if loss == "distill":
        ids = NeededField(TEACHER_IDS, dims=1, is_integer=True)
        return (ids, NeededField(TEACHER_LOGPROBS, dims=1))
    return ()


def check_needed(loss: str, needed: Sequence[NeededField], declared: Sequence[Field]) -> None:
    """Refuses data without the fields that a loss reads, or with others of their names."""
    by_name = {spec.name: spec for spec in declared}
    for need in needed:
        if need.name not in by_name:
            known = ", ".join(map(str, declared)) or "none"
            raise ValueError(
                f"train.loss is {loss}, which reads the field {need.name}, and the data do not "
                f"have it; their data.fields: {known}{SOURCES.get(need.name, '')}"
            )
        _check_kind(loss, need, by_name[need.name])
    rows = [by_name[need.name] for need in needed if need.dims]
    if len({spec.shape for spec in rows}) > 1:
        raise ValueError(
            f"train.loss is {loss}, whose fields {' and '.join(map(str, rows))} must have the same "
            "shape; declare them so in data.fields"
        )


def _check_kind(loss: str, need: NeededField, spec: Field) -> None:
    if need.fits(spec):
        return
    shifted = ""
    if spec.per == "token" and "target" in need.per:
        shifted = ", with a value for each token as a target, shifted as labels are"
    raise ValueError(
        f"train.loss is {loss}, which reads {need.name} as {need}{shifted}; declare it so in "
        f"data.fields, not as {spec}"
    )
