"""A point in the work of a device, to measure how long things took without waiting for them.

In: a device. Out: `Moment(device)`, now on a CPU, on a GPU when it gets there; later, the seconds
between two of them. Two moments 40 ms apart: second.since(first) = 0.04.
"""

import time

import torch


class Moment:
    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self.time = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        """Until it has come."""
        if self.event is not None:
            self.event.synchronize()

    def since(self, other: "Moment") -> float:
        """Seconds from the other moment; both have come."""
        if self.event is None or other.event is None:
            return self.time - other.time
        return float(other.event.elapsed_time(self.event)) / 1e3
