import torch
from tests.data.plans import plan_of
from torch import nn

from longshore.batch import Counts
from longshore.data.pack import context_batches
from longshore.plan import Pack, Round
from longshore.train.device import SMALLER_PACKS, WAY_OUT, out_of_memory
from longshore.train.supervision import RankStatus


def test_what_is_in_memory_is_counted():
    """A GiB of parameters, and two of moments after a step; gradients as they come."""
    weight = nn.Parameter(torch.empty(2**14, 2**14, device="meta"))
    optimizer = torch.optim.AdamW([weight], foreach=False)
    status = RankStatus()
    status.at("forward", step=3)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    text = out_of_memory(error, status, [], optimizer=optimizer)
    assert "in step 3, forward: no tokens, and 2.00 GiB more did not fit; " in text
    assert "; parameters 1.0 GiB, gradients 0.0 GiB, optimizer 0.0 GiB; lower plan.capacity" in text
    weight.grad = torch.empty_like(weight)
    optimizer.step()
    text = out_of_memory(error, status, [], optimizer=optimizer)
    assert "; parameters 1.0 GiB, gradients 1.0 GiB, optimizer 2.0 GiB; " in text


def message(*, round, phase="backward"):
    """Of lane 0 of two: a round with a shared pack of 8 tokens and 3 of its own, then without."""
    rounds = [
        Round((Pack(0, 2, (0,), 4), Pack(0, 1, (1,), 3))),
        Round((Pack(0, 1, (2,), 5),)),
    ]
    plan = plan_of([7, 3, 5], rounds, lanes=2)
    batches = context_batches(plan, 0, counts=Counts.of([12], [7, 3, 5]))
    status = RankStatus()
    status.at(phase, step=12, round=round)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    return out_of_memory(error, status, batches, optimizer=optimizer)


def test_a_shared_pack_is_named_with_all_its_tokens():
    text = message(round=1)
    assert text.startswith(
        "is out of GPU memory in step 12, round 1 of 2, backward: 7 tokens, 4 of them its part of "
        "a pack of 8 that 2 ranks share, and 2.00 GiB more did not fit; parameters "
    )
    assert text.endswith(f"; {WAY_OUT}{SMALLER_PACKS}")
    assert "\n" not in text


def test_a_round_without_shared_packs():
    text = message(round=2)
    assert "round 2 of 2, backward: 5 tokens, and 2.00 GiB more did not fit" in text
    assert text.endswith(f"; {WAY_OUT}")


def test_outside_of_rounds_the_largest_counts():
    assert "in step 12, optimizer: 7 tokens, 4 of them" in message(round=0, phase="optimizer")
