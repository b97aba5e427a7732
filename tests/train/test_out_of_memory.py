import torch
from torch import nn

from longshore.train.heartbeat import RankStatus
from longshore.train.out_of_memory import out_of_memory


def test_what_is_in_memory_is_counted():
    """A GiB of parameters, and two of moments after a step; gradients as they come."""
    weight = nn.Parameter(torch.empty(2**14, 2**14, device="meta"))
    optimizer = torch.optim.AdamW([weight], foreach=False)
    status = RankStatus()
    status.at("forward", step=3)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    text = out_of_memory(error, status, [], optimizer=optimizer)
    assert "in step 3, forward: 0 tokens, and 2.00 GiB more did not fit; " in text
    assert "; parameters 1.0 GiB, gradients 0.0 GiB, optimizer 0.0 GiB; lower plan.capacity" in text
    weight.grad = torch.empty_like(weight)
    optimizer.step()
    text = out_of_memory(error, status, [], optimizer=optimizer)
    assert "; parameters 1.0 GiB, gradients 1.0 GiB, optimizer 2.0 GiB; " in text
