"""How an op is compared with its twin: outputs and all gradients, over joined runs."""

from itertools import accumulate

import torch

from longshore.batch import Boundaries


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


def assert_same(got, want, *, within=1e-9):
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        if b.numel():
            assert (a - b).abs().max() <= within * b.abs().max()
