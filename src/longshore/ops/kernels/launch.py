"""Launches of Triton kernels at half the host's time.

In: a function made by triton.jit. Out: what is called the same way, `kernel[grid](*args, NAME=…)`,
with tensors and numbers by position, a tensor first, and constants by name. Triton works out at
every launch which compiled kernel the arguments need; here that is looked up by all that Triton
compiles for:

    a tensor      its dtype, and whether it begins at a multiple of 16 bytes
    an integer    whether it is 1, whether it is a multiple of 16, whether 32 bits hold it
    a constant    its value, as that of num_warps

and the device. A kind of call that is new goes to Triton, and the kernel that Triton then launches
serves all calls of that kind: 4096 and 8192 rows are of one kind, 4100 of another. For AMD's GPUs
Triton compiles by more than this, the size of a tensor, so there every call goes to Triton.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

SHORT = range(-(2**31), 2**31)
"""Integers that 32 bits hold."""
IS_AMD = torch.version.hip is not None


class Kernel:
    """A jitted function. On a CPU, in Triton's interpreter, every call goes to Triton."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: object) -> None:
        if IS_AMD or not args[0].is_cuda:
            self.function[grid](*args, **constants)
            return
        # No function of its own: calling it for each argument would take as long as the rest.
        kinds = [
            (arg == 1, arg % 16 == 0, arg in SHORT)
            if type(arg) is int
            else (arg.dtype, arg.data_ptr() % 16 == 0)
            if type(arg) is not float
            else None
            for arg in args
        ]
        key = (torch.cuda.current_device(), *kinds, *constants.items())
        known = self.compiled.get(key)
        if known is not None:
            compiled, values = known
            compiled[(*grid, 1, 1)[:3]](*args, *values)
            return
        compiled = self.function[grid](*args, **constants)
        if compiled is None:  # Triton interprets: nothing was compiled.
            return
        names = self.function.arg_names[len(args) :]
        self.compiled[key] = compiled, tuple(constants[name] for name in names)


def power(number: int) -> int:
    """The power of 2 that holds this number; products of Triton want 16 at least."""
    return max(16, 1 << (number - 1).bit_length())
