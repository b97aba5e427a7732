"""A rank that answers signals and says where it stands, however it was started. No torch.

In: its RankStatus and how the ranks meet. Out: a Stop, and lines on stderr. Local ranks write their
beats beside the file they meet in, for their launcher, which watches and speaks. Under torchrun a
rank that has not moved for half a minute writes its status into RUN/.heartbeat; the lowest of these
ranks watches and speaks, and each ends by itself if it was told to stop and cannot.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from longshore.train.heartbeat import RankStatus, beating
from longshore.train.stop import RunError, Stop, stop_on_signals
from longshore.train.watch import NOTICE_S, SAVING, SLOWER, STUCK_S, Watch, last_saved

FOLDER = ".heartbeat"
QUIET_S = 30.0
PERIOD_S = 5.0
SILENT_S = 3 * PERIOD_S


def attended(
    status: RankStatus, *, rank: int, ranks: int, address: str
) -> AbstractContextManager[Stop]:
    """address: where the ranks meet, a file of their launcher or the environment of torchrun."""
    if ranks == 1:
        return stop_on_signals(status, tell=_tell)
    if address.startswith("file://"):
        return _launched(status, rank, Path(address.removeprefix("file://")).parent)
    return _Peers(status, rank, ranks).attended()


@contextmanager
def _launched(status: RankStatus, rank: int, folder: Path) -> Iterator[Stop]:
    with beating(status, lambda: folder, rank=rank), stop_on_signals(status) as stop:
        yield stop


class _Peers:
    """The ranks of torchrun, as one of them sees them."""

    def __init__(self, status: RankStatus, rank: int, ranks: int) -> None:
        self.status = status
        self.rank = rank
        self.ranks = ranks
        self.watch: Watch | None = None

    @contextmanager
    def attended(self) -> Iterator[Stop]:
        beats = beating(
            self.status,
            self._folder,
            rank=self.rank,
            quiet_s=QUIET_S,
            after=self._look,
            period_s=PERIOD_S,
        )
        with (
            beats,
            stop_on_signals(self.status, tell=self._tell, will_not_stop=self._stuck) as stop,
        ):
            try:
                yield stop
            except RuntimeError as error:
                if self.watch is None or not is_time_out(str(error)):
                    raise
                raise RunError(f"{self.watch.words()}; {gave_up(self.status.folder)}") from None

    def _tell(self, text: str) -> None:
        if self.rank == (self.watch.speaker() if self.watch is not None else 0):
            _tell(text)

    def _folder(self) -> Path | None:
        return Path(self.status.folder, FOLDER) if self.status.folder else None

    def _look(self) -> None:
        """In the thread that beats, while this rank does not move."""
        folder = self._folder()
        assert folder is not None
        if self.watch is None:
            self.watch = Watch(folder, self.ranks, missing_is_stuck=True, silent_s=SILENT_S)
        self.watch.look()
        if text := self.watch.notice(NOTICE_S):
            self._tell(text)

    def _stuck(self, told_s: float) -> str:
        status = self.status
        limit = max(STUCK_S, SLOWER * status.longest_s)
        if status.phase == SAVING or status.unmoved_s < limit:
            return ""
        words = self.watch.words() if self.watch is not None else f"it waits: {status.phase}"
        return f"ended without a checkpoint of this step: {words}; {last_saved(status.folder)}"


def is_time_out(text: str) -> bool:
    """Whether an error says that a collective took too long."""
    return "timed out" in text.lower() or "timeout" in text.lower()


def gave_up(folder: str) -> str:
    return f"the others gave up (parallel.timeout_min); {last_saved(folder)}"


def _tell(text: str) -> None:
    sys.stderr.write(f"longshore: {text}\n")
    sys.stderr.flush()
