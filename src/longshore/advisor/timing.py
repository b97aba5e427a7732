"""Times functions on a device, within a budget of seconds.

In: a function that computes on the device. Out: median seconds of the device, and of the host that
launches it. On CUDA the queue is filled behind dense products, so that kernels run one after the
other even where the host is slower than the device, and at the clocks of a device that works; on a
CPU host and device are one, and host seconds are 0.

    a block of 30 kernels of 5 us that the host launches in 300 us: device 150 us, host 300 us
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import torch

FACTOR, FACTOR_SECONDS = 8192, 1.5e-3
"""Rows of the products that keep a GPU busy, and how long one takes, at least about."""
LONGEST_AHEAD = 0.2
WARM = 0.02
"""Seconds of such products before each measurement."""
CUDA_MOST = 0.3
"""Seconds after which a function is not timed again, but for three times at least."""
CPU_LEAST = 0.004
"""On a CPU seconds that calls are repeated for each of `repeats`, three times at least."""


@dataclass(slots=True)
class Clock:
    """The budget of a calibration, and what it says on its way."""

    budget: float
    """Seconds that all measurements may take."""
    tell: Callable[[str], None] = lambda text: None
    """Shows progress."""
    begin: float = field(default_factory=time.perf_counter)
    """When it began."""

    @property
    def spent(self) -> float:
        return time.perf_counter() - self.begin

    def is_over(self, share: float = 1.0) -> bool:
        """Whether this share of the budget is spent."""
        return self.spent > share * self.budget


@dataclass(frozen=True, slots=True)
class Timer:
    """Times on one device."""

    device: torch.device
    repeats: int
    """How often a function is timed."""

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, function: Callable[[], object], *, warmup: int = 2) -> float:
        """The median of the device's seconds in a call."""
        for _ in range(warmup):
            function()
        self.sync()
        return self._on_cuda(function) if self.is_cuda else self._on_cpu(function)

    def host_seconds(self, function: Callable[[], object], *, warmup: int = 2) -> float:
        """The median of the host's seconds to launch a call; 0 on a CPU."""
        if not self.is_cuda:
            return 0.0
        for _ in range(warmup):
            function()
        return statistics.median(self._launch(function) for _ in range(max(5, self.repeats)))

    def _launch(self, function: Callable[[], object]) -> float:
        self.sync()
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin

    def _on_cpu(self, function: Callable[[], object]) -> float:
        times: list[float] = []
        while len(times) < 3 or (len(times) < 40 and sum(times) < self.repeats * CPU_LEAST):
            begin = time.perf_counter()
            function()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def _on_cuda(self, function: Callable[[], object]) -> float:
        """Between events; before them products keep the device busy until all is launched."""
        ahead = min(LONGEST_AHEAD, 1.5 * self._launch(function) + 1e-4)
        self._work(WARM)
        times: list[float] = []
        while len(times) < 3 or (len(times) < self.repeats and sum(times) < CUDA_MOST):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._work(ahead)
            begin.record()
            function()
            end.record()
            self.sync()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def _work(self, seconds: float) -> None:
        """Products for about so long: a pause would let the clocks rise, unlike in training."""
        factor = _factor(self.device)
        for _ in range(max(1, round(seconds / FACTOR_SECONDS))):
            torch.mm(factor, factor)


@cache
def _factor(device: torch.device) -> torch.Tensor:
    return torch.randn(FACTOR, FACTOR, device=device, dtype=torch.bfloat16)


def free(device: torch.device) -> None:
    """Gives back what the measurement before has left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
