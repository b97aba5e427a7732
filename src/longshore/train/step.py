"""One optimizer step: the rounds of a plan, then one update, then the numbers it left.

In: a model on its lanes, the lane's micro-batches, a loss. Out: the step's losses and gradient
norm, still on the device, and from them a StepReport once the device has them. Every lane runs
every round. Each loss sum is divided by the count of the full step before backward, and gradients
are summed over lanes and rounds, so the update is that of all sequences together, however they were
packed. A step without a loss token is skipped, on all lanes alike.

    2 lanes × 2 rounds with loss sums 3, 5 and 2, 6 over 8 loss tokens: loss (3 + 5 + 2 + 6) / 8 = 2

With experts or depths of multi-token prediction, and mixers that have a loss of their own, it is

    main / loss tokens + (balance + mixers) / tokens
    + mtp_weight / depths · Σ depth_d / its loss tokens
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import AdamW

from longshore.batch import MicroBatch
from longshore.data.source import PAIR
from longshore.data.steps import Step
from longshore.distributed.collectives import agreed, sum_over
from longshore.distributed.recording import compared
from longshore.distributed.topology import Topology
from longshore.model.interface import Output
from longshore.parallel.pipeline import (
    EmbeddingCopies,
    Executor,
    Handlers,
    Model,
    Timed,
    Timestamp,
)
from longshore.parallel.tensor import sum_gradients
from longshore.plan.graph_use import GRAPH_WAYS
from longshore.plan.layout import Action, Kind
from longshore.plan.types import Plan
from longshore.settings import ShardMode
from longshore.train.cuda_graph import GraphedLayers
from longshore.train.device import out_of_memory, peak_memory
from longshore.train.display import StepMetrics
from longshore.train.evaluation import reshard
from longshore.train.loss import (
    NO_STEP,
    Faults,
    Loss,
    LossResult,
    SequenceSums,
    StepInputs,
    checked_result,
    logprobs_of,
    masked_sum,
    sequences_of,
    without_uncounted_labels,
)
from longshore.train.optimizer import RoutingCounts, clip, counts_of_all_stages, update_bias
from longshore.train.supervision import RankStatus, RunError

GIB = 2**30


def step_inputs(
    loss: Loss,
    batches: Sequence[MicroBatch],
    executor: Executor,
    *,
    plan: Plan | None,
    begin: Callable[[Action], None],
) -> StepInputs:
    """What the loss reads of the step; all ranks call it together.

    A loss of whole sequences, such as DPO's, takes two passes over the rounds, exact under any
    plan. The first, without gradient, sums the log-probabilities S of every sequence over tokens,
    rounds and lanes. Then the loss f(S) and its derivatives c = ∂f/∂S are known, and the second
    pass trains

        Σ over sequences n and their loss tokens t of   c_n·logprob_t + (f_n − c_n·S_n) / tokens_n

    whose gradient is that of f, and whose value is f itself. With S = −2 and −3 of a pair and
    f = −log σ(S₀ − S₁) = 0.313, the slopes are −0.269 and 0.269.
    """
    call, topology = loss.call, executor.topology
    size = 2 + 2 * len(loss.metrics)
    totals = torch.zeros(size, dtype=torch.float64, device=topology.device)
    if call is None or not (call.of_sequences or "sequence_tokens" in call.names):
        return StepInputs(totals=totals)
    if not call.of_sequences:
        return StepInputs(sequence_tokens=_loss_tokens(batches, topology), totals=totals)
    columns, names = _first_pass(loss, batches, executor, plan=plan, begin=begin)
    with agreed(topology.groups):
        if batches[0].targets is None:
            return StepInputs(totals=totals)  # this rank of a pipeline has no head
        logprobs_N, tokens_N, *others = columns
        sums = SequenceSums(
            logprobs_N.clone().requires_grad_(), tokens_N, dict(zip(names, others, strict=True))
        )
        result = _result(loss, sums, batches[0])
        if topology.lane == 0:  # all lanes have all sequences
            StepInputs(totals=totals).add(result, sums.tokens > 0, is_trained=True)
        slopes_N, offsets_N = _second_pass_terms(result[0], sums)
    return StepInputs(slopes=slopes_N, offsets=offsets_N, totals=totals)


def _result(loss: Loss, sums: SequenceSums, batch: MicroBatch) -> LossResult:
    """The loss of every sequence."""
    call = loss.call
    assert call is not None
    if not bool((sums.tokens > 0).all()):
        raise ValueError(
            f"train.loss={loss.name}: sequence {int((sums.tokens == 0).nonzero()[0])} of the step "
            "has no loss token, so it has no log-probability; leave it out of the data"
        )
    every = {"sequences": sums, "counts": batch.counts}
    with torch.enable_grad():
        result = call.function(**{name: every[name] for name in call.names}, **call.options)
    return checked_result(result, call.metrics, rows=len(sums.tokens), of="sequence")


def _second_pass_terms(values_N: Tensor, sums: SequenceSums) -> tuple[Tensor, Tensor]:
    logprobs_N, slopes_N = sums.logprobs.detach(), torch.zeros_like(sums.tokens)
    if values_N.requires_grad:
        (slopes_N,) = torch.autograd.grad(
            values_N.sum(), sums.logprobs, allow_unused=True, materialize_grads=True
        )
    return slopes_N, (values_N.detach() - slopes_N * logprobs_N) / sums.tokens


def _loss_tokens(batches: Sequence[MicroBatch], topology: Topology) -> Tensor:
    """float64 (N): counted on the host, without waiting for the device."""
    counts = torch.zeros(batches[0].counts.sequences + 1, dtype=torch.float64)
    for batch in batches:
        if batch.targets is not None:
            counts.index_add_(0, sequences_of(batch), batch.targets.loss_mask.double())
    return sum_over(counts[:-1].to(topology.device), topology.groups.lanes)


def _first_pass(
    loss: Loss,
    batches: Sequence[MicroBatch],
    executor: Executor,
    *,
    plan: Plan | None,
    begin: Callable[[Action], None],
) -> tuple[list[Tensor], list[str]]:
    """Sums over all lanes, 2 + K of shape (N), and the names of the K fields.

    Log-probabilities, loss tokens, then the fields; zeros where a rank has no head. All are float64
    but for `pair`: it may be a hash of 64 bits, of which float64 would make one number of several.
    """
    topology, first = executor.topology, batches[0]
    per_token = sorted(name for name, v in first.token_fields.items() if v.ndim == 1)
    fields = {name: v for name, v in first.sequence_fields.items() if v.ndim == 1}
    exact = [name for name, v in fields.items() if name == PAIR and not v.is_floating_point()]
    per_sequence = sorted(fields.keys() - set(exact))
    names = [*per_token, *per_sequence]
    sizes = (first.counts.sequences + 1, 2 + len(names))
    table = torch.zeros(sizes, dtype=torch.float64, device=topology.device)
    whole = torch.zeros((sizes[0], len(exact)), dtype=torch.int64, device=topology.device)

    def read(out: Output, batch: MicroBatch, stage: int) -> Tensor:
        if executor.layout.stages[stage].head:
            _add_tokens(table, logprobs_of(out.values), batch, per_token)
            _set_sequences(table[:, 2 + len(per_token) :], batch, per_sequence)
            _set_sequences(whole, batch, exact)
        return table

    handlers = Handlers(
        prepare=lambda host: host.to(topology.device, non_blocking=True),
        read=read,
        begin=begin,
        reader=loss.reader(StepInputs()),
    )
    queue = executor.queue(plan, rounds=len(batches), backward=False)
    with torch.no_grad():
        executor.run(batches, queue, handlers)
    reshard(executor)
    sums = sum_over(table, topology.groups.lanes)[:-1].unbind(1)
    if exact:
        sums += sum_over(whole, topology.groups.lanes)[:-1].unbind(1)
    return list(sums), [*names, *exact]


def _add_tokens(table: Tensor, logprobs_T: Tensor, batch: MicroBatch, names: list[str]) -> None:
    assert batch.targets is not None
    mask_T = batch.targets.loss_mask
    columns = [logprobs_T, mask_T, *(batch.token_fields[name] for name in names)]
    rows = torch.stack([torch.where(mask_T, column.double(), 0.0) for column in columns], dim=1)
    table[:, : rows.shape[1]].index_add_(0, sequences_of(batch), rows)


def _set_sequences(table: Tensor, batch: MicroBatch, names: list[str]) -> None:
    """Written by the first lane of each pack: those that share it have the same values."""
    for pack in batch.ctx.packs:
        here = pack.sequences
        if pack.group.cp_rank == 0 and names and here.stop > here.start:
            places = torch.tensor(batch.ctx.sequences[here], device=table.device)
            columns = [batch.sequence_fields[name][here].to(table.dtype) for name in names]
            table[places] = torch.stack(columns, dim=1)


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
    """Updates the model's parameters."""
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
    """Copies of the embedding on several stages; None without a pipeline."""
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
        try:
            result = self._step(batches, lr, plan=plan)
        except torch.OutOfMemoryError as error:
            text = out_of_memory(error, self.status, batches, optimizer=self.optimizer)
            raise RunError(f"rank {self.topology.rank} {text}") from None
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
        for group in self.optimizer.param_groups:
            group["lr"] = lr
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
        if self.topology.tp > 1:
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

    def terms(
        self,
        out: Output,
        batch: MicroBatch,
        divisor: float,
        *,
        has_head: bool = True,
        inputs: StepInputs = NO_STEP,
    ) -> tuple[Tensor, Faults | None]:
        """A stage's part of each loss in a round, divided by the count of the full step.

        Losses of a depth's experts and mixer are divided by the tokens that this depth sees.
        """
        wide = torch.promote_types(out.values.dtype, torch.float32)
        zero, faults = out.values.new_zeros((), dtype=wide), None
        main, depths = zero, [zero] * len(self.model.config.mtp)
        if has_head:
            total, faults = self.loss.summed(out.values, batch, inputs)
            main = total / divisor
            depths = [
                masked_sum(nll_T, depth.targets) / max(count, 1)
                for nll_T, depth, count in zip(out.mtp, batch.mtp, batch.counts.mtp, strict=True)
                if depth.targets is not None  # as on every stage with the head
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


@dataclass(frozen=True, slots=True, eq=False)
class QueuedStep:
    """A step that was queued; its numbers may still be on their way from the device."""

    step: Step
    """Its micro-batches and plan."""
    lr: float
    """The learning rate of its update."""
    result: StepResult | None
    """None for a skipped step."""
    numbers: Tensor
    """On the host, see _on_host; valid once `end` was reached."""
    begin: Timestamp
    """Before its first round."""
    end: Timestamp
    """After its update."""

    @property
    def number(self) -> int:
        return self.step.place.step + 1


@dataclass(frozen=True, slots=True, eq=False)
class StepReport:
    """A step, and what this rank measured of it."""

    step: Step
    """Its plan, its micro-batches and its place in the run."""
    metrics: StepMetrics
    """What is shown and recorded."""
    rounds_s: tuple[float, ...]
    """Seconds of each round; () for a skipped step."""
    experts: tuple[tuple[int, ...], ...]
    """Tokens routed to each expert over all lanes, by MoE layer; () for a skipped step."""
    stages: tuple[tuple[int, float, float], ...] = ()
    """For each stage of this rank its number, the seconds of its forwards and of its backwards."""


def queue_step(stepper: Stepper, step: Step, lr: float, *, begin: Timestamp) -> QueuedStep:
    """Runs the step, and starts the copy of its numbers to the host. begin: taken before it."""
    result = stepper.step(step.batches, lr, plan=step.plan)
    numbers = _on_host(result)
    end = Timestamp(stepper.topology.device)  # after the copy, so that it tells of its end too
    return QueuedStep(step, lr, result, numbers, begin, end)


def _on_host(result: StepResult | None) -> Tensor:
    """In float64: whether the loss has no gradient, the norm, layers by what served them, the
    loss's metrics, losses, expert counts; the copy is started, not awaited."""
    if result is None:
        return torch.empty(0)
    first = [result.without_gradient, result.grad_norm.view(1), result.graphed]
    numbers = torch.cat([*first, result.loss_metrics, result.losses, *result.experts]).double()
    if numbers.device.type != "cuda":
        return numbers
    host = torch.empty_like(numbers, device="cpu", pin_memory=True)
    return host.copy_(numbers, non_blocking=True)


def read_step(
    queued: QueuedStep, stepper: Stepper, *, flops: float, peak_flops: float | None = None
) -> StepReport:
    """Waits for the step and reads its numbers; its time includes waiting for its data.

    flops: of the step on all ranks. peak_flops: of one rank, per second; None if unknown.
    """
    queued.end.wait()
    topology, graphs = stepper.topology, stepper.graphs
    experts = _experts(queued)
    losses = len(queued.numbers) - sum(map(len, experts))
    values = iter(queued.numbers[1:losses].tolist())
    norm = next(values, None)
    ways = GRAPH_WAYS if graphs and queued.result else ()
    graphed: dict[str, int] = {way: int(next(values)) for way in ways}
    names = stepper.loss.metrics
    own = {
        name: value if math.isfinite(value) else None
        for name, value in zip(names, values, strict=False)
    }
    loss, balance, index, *depths = [*values] or (None,) * 3
    elapsed = queued.end.since(queued.begin)
    step, plan = queued.step, queued.step.plan
    counts, each = step.batches[0].counts, flops / elapsed / topology.world_size
    metrics = StepMetrics(
        step=queued.number,
        epoch=step.place.epoch,
        loss=loss,
        loss_tokens=counts.main,
        tokens=counts.tokens,
        sequences=counts.sequences,
        grad_norm=norm,
        lr=queued.lr,
        elapsed_s=elapsed,
        tokens_per_s=counts.tokens / elapsed,
        tflops=each / 1e12,
        mfu=each / peak_flops if peak_flops else None,
        rounds=len(plan.rounds),
        efficiency=plan.stats.efficiency,
        padding=plan.stats.padding,
        plan_s=plan.stats.planning_seconds,
        data_wait_s=step.wait_seconds,
        memory_gib=peak_memory(topology.device) / GIB,
        skipped=queued.result is None,
        balance_loss=balance or None,
        index_loss=index or None,
        mtp_losses=tuple(depths) or None,
        loss_metrics=own or None,
        graphed=graphed or None,
        graph_gib=graphs.bytes / GIB if graphs else None,
    )
    rounds_s, stages = _times(queued)
    return StepReport(step, metrics, rounds_s, experts, stages)


def check_gradient(queued: QueuedStep, loss: str) -> None:
    """Ends a run whose loss function trains nothing; the numbers are the same on all ranks."""
    if queued.result is not None and queued.numbers[0]:
        raise RunError(
            f"step {queued.number}: train.loss={loss} returned values without a gradient, so "
            "nothing would be trained; compute them from what it gets, without detach(), item(), "
            "torch.no_grad() or whole numbers"
        )


def _experts(queued: QueuedStep) -> tuple[tuple[int, ...], ...]:
    if queued.result is None or not queued.result.experts:
        return ()
    sizes = [len(layer) for layer in queued.result.experts]
    layers = queued.numbers[-sum(sizes) :].long().split(sizes)
    return tuple(tuple(layer.tolist()) for layer in layers)


def _times(
    queued: QueuedStep,
) -> tuple[tuple[float, ...], tuple[tuple[int, float, float], ...]]:
    """Seconds that this rank worked on each round, and on each of its stages."""
    if queued.result is None:
        return (), ()
    rounds = [0.0] * len(queued.step.batches)
    stages: dict[int, dict[Kind, float]] = {}
    for timed in queued.result.rounds.times:
        seconds, action = timed.end.since(timed.begin), timed.action
        rounds[action.round] += seconds
        stage = stages.setdefault(action.stage, {"forward": 0.0, "backward": 0.0})
        stage[action.kind] += seconds
    each = ((n, stage["forward"], stage["backward"]) for n, stage in sorted(stages.items()))
    return tuple(rounds), tuple(each)
