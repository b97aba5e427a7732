"""What rank 0 writes while all ranks produce it: weights, exports, scores.

In: a stream that all ranks produce together, and what writes it. Out: the files; or on every rank
the same RunError, with the file, what it takes, what is free and the way out:

    out/.model.partial-4711/0.part cannot be written (No space left on device: it takes 16.0 GB, and
    9.1 GB are free without it); make room there, then export it again
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from longshore.distributed.agreement import PeerError
from longshore.distributed.shared_stream import write_on_rank_0
from longshore.distributed.topology import Groups
from longshore.train.checkpoint_files import writing
from longshore.train.stop import RunError

Item = TypeVar("Item")


def write_shared(
    items: Iterator[Item],
    groups: Groups,
    write: Callable[[Iterator[Item]], None],
    *,
    target: Path,
    then: str,
    check: Callable[[], int] = lambda: 0,
    every: int = 1,
) -> None:
    """All ranks call it together; see distributed/shared_stream.py.

    target: what is written. then: the advice after an error, once its cause is gone. check: refuses
    on rank 0 what cannot be written, before the first item, and returns the bytes it will take.
    """

    def checked(stream: Iterator[Item]) -> None:
        with writing(target, then=then):
            needed = check()
        with writing(target, then=then, needed=needed):
            write(stream)

    try:
        write_on_rank_0(items, groups, checked, every=every)
    except PeerError as error:
        if error.kind == RunError.__name__:
            raise RunError(error.message) from None
        raise
