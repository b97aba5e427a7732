"""One optimizer step: the rounds of a plan, then one update.

In: a model on its lanes, the lane's micro-batches, a loss. Out: the step's losses and gradient
norm, still on the device. Every lane runs every round. Each loss sum is divided by the count of the
full step before backward, and gradients are summed over lanes and rounds, so the update is that of
all sequences together, however they were packed:

    2 lanes × 2 rounds with loss sums 3, 5 and 2, 6 over 8 loss tokens: loss (3 + 5 + 2 + 6) / 8 = 2

With experts or depths of multi-token prediction the loss is

    main / loss tokens + (balance + mixers) / tokens
    + mtp_weight / depths · Σ depth_d / its loss tokens

where losses of a depth's experts and mixer are divided by the tokens that this depth sees; a mixer
may have a loss of its own, as that of sparse attention's indexer.
A step without a loss token is skipped, on all lanes alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import AdamW

from longshore.batch import Depth, MicroBatch, Targets
from longshore.choices import ShardMode
from longshore.distributed.recording import compared
from longshore.distributed.topology import Topology
from longshore.model.interface import Output
from longshore.parallel.pipeline.executor import Executor, Handlers, Timed
from longshore.parallel.pipeline.stages import EmbeddingCopies, Model
from longshore.parallel.tensor import sum_gradients
from longshore.plan.order import Action
from longshore.plan.types import Plan
from longshore.train.cuda_graph import GraphedLayers
from longshore.train.heartbeat import RankStatus
from longshore.train.loss import NO_STEP, Faults, Loss, masked_sum, without_uncounted_labels
from longshore.train.loss_inputs import StepInputs
from longshore.train.optimizer import (
    RoutingCounts,
    clip,
    counts_of_all_stages,
    set_lr,
    update_bias,
)
from longshore.train.out_of_memory import out_of_memory
from longshore.train.sequence_loss import step_inputs
from longshore.train.stop import RunError


@dataclass(frozen=True, slots=True, eq=False)
class RoundResults:
    """What the rounds of a step left on one rank."""

    losses: tuple[Tensor, ...]
    """This rank's part of the losses in each round."""
    times: tuple[Timed, ...]
    """Every forward and backward, in the order they ran."""
    faults: tuple[Faults | None, ...]
    """Non-finite results of a user's loss function in each round; None for the default loss."""
    totals: Tensor
    """Sums that the loss function left on this rank, see StepInputs."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The result of a step, on the device; except for `rounds` it is the same on all ranks."""

    losses: Tensor
    """float64 (3 + depths): the main loss, the experts' balance loss, the mixers' own losses, then
    the loss of each depth of multi-token prediction, each divided by its own count."""
    grad_norm: Tensor
    """0-dim: the global norm before clipping."""
    graphed: Tensor
    """float64 (3): forward passes of layers by GRAPH_WAYS, as CUDA graphs served them; (0) without
    graphs."""
    experts: tuple[Tensor, ...]
    """int64 (E) for each MoE layer: the tokens routed to each expert."""
    rounds: RoundResults
    """What each round left on this rank."""
    loss_metrics: Tensor
    """float64 (M): what the loss function returned beside its values, over the full step."""
    without_gradient: Tensor
    """float64 (1): 1 if no value of the loss function had a gradient, else 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Stepper:
    """Everything a step needs besides its data."""

    model: Model
    """The rank's stages, or the whole decoder; already parallelized, see parallel/apply.py."""
    optimizer: AdamW
    """Of the model's parameters."""
    topology: Topology
    """The lanes to sum losses and gradients over."""
    mode: ShardMode
    """How FSDP shards the parameters."""
    loss: Loss
    """The main loss and what it is divided by."""
    clip: float
    """The largest gradient norm; 0: no clipping."""
    mtp_weight: float = 0.0
    """Weight of the multi-token prediction losses, all depths together."""
    status: RankStatus = field(default_factory=RankStatus)
    """This rank's progress, updated during each step."""
    copies: EmbeddingCopies | None = None
    """Of the embedding on several stages; None without a pipeline."""
    trace: bool = False
    """Whether the ranks record and compare what they issue in every step."""
    graphs: GraphedLayers | None = None
    """CUDA graphs in the model's layers, if there are any."""
    executor: Executor = field(init=False)
    """Runs the rounds."""

    def __post_init__(self) -> None:
        executor = Executor(self.model, self.topology, mode=self.mode)
        object.__setattr__(self, "executor", executor)

    def step(
        self, batches: list[MicroBatch], lr: float, *, plan: Plan | None = None
    ) -> StepResult | None:
        """Runs the rounds and updates the parameters; None if the step has no loss token.

        plan: what the micro-batches were packed by; a pipeline needs it.
        """
        with self._memory_limit(batches):
            result = self._step(batches, lr, plan=plan)
        self.status.at("waiting for data")
        return result

    def _step(
        self, batches: list[MicroBatch], lr: float, *, plan: Plan | None
    ) -> StepResult | None:
        self.status.at("counting loss tokens")
        divisor = self.loss.divisor(batches, self.topology.groups)
        if not divisor:
            return None
        losses, counts, rounds = self.gradients(batches, divisor, plan=plan)
        # All TP ranks of a lane have the same losses; the sum over all ranks counts them once.
        mine = torch.cat([losses, rounds.totals])
        mine = mine if self.topology.tp_rank == 0 else torch.zeros_like(mine)
        runs = self.graphs.take_runs() if self.graphs else []
        sums = torch.cat([mine, *(losses.new_full((1,), float(count)) for count in runs)])
        self.status.at("gradient norm")
        counted = self.copies.counted if self.copies else None
        norm = clip(self.model, self.clip, self.topology, also=sums, counted=counted)
        self.status.at("optimizer")
        set_lr(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        routed = counts.over_lanes(self.topology)
        update_bias(self.model, routed)
        layout = self.executor.layout
        experts = counts_of_all_stages(routed, self.model.config, layout, self.topology)
        summed, totals, graphed = sums.split([len(losses), len(rounds.totals), len(runs)])
        metrics = totals[2::2] / totals[3::2]
        untrained = ((totals[:1] == 0) & (totals[1:2] > 0)).double()
        return StepResult(summed, norm, graphed, experts, rounds, metrics, untrained)

    def gradients(
        self, batches: list[MicroBatch], divisor: float, *, plan: Plan | None = None
    ) -> tuple[Tensor, RoutingCounts, RoundResults]:
        """Forward and backward of every round; returns this rank's part of the losses."""
        with compared(self.topology.groups) if self.trace else nullcontext():
            return self._gradients(batches, divisor, plan=plan)

    def _gradients(
        self, batches: list[MicroBatch], divisor: float, *, plan: Plan | None
    ) -> tuple[Tensor, RoutingCounts, RoundResults]:
        device, terms = self.topology.device, 3 + len(self.model.config.mtp)
        each = [torch.zeros(terms, dtype=torch.float64, device=device) for _ in batches]
        faults: list[Faults | None] = [None] * len(batches)
        counts = RoutingCounts()
        inputs = step_inputs(self.loss, batches, self.executor, plan=plan, begin=self._note)

        def read(out: Output, batch: MicroBatch, stage: int) -> Tensor:
            has_head = self.executor.layout.stages[stage].head
            losses, fault = self.terms(out, batch, divisor, has_head=has_head, inputs=inputs)
            each[batch.round] += losses.detach()
            faults[batch.round] = fault or faults[batch.round]
            counts.add(out.routed, stage)
            return self.weighted(losses)

        queue = self.executor.queue(plan, rounds=len(batches))
        handlers = Handlers(
            prepare=self._on_device,
            read=read,
            begin=self._note,
            summed=self.loss.is_plain,
            reader=self.loss.reader(inputs),
        )
        times = self.executor.run(batches, queue, handlers)
        sum_gradients(self.model, self.topology)
        if self.copies is not None:
            self.copies.sum_gradients()
        total = torch.stack(each).sum(dim=0)
        assert inputs.totals is not None
        rounds = RoundResults(tuple(each), tuple(times), tuple(faults), inputs.totals)
        return total, counts, rounds

    def _on_device(self, host: MicroBatch) -> MicroBatch:
        batch = host.to(self.topology.device, non_blocking=True)
        return without_uncounted_labels(batch) if self.loss.is_plain else batch

    def _note(self, action: Action) -> None:
        self.status.at(action.kind, round=action.round + 1)

    @contextmanager
    def _memory_limit(self, batches: list[MicroBatch]) -> Iterator[None]:
        """Reports a GPU that is out of memory in one line."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            text = out_of_memory(error, self.status, batches, optimizer=self.optimizer)
            raise RunError(f"rank {self.topology.rank} {text}") from None

    def terms(
        self,
        out: Output,
        batch: MicroBatch,
        divisor: float,
        *,
        has_head: bool = True,
        inputs: StepInputs = NO_STEP,
    ) -> tuple[Tensor, Faults | None]:
        """A stage's part of each loss in a round, divided by the count of the full step."""
        wide = torch.promote_types(out.values.dtype, torch.float32)
        zero, faults = out.values.new_zeros((), dtype=wide), None
        main, depths = zero, [zero] * len(self.model.config.mtp)
        if has_head:
            total, faults = self.loss.summed(out.values, batch, inputs)
            main = total / divisor
            depths = [
                masked_sum(nll_T, _targets(depth)) / max(count, 1)
                for nll_T, depth, count in zip(out.mtp, batch.mtp, batch.counts.mtp, strict=True)
            ]
        balance = mixers = main.new_zeros(())
        for routed in out.routed:
            balance = balance + routed.auxiliary / max(batch.counts.tokens_at(routed.depth), 1)
        for loss in out.mixer_losses:
            mixers = mixers + loss.total / max(batch.counts.tokens_at(loss.depth), 1)
        return torch.stack([main, balance, mixers, *depths]), faults

    def weighted(self, losses: Tensor) -> Tensor:
        """The scalar loss to backpropagate."""
        depths = losses[3:]
        total = losses[:3].sum()
        return total + self.mtp_weight / len(depths) * depths.sum() if len(depths) else total


def _targets(depth: Depth) -> Targets:
    assert depth.targets is not None, "the stage with the head has the targets of all depths"
    return depth.targets
