"""Loader: prefetches steps while the model trains.

In: Steps. Out: the same steps, made ahead by one background thread whose collectives have process
groups of their own; the time that the consumer waits is measured.

    loader = Loader(IndexedSteps(source, batch=BatchSize("sequences", 256), ...), prefetch=2)
    for step in loader: ...          # step.batches, step.plan, step.wait_seconds
    state = loader.state_dict()      # {..., "epoch": 0, "step_in_epoch": 7, "step": 7}
"""

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace

from longshore.data.batches import Place
from longshore.data.steps import POSITIONS, Step, Steps, unchanged


class Loader:
    """Steps, made ahead by a background thread.

    pin: put the micro-batches into page-locked memory, so that copies to a GPU are asynchronous.
    The state counts consumed steps, not prefetched ones. End it with `close()` or use it in a
    `with` block; all ranks do so together.
    """

    def __init__(self, steps: Steps, *, prefetch: int = 2, pin: bool = False) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch is {prefetch}; the thread makes at least 1 step ahead")
        self.steps = steps
        self.prefetch = prefetch
        self.pin = pin
        self._next = Place()
        self._after: Mapping[str, object] = {}
        self._ready: queue.Queue[Step | BaseException | None] = queue.Queue(prefetch)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="longshore-loader", daemon=True)
            self._thread.start()
        started = time.perf_counter()
        item = self._ready.get()
        waited = time.perf_counter() - started
        if isinstance(item, Step):
            self._next, self._after = item.place.following, item.after
            return replace(item, wait_seconds=waited)
        self._ready.put(item)  # the next call gets the same answer
        if item is None:
            raise StopIteration
        raise item

    def _run(self) -> None:
        try:
            finish = _pinned if self.pin else unchanged
            for step in self.steps.from_place(self._next, self._stop.is_set, finish):
                self._put(step)
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Step | BaseException | None) -> None:
        """Queues an item when there is room, or drops it once the loader is being closed.

        The thread continues after a drop until all ranks stop at the same step: a rank that stopped
        alone would leave the others waiting in a collective.
        """
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def state_dict(self) -> dict[str, object]:
        """The place of the next step, and all that decides the order; plain numbers and text."""
        return {**self.steps.describe(), **self._after, **asdict(self._next)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Resumes from a saved state; but for streams, also one of another number of lanes."""
        if self._thread is not None:
            raise RuntimeError("the loader has begun; load its state before the first step")
        self.steps.check_can_resume(state)
        self._after = {name: state[name] for name in (POSITIONS,) if name in state}
        self._next = Place(*(int(str(state[name])) for name in ("epoch", "step_in_epoch", "step")))

    def close(self) -> None:
        """Ends the thread and destroys its process groups."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.steps.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pinned(step: Step) -> Step:
    return replace(step, batches=[batch.pin_memory() for batch in step.batches])
