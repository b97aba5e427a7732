"""CudaRecorder: kernels launched by a function, recorded once and replayed.

In: a function that only launches kernels, on tensors whose addresses stay. Out: a function that
launches all of them again with one call, and what the function returned, which lies where every
replay writes it.

    replay, (y,) = recorder.record(lambda: (x * 2,))
    x.copy_(values)
    replay()                 y is now values · 2

All recordings share one pool of memory. A tensor that nothing refers to any more may be reused by
a later recording, even though replays still write it: whoever records says with `weak` which
tensors later recordings may overwrite. Within a recording nothing overlaps by itself.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]
Replay = Callable[[], None]


class RecordingError(RuntimeError):
    """A function that cannot be replayed: it waits for the GPU, or reads numbers on the host."""


class CudaRecorder:
    """bytes: that all recordings have reserved."""

    runs_again = False

    def __init__(self) -> None:
        self.bytes = 0
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def record(self, run: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved()
        with torch.cuda.stream(self._stream), _fla_without_cache():
            # The loader's thread copies and pins meanwhile, so the rest of the process is free.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = run()
            except BaseException as error:
                with suppress(RuntimeError):
                    graph.capture_end()
                if not isinstance(error, RuntimeError):
                    raise
                raise RecordingError(str(error).strip().partition("\n")[0]) from error
            graph.capture_end()
        self.bytes += torch.cuda.memory_reserved() - before
        return graph.replay, outputs

    @staticmethod
    def weak(tensor: Tensor) -> Tensor:
        """The same memory, without a claim to it."""
        size = 1 + sum(
            (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        memory = _Memory(tensor.data_ptr(), size * tensor.element_size())
        whole = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride())


class _Memory:
    """Bytes on the GPU, as other libraries offer them to torch."""

    def __init__(self, address: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


@contextmanager
def _fla_without_cache() -> Iterator[None]:
    """flash-linear-attention keeps tables of the last boundaries it saw, by the tensor's identity.

    A recording must compute them itself: its boundaries change in place.
    """
    utils = sys.modules.get("fla.utils")
    before = getattr(utils, "FLA_DISABLE_TENSOR_CACHE", None)
    if utils is not None:
        utils.FLA_DISABLE_TENSOR_CACHE = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if utils is not None:
            utils.FLA_DISABLE_TENSOR_CACHE = before  # type: ignore[attr-defined]
