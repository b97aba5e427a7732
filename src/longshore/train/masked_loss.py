"""A loss function of a user, kept from tokens that have no loss.

In: the function, the negative log-likelihood of each token (T), and the micro-batch. Out: its
values (T), 0 where no loss counts, and the rows at which it is to blame for what is not finite.

A token without loss reaches the function as 0, and what comes back there is dropped. That is not
enough: `nll / w` with w = 0 has the derivative 1/0, and 0 · ∞ is NaN. So a NaN that is born of a
gradient of 0 is 0 again, in every operation of the function: for `sums[sequence] / w` it would
otherwise pass to all tokens of the sequence.

With nll 2 3 5, w 2 0 1 and a mask 1 0 1, `nll / w` gives 1 0 5 and the gradient 1/2 0 1.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from longshore.batch import MicroBatch

PerToken = Callable[[Tensor, MicroBatch], Tensor]
NONE = -1


class Faults(NamedTuple):
    """int64, 0-dim, on the device: the first row with loss whose value, or whose gradient, is not
    finite although its nll is; −1 if there is none. The gradient's is known after backward."""

    value: Tensor
    gradient: Tensor


def masked_values(function: PerToken, nll_T: Tensor, batch: MicroBatch) -> tuple[Tensor, Faults]:
    """What the function says of tokens with loss; others reach neither forward nor backward."""
    assert batch.targets is not None
    mask_T = batch.targets.loss_mask
    given_T = torch.where(mask_T, nll_T, 0.0)
    values_T = function(given_T, batch)
    shape = tuple(values_T.shape) if isinstance(values_T, Tensor) else type(values_T).__name__
    if shape != tuple(nll_T.shape):
        raise ValueError(
            f"the loss function returned {shape} for {len(nll_T)} tokens; "
            "it must return one value for each token"
        )
    blamed_T = mask_T & nll_T.detach().isfinite()
    value = _first(blamed_T & ~values_T.detach().isfinite())
    faults = Faults(value, torch.full_like(value, NONE))

    def note(grad_T: Tensor) -> None:
        faults.gradient.copy_(_first(blamed_T & ~grad_T.isfinite()))

    if given_T.requires_grad:
        _keep_zeros(values_T, given_T)
        given_T.register_hook(note)
    # 0 · given: parameters get a gradient in every round, whatever the function reads.
    return torch.where(mask_T, values_T, 0.0 * given_T), faults


def _first(bad_T: Tensor) -> Tensor:
    """The first row that is True, without waiting for the device."""
    return torch.where(bad_T.any(), bad_T.to(torch.int8).argmax(), NONE)


def _keep_zeros(values_T: Tensor, given_T: Tensor) -> None:
    """Of all operations between the two, a gradient of 0 stays one."""
    known = {given_T.grad_fn, None}
    nodes = [values_T.grad_fn]
    while nodes:
        node = nodes.pop()
        if node in known:
            continue
        known.add(node)
        assert node is not None
        if node.next_functions:
            node.register_hook(_zero_stays_zero)
        nodes += [before for before, _ in node.next_functions]


def _zero_stays_zero(
    inner: tuple[Tensor | None, ...], outer: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """For operations that work on each element; of others a NaN is left to be reported."""
    if len(outer) != 1 or outer[0] is None:
        return None
    gradient = outer[0]
    born = gradient.isfinite().all() & (gradient == 0)
    return tuple(
        part
        if part is None or part.shape != gradient.shape
        else torch.where(born & part.isnan(), 0.0, part)
        for part in inner
    )
