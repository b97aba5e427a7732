"""How many tokens a lane's micro-batch has: known from the plan alone, with no message.

In: a plan and the bucket sizes. Out: the total of a lane in a round, rounded up to the plan's
`align` and then to the next bucket; the capacity, as far as `align` allows, is always a bucket.

With capacity 1024, align 16 and buckets (256, 512) a lane whose packs have 300 tokens runs 512, one
with 513 tokens runs 1024, and one without work runs 256 tokens of padding (16 without buckets).
"""

from collections.abc import Sequence as Seq

from longshore.plan.cp_size import usable_capacity
from longshore.plan.types import Pack, Plan

EMPTY_TOKENS = 16
"""Tokens of an empty pack before rounding: enough to be split over 16 tensor parallel ranks."""


def make_buckets(capacity: int, *, align: int = 1, count: int = 8) -> tuple[int, ...]:
    """Evenly spaced bucket sizes up to the capacity, each a multiple of `align`.

    Even steps, not halves: padding is a sequence of its own, whose attention costs its square. With
    eight buckets it is at most an eighth of the capacity.
    """
    if count < 1:
        raise ValueError(f"count of buckets is {count}; it must be at least 1")
    most = usable_capacity(capacity, align)
    if most < 1:
        raise ValueError(f"capacity {capacity} holds no multiple of align ({align})")
    sizes = (-(-most * part // (count * align)) * align for part in range(1, count + 1))
    return tuple(sorted(set(sizes)))


def lane_packs(plan: Plan, number: int, lane: int) -> tuple[Pack, ...]:
    """The packs that a lane shares in a round, by falling CP size, then by first lane."""
    if not 0 <= lane < plan.setting.lanes:
        raise ValueError(f"lane is {lane}; the plan has lanes 0 to {plan.setting.lanes - 1}")
    packs = plan.rounds[number].packs
    found = (pack for pack in packs if 0 <= lane - pack.first_lane < pack.cp_size)
    return tuple(sorted(found, key=lambda pack: (-pack.cp_size, pack.first_lane)))


def lane_tokens(plan: Plan, number: int, lane: int, *, buckets: Seq[int] = ()) -> int:
    """Tokens of a lane's micro-batch in a round, all padding included."""
    setting = plan.setting
    most = usable_capacity(setting.capacity, setting.align)
    sizes = check_buckets(buckets, capacity=setting.capacity, align=setting.align)
    tokens = sum(pack.tokens_per_lane for pack in lane_packs(plan, number, lane))
    tokens = -(-(tokens or min(EMPTY_TOKENS, most)) // setting.align) * setting.align
    if tokens > most:
        raise ValueError(
            f"round {number}, lane {lane}: {tokens} tokens, and the capacity is {most} in steps of "
            f"align ({setting.align}); check(plan) says what is wrong with it"
        )
    return next(size for size in sizes or (tokens,) if size >= tokens)


def check_buckets(buckets: Seq[int], *, capacity: int, align: int) -> tuple[int, ...]:
    """The bucket sizes, rising, with the usable capacity as the last; none if none were given."""
    most = usable_capacity(capacity, align)
    for size in buckets:
        if size < 1 or size % align or size > most:
            raise ValueError(
                f"bucket size {size}: it must be a multiple of align ({align}), at least 1 and at "
                f"most the capacity ({most}); make_buckets gives such sizes"
            )
    return tuple(sorted({*buckets, most})) if buckets else ()
