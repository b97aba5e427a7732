"""How an op is compared with its twin: outputs and all gradients, over joined runs."""

from itertools import accumulate

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longshore.batch import Boundaries
from longshore.ops.delta_rule import prepare_delta


def bounds_of(lengths):
    offsets = tuple(accumulate(lengths, initial=0))
    return Boundaries(offsets, torch.tensor(offsets, dtype=torch.int32), max(lengths))


def run(function, given, **settings):
    """The outputs, then the gradient of each tensor given."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    outs = function(**leaves, **settings)
    outs = outs if isinstance(outs, tuple) else (outs,)
    total = sum(
        (out * torch.sin(torch.arange(out.numel(), dtype=out.dtype) + 1).view(out.shape)).sum()
        for out in outs
    )
    total.backward()
    return [*(out.detach() for out in outs), *(leaf.grad for leaf in leaves.values())]


def gated_delta_rule(*rows, initial=None, **settings):
    return prepare_delta(*rows, **settings).run(initial)


def assert_same(got, want, *, within=1e-9, rounding=0.0):
    """Relative to the largest number of each tensor. rounding: allowed where all should be 0."""
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        if b.numel():
            assert (a - b).abs().max() <= within * b.abs().max() + rounding


class LargestTensor(TorchDispatchMode):
    """Within it, `numbers` is the size of the largest tensor that any operation returned."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def on_meta(tensors):
    """Without values: what asks a device for one fails there, as it would wait on a GPU."""
    return {name: tensor.to("meta").requires_grad_() for name, tensor in tensors.items()}
