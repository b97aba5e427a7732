"""What a loss reads of whole sequences, although lanes and rounds hold parts of them.

In: a loss, the lane's micro-batches of a step, the executor. Out: StepInputs, by sequence.

`sequence_tokens` is counted on the host and summed over the lanes. A loss of whole sequences, such
as DPO's, takes two passes over the rounds, exact under any plan. The first, without gradient, sums
the log-probabilities S of every sequence over tokens, rounds and lanes. Then the loss f(S) and its
derivatives c = ∂f/∂S are known, and the second pass trains

    Σ over sequences n and their loss tokens t of   c_n·logprob_t + (f_n − c_n·S_n) / tokens_n

whose gradient is that of f, and whose value is f itself. With S = −2 and −3 of a pair and f = −log
σ(S₀ − S₁) = 0.313, the slopes are −0.269 and 0.269.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longshore.batch import MicroBatch
from longshore.data.source import PAIR
from longshore.distributed.agreement import agreed
from longshore.distributed.collectives import sum_over
from longshore.distributed.topology import Topology
from longshore.model.interface import Output
from longshore.parallel.pipeline.executor import Executor, Handlers
from longshore.plan.order import Action
from longshore.plan.types import Plan
from longshore.train.evaluation import reshard
from longshore.train.loss import Loss
from longshore.train.loss_inputs import LossResult, SequenceSums, StepInputs, checked_result


def step_inputs(
    loss: Loss,
    batches: Sequence[MicroBatch],
    executor: Executor,
    *,
    plan: Plan | None,
    begin: Callable[[Action], None],
) -> StepInputs:
    """What the loss reads of the step; all ranks call it together."""
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
        slopes_N, offsets_N = _second_pass_terms(result.values, sums)
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
            counts.index_add_(0, places_of(batch), batch.targets.loss_mask.double())
    return sum_over(counts[:-1].to(topology.device), topology.groups.lanes)


def places_of(batch: MicroBatch) -> Tensor:
    """int64 (T): the place in the plan of each token's sequence; N for padding."""
    sequences = batch.counts.sequences
    places = torch.tensor([*batch.ctx.sequences, sequences], device=batch.ctx.sequence_index.device)
    return places[batch.ctx.sequence_index]


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
            _add_tokens(table, _logprobs(out.values), batch, per_token)
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


def _logprobs(values: Tensor) -> Tensor:
    """From the nll of tokens (T), or their statistics (T, 4)."""
    return -values if values.ndim == 1 else values[:, 0]


def _add_tokens(table: Tensor, logprobs_T: Tensor, batch: MicroBatch, names: list[str]) -> None:
    assert batch.targets is not None
    mask_T = batch.targets.loss_mask
    columns = [logprobs_T, mask_T, *(batch.token_fields[name] for name in names)]
    rows = torch.stack([torch.where(mask_T, column.double(), 0.0) for column in columns], dim=1)
    table[:, : rows.shape[1]].index_add_(0, places_of(batch), rows)


def _set_sequences(table: Tensor, batch: MicroBatch, names: list[str]) -> None:
    """By the first lane of each pack: those that share it have the same values."""
    for pack in batch.ctx.packs:
        here = pack.sequences
        if pack.group.cp_rank == 0 and names and here.stop > here.start:
            places = torch.tensor(batch.ctx.sequences[here], device=table.device)
            columns = [batch.sequence_fields[name][here].to(table.dtype) for name in names]
            table[places] = torch.stack(columns, dim=1)
