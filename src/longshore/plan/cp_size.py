"""Legal CP sizes, the lanes a group of each size may start at, and the padding each size asks for.

In: integers. Out: integers. With 6 lanes the powers of two and the whole give sizes (1, 2, 4, 6); a
group of 4 may start at lane 0 only, one of 2 at lanes 0, 2 and 4. A sequence of 10 tokens stays 10
at CP size 1 and is padded to 12 (a multiple of 2·2) at CP size 2, 6 tokens for each lane.
"""

from longshore.errors import SettingError

ANY_SIZE_LANES = 64


def legal_cp_sizes(
    lanes: int,
    *,
    kind: str = "pow2",
    min_cp: int = 1,
    max_cp: int | None = None,
    heads: int | None = None,
) -> tuple[int, ...]:
    """The CP sizes a plan may use, rising: powers of two and all lanes together, or any size.

    heads: of these a rank's heads are shared out over a CP group, so a size must divide them.
    """
    highest = lanes if max_cp is None else max_cp
    if kind not in ("pow2", "any"):
        raise SettingError("{cp_sizes} is {given!r}; it may be 'pow2' or 'any'", given=kind)
    if kind == "any" and lanes > ANY_SIZE_LANES:
        raise SettingError(
            f"{{cp_sizes}}='any' works up to {ANY_SIZE_LANES} lanes, but there are {lanes}; use "
            "'pow2'"
        )
    if not 1 <= min_cp <= highest:
        raise SettingError(
            f"{{min_cp}} is {min_cp}; it must be between 1 and {{max_cp}} ({highest})"
        )
    if highest > lanes:
        raise SettingError(f"{{max_cp}} is {highest}, but there are only {lanes} lanes")
    powers = [1 << i for i in range(lanes.bit_length())]
    sizes = range(1, lanes + 1) if kind == "any" else [*powers, lanes]
    between = {size for size in sizes if min_cp <= size <= highest}
    legal = tuple(sorted(size for size in between if not heads or heads % size == 0))
    if not legal:
        dividing = f" that divides the {heads} heads" if heads and between else ""
        raise SettingError(
            f"no CP size{dividing} is legal from {{min_cp}} {min_cp} to {{max_cp}} {highest} on "
            f"{lanes} lanes; widen this range, or set {{cp_sizes}}='any'"
        )
    return legal


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def padded_length(length: int, cp_size: int) -> int:
    """A sequence's tokens after padding: none at CP size 1, else a multiple of 2·cp_size."""
    if cp_size == 1:
        return length
    step = 2 * cp_size
    return -(-length // step) * step


def usable_capacity(capacity: int, align: int) -> int:
    """The most tokens a lane's packs may have so that their total, rounded up to `align`, fits."""
    return capacity // align * align
