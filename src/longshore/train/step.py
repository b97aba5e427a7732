"""One optimizer step: the rounds of a plan, then one update.

In: a model on its lanes, the lane's micro-batches, a loss. Out: the step's loss and gradient norm,
still on the device. Every lane runs every round; each loss sum is divided by the count of the whole
step before backward and gradients are summed over lanes and rounds, so that the update is that of
all sequences together, however they were packed:

    2 lanes × 2 rounds with loss sums 3, 5 and 2, 6 over 8 loss tokens: loss (3 + 5 + 2 + 6) / 8 = 2

A step without a loss token has nothing to learn: it is skipped, alike on all lanes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW

from longshore.batch import MicroBatch
from longshore.dist.topology import Topology
from longshore.model.decoder import Decoder
from longshore.parallel.fsdp import Mode, begin_round
from longshore.train.loss import Loss
from longshore.train.optim import clip, set_lr


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What a step left: loss and norm are 0-dim tensors on the device, the same on all lanes."""

    loss: Tensor
    grad_norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Stepper:
    """Everything a step needs besides its data."""

    model: Decoder
    optimizer: AdamW
    topology: Topology
    mode: Mode
    loss: Loss
    clip: float

    def step(self, batches: list[MicroBatch], lr: float) -> Trained | None:
        """Runs the rounds and updates the parameters; None if there was nothing to learn from."""
        divisor = self.loss.divisor(batches, self.topology.groups)
        if not divisor:
            return None
        total = self.gradients(batches, divisor)
        norm = clip(self.model, self.clip, self.topology, also=total)
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Trained(total, norm)

    def gradients(self, batches: list[MicroBatch], divisor: float) -> Tensor:
        """Forward and backward of every round; returns this lane's part of the loss."""
        device = self.topology.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for host in batches:
            batch = host.to(device, non_blocking=True)
            begin_round(self.model, mode=self.mode, is_last=batch.is_last)
            assert batch.token_ids is not None
            assert batch.targets is not None
            out = self.model(batch.token_ids, batch.ctx, batch.targets.labels)
            loss = self.loss.summed(out.values, batch) / divisor
            loss.backward()
            total += loss.detach()
        return total
