"""Which tokens of a sequence a lane of a CP group holds, chunk by chunk."""

from longshore.plan.shapes import padded_length


def chunk_ranges(length: int, cp_rank: int, cp_size: int) -> list[tuple[int, int]]:
    """The real tokens of a sequence that one lane of a CP group holds, as rising (start, stop)."""
    if cp_size == 1:
        return [(0, length)]
    chunk = padded_length(length, cp_size) // (2 * cp_size)
    starts = (cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk)
    return [(start, min(start + chunk, length)) for start in starts if start < length]
