"""A stream that all ranks produce together and rank 0 alone writes; an error of it ends all ranks.

In: an iterator of as many items on every rank, whose items cost collectives, and what rank 0 does
with it. Out: nothing, or an error on every rank. If rank 0 stopped at an error, the others would
wait for it in the collectives of the next item, until these time out. So the ranks agree before
every few items and after the last, which costs a small collective each time, and rank 0 takes part
in all items up to there before it raises:

    write_on_rank_0(gathered_tensors(model, topology), groups, save, every=16)

If the disk is full at item 20, rank 0 receives items 21 to 31 without writing them, and all ranks
raise before item 32.
"""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from longshore.distributed.agreement import agree, agreed
from longshore.distributed.topology import Groups

Item = TypeVar("Item")


def write_on_rank_0(
    items: Iterator[Item],
    groups: Groups,
    write: Callable[[Iterator[Item]], None],
    *,
    every: int = 1,
) -> None:
    """Calls `write` on rank 0 with all items; the other ranks only produce them.

    every: items between two agreements. Rank 0 raises its error, all others a PeerError.
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
    """The items, with an agreement before every few of them."""

    def __init__(self, items: Iterator[Item], groups: Groups, every: int) -> None:
        self._items = items
        self._groups = groups
        self._every = every
        self._received = 0
        self._is_done = False
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
