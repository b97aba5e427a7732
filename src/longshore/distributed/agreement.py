"""Ranks agree: the same digest on all, and an error of one rank raised on all of them.

In: a digest, or work that may fail on some ranks. Out: nothing where all are well, else an error on
every rank, so that none waits for one that is gone:

    with agreed(groups):
        source = open_sequences(config, decoder)        fails on rank 3: all ranks raise

    write_on_rank_0(gathered_tensors(model, topology), groups, save, every=16)
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.distributed import ProcessGroup

from longshore.distributed.collectives import gather
from longshore.distributed.topology import Groups, Topology, destroy_groups, new_group_of

LONGEST_ERROR = 16384
MOST_NAMES = 8


def on_any_rank(flags: Sequence[bool], group: ProcessGroup) -> list[bool]:
    """Which of the flags any rank has set; all ranks of the group, one for CPU tensors, call it."""
    answers: list[bool] = gather(torch.tensor([flags]), group).any(dim=0).tolist()
    return answers


class AnyRank:
    """Which flags any rank has set, exchanged over gloo, so that no host waits for its GPU.

    The main threads of all ranks construct, call and close it together.
    """

    def __init__(self, topology: Topology) -> None:
        self._group = topology.groups.world
        if topology.device.type != "cpu":
            self._group = new_group_of([range(topology.world_size)], backend="gloo")

    def __call__(self, flags: Sequence[bool]) -> list[bool]:
        return on_any_rank(flags, self._group)

    def close(self) -> None:
        destroy_groups([self._group])


def same_on_all_ranks(digest: str, groups: Groups, *, what: str = "plan") -> None:
    """Raises on every rank, naming those that differ, unless the digest is the same on all."""
    short = hashlib.sha256(digest.encode()).digest()
    row = torch.tensor([list(short)], dtype=torch.uint8, device=groups.device)
    by_digest: dict[bytes, list[int]] = {}
    for rank, received in enumerate(gather(row, groups.world).tolist()):
        by_digest.setdefault(bytes(received), []).append(rank)
    if len(by_digest) > 1:
        most, *others = sorted(by_digest.values(), key=len, reverse=True)
        raise RuntimeError(
            f"the ranks have {len(by_digest)} different versions of the {what}: {_names(most)} "
            f"against {'; against '.join(map(_names, others))}. Their inputs differ: compare data, "
            "configuration and versions on these ranks"
        )


def agree(error: str | None, groups: Groups) -> None:
    """Raises on every rank if one of them has an error: that of the lowest such rank.

    Call it on all ranks after work that may fail on one, before the next collective. It costs one
    small collective, and a second one if a rank failed.
    """
    if first := _first_error(None if error is None else {"message": error}, groups):
        raise first


class PeerError(RuntimeError):
    """Work failed on another rank: the error of the lowest such rank, as data.

    kind: the name of its class, or "" if there is only a message. errno, strerror: those of an
    OSError; 0 and "" for any other error. also: the other ranks that failed.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        kind: str = "",
        errno: int = 0,
        strerror: str = "",
        also: tuple[int, ...] = (),
    ) -> None:
        self.rank, self.kind, self.message = rank, kind, message
        self.errno, self.strerror, self.also = errno, strerror, also
        words = f"{kind}: {message}" if kind else message
        others = f" ({_names(also)} failed too)" if also else ""
        super().__init__(f"rank {rank} failed: {words}{others}")

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), **vars(self)), ()

    def as_os_error(self) -> OSError | None:
        """The system's refusal on the other rank, if it was one."""
        return OSError(self.errno, self.strerror) if self.errno else None


@contextmanager
def agreed(groups: Groups) -> Iterator[None]:
    """Runs the block, which has no collective; if it fails on one rank, it raises on all.

    The rank whose error it is raises that error itself, all others a PeerError that quotes it.
    """
    failure: BaseException | None = None
    try:
        yield
    except (Exception, SystemExit) as error:
        failure = error
    first = _first_error(None if failure is None else _as_data(failure), groups)
    if first is None:
        return
    if failure is not None and first.rank == groups.world.rank():
        raise failure
    raise first from failure


def _as_data(error: BaseException) -> dict[str, Any]:
    """An error as fields of PeerError, to be sent to the other ranks."""
    data: dict[str, Any] = {"kind": type(error).__name__, "message": _text(error)}
    if isinstance(error, OSError) and isinstance(error.errno, int):
        data |= {"errno": error.errno, "strerror": str(error.strerror or "")}
    return data


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as other:  # of a user's own class; failing here would hang the others
        return f"its text cannot be read ({type(other).__name__})"


def _first_error(error: dict[str, Any] | None, groups: Groups) -> PeerError | None:
    """The error of the lowest rank that has one; None if no rank has one."""
    text = b"" if error is None else _as_json(error)
    length = -1 if error is None else len(text)
    mine = torch.tensor([length], dtype=torch.int64, device=groups.device)
    lengths: list[int] = gather(mine, groups.world).tolist()
    failed = [rank for rank, length in enumerate(lengths) if length >= 0]
    if not failed:
        return None
    padded = list(text.ljust(max(lengths), b"\0"))
    row = torch.tensor([padded], dtype=torch.uint8, device=groups.device)
    first = failed[0]
    data = bytes(gather(row, groups.world)[first].tolist())[: lengths[first]]
    return PeerError(rank=first, also=tuple(failed[1:]), **json.loads(data))


def _as_json(error: dict[str, Any]) -> bytes:
    """The error as JSON, with long texts cut."""
    # A file's name in the error may hold bytes that are no UTF-8; failing here would hang others.
    short = {
        name: value.encode(errors="backslashreplace")[:LONGEST_ERROR].decode(errors="replace")
        if isinstance(value, str)
        else value
        for name, value in error.items()
    }
    return json.dumps(short, ensure_ascii=False).encode()


def _names(ranks: Sequence[int]) -> str:
    """[0, 2, 3] as "ranks 0, 2 and 3"; long lists are shortened."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > MOST_NAMES:
        return f"ranks {', '.join(map(str, ranks[:MOST_NAMES]))} and {len(ranks) - MOST_NAMES} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


Item = TypeVar("Item")


def write_on_rank_0(
    items: Iterator[Item],
    groups: Groups,
    write: Callable[[Iterator[Item]], None],
    *,
    every: int = 1,
) -> None:
    """Calls `write` on rank 0 with all items; the other ranks only produce them.

    items: as many on every rank, each made by collectives. every: items between two agreements.

    If rank 0 stopped at an error, the others would wait for it in the collectives of the next item,
    until these time out. So the ranks agree before every few items and after the last, which costs
    a small collective each time, and rank 0 takes part in all items up to there before it raises:
    with every=16 and a disk that is full at item 20, rank 0 receives items 21 to 31 without writing
    them, and all ranks raise before item 32. Rank 0 raises its error, all others a PeerError.
    """
    stream = _SharedStream(items, groups, every)
    if groups.world.rank() == 0:
        try:
            write(stream)
        except (Exception, SystemExit) as error:
            if stream.is_broken:  # by the items themselves: the ranks are not at the same place
                raise
            stream.receive_until_agreement()
            with agreed(groups):
                raise error
    for _ in stream:
        pass
    agree(None, groups)


class _SharedStream(Iterator[Item], Generic[Item]):
    """The items, with an agreement before every few of them.

    Not a generator, which a consumer's `yield from` would close at an error.
    """

    def __init__(self, items: Iterator[Item], groups: Groups, every: int) -> None:
        self._items, self._groups, self._every = items, groups, every
        self._received, self._is_done = 0, False
        self.is_broken = False
        """An item could not be produced here, or another rank has failed."""

    def __next__(self) -> Item:
        if self._is_done:
            raise StopIteration
        try:
            if self._received % self._every == 0:
                agree(None, self._groups)
            item = next(self._items)
        except StopIteration:
            self._is_done = True
            raise
        except BaseException:
            self.is_broken = True
            raise
        self._received += 1
        return item

    def receive_until_agreement(self) -> None:
        """Takes part in the items before the next agreement, or before the one at the end."""
        while not self._is_done and self._received % self._every:
            next(self, None)
