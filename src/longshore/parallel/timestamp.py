"""A moment on the device: taken without waiting, read once the device has been there.

In: a device. Out: seconds between two moments. On a GPU a timestamp is an event in its stream, so a
forward that was only queued still has its real time.
"""

import time

import torch


class Timestamp:
    """Now on a CPU; on a GPU, when its stream gets there."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.time = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        """Waits until the device has reached it."""
        if self.event is not None:
            self.event.synchronize()

    def since(self, other: "Timestamp") -> float:
        """Seconds since another one; the device has reached both."""
        if self.event is None or other.event is None:
            return self.time - other.time
        return float(other.event.elapsed_time(self.event)) / 1e3
