"""Fields of the data that a loss reads, and whether the data declare them so. No torch.

In: what a loss needs, and the declared fields. Out: nothing, or an error that shows a declaration
which fits. DPO's pair is one whole number for each sequence; declared pair:per_target:float32 gives

    loss is dpo, which reads pair as pair:per_sequence:int64; declare it so, not pair:per_target:…
"""

from collections.abc import Mapping, Sequence
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


Needed = Mapping[str, tuple[Field, ...]]
"""By name, declarations that fit; integers may have any size, and k numbers any k."""


def needed_fields(loss: str, options: Mapping[str, Any]) -> Needed:
    """The fields that a ready loss reads with these options; {} for any other."""

    def need(name: str, *per: Per, dtype: str = "float32", shape: tuple[int, ...] = ()) -> Needed:
        return {name: tuple(Field(name, each, dtype, shape) for each in per)}

    if loss == "dpo":
        pair, sign = (need(name, "sequence", dtype="int64") for name in (PAIR, SIGN))
        is_free = options.get("reference_free")
        return {**pair, **sign, **({} if is_free else need(REF_LOGPROBS, "target", "sequence"))}
    if loss in ("grpo", "ppo"):
        old = {} if options.get("on_policy") else need(OLD_LOGPROBS, "target")
        reference = need(REF_LOGPROBS, "target") if options.get("kl") else {}
        return {**need(ADVANTAGES, "target", "sequence"), **old, **reference}
    if loss == "distill":
        ids = need(TEACHER_IDS, "target", dtype="int64", shape=(8,))
        return {**ids, **need(TEACHER_LOGPROBS, "target", shape=(8,))}
    return {}


def check_needed(loss: str, needed: Needed, declared: Sequence[Field]) -> None:
    """Refuses data without the fields that a loss reads, or with others of their names."""
    by_name = {spec.name: spec for spec in declared}
    for name, fitting in needed.items():
        if name not in by_name:
            known = ", ".join(map(str, declared)) or "none"
            raise ValueError(
                f"train.loss is {loss}, which reads the field {name}, and the data do not have it; "
                f"their data.fields: {known}{SOURCES.get(name, '')}"
            )
        spec = by_name[name]
        if not any(_fits(spec, each) for each in fitting):
            shifted = ""
            if spec.per == "token" and "target" in [each.per for each in fitting]:
                shifted = ", with a value for each token as a target, shifted as labels are"
            raise ValueError(
                f"train.loss is {loss}, which reads {name} as {' or '.join(map(str, fitting))}"
                f"{shifted}; declare it so in data.fields, not as {spec}"
            )
    rows = [by_name[name] for name, fitting in needed.items() if fitting[0].shape]
    if len({spec.shape for spec in rows}) > 1:
        raise ValueError(
            f"train.loss is {loss}, whose fields {' and '.join(map(str, rows))} must have the same "
            "shape; declare them so in data.fields"
        )


def _fits(spec: Field, need: Field) -> bool:
    is_kind = "int" in spec.dtype or "int" not in need.dtype
    return spec.per == need.per and len(spec.shape) == len(need.shape) and is_kind
