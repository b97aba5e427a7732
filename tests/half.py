"""Products of half precision on any CPU: multiplied in float32 and rounded.

Not every CPU multiplies bfloat16: there torch warns, and takes hundreds of times as long.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten._grouped_mm.default)
HALF = (torch.bfloat16, torch.float16)


def _is_half(value):
    return isinstance(value, torch.Tensor) and value.dtype in HALF and value.device.type == "cpu"


class HalfByFloat32(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        halves = [value for value in args if _is_half(value)]
        if function not in PRODUCTS or not halves:
            return function(*args, **(kwargs or {}))
        wide = [value.float() if _is_half(value) else value for value in args]
        return function(*wide, **(kwargs or {})).to(halves[0].dtype)
