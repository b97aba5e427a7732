"""Plan, exchange and pack around an existing iterator per lane, for a Megatron-style trainer.

In: on each DP × CP rank (a lane) its own iterator of tokenized samples. Out: for each optimizer
step this lane's micro-batches, each with the arguments of megatron-core's PackedSeqParams, and what
Megatron's schedule wants to know: the number of micro-batches, real tokens, sum of squared lengths.

    steps = planned_steps(samples, topology=topology, groups=groups, capacity=8192, batch=64)
    for step in steps:
        forward_backward_func(data_iterator=iter(step.rounds),
                              num_microbatches=step.num_microbatches, …)

Try it: torchrun --nproc-per-node 4 examples/megatron_style.py

A sequence of 7 tokens on 2 lanes, then one of 3 beside it at the same CP size:

    cu_seqlens_q 0 7 10      cu_seqlens_q_padded 0 8 12      max_seqlen_q 8      local_cp_size 2

Both boundaries are those of the whole sequences, as Transformer Engine wants them; the tensors of a
lane are its two zigzag chunks of each, 6 tokens here. PackedSeqParams carries one CP group, so
policies that put packs of several CP sizes into one micro-batch, as `mixed` does, are refused. So
are TP and PP: with TP a lane's tokens are padded to a multiple of it, which may need a pack of its
own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from longshore import (
    BatchSize,
    CPGroups,
    MicroBatch,
    PackContext,
    Place,
    Step,
    StreamedSteps,
    TokenizedSample,
    Topology,
    make_plan,
    make_topology,
    policy_named,
    policy_names,
)


@dataclass(frozen=True)
class MegatronRound:
    """One micro-batch of this lane."""

    batch: dict[str, Tensor]
    """tokens, labels, loss_mask, position_ids: (1, T) each, as get_batch returns them."""
    packed: dict[str, Any]
    """The arguments of PackedSeqParams: `PackedSeqParams(**packed)`."""


@dataclass(frozen=True)
class MegatronStep:
    """One optimizer step of this lane."""

    rounds: list[MegatronRound]
    """In their order; every lane has the same number."""
    num_microbatches: int
    """Rounds of the plan."""
    real_tokens: int
    """Over all lanes, without padding."""
    sum_squared_lengths: int
    """Over all sequences, for the FLOPs of attention."""
    loss_tokens: int
    """Over all lanes and rounds: divide the summed loss by it, and average nothing afterwards."""


def planned_steps(
    samples: Iterator[TokenizedSample],
    *,
    topology: Topology,
    groups: CPGroups,
    capacity: int,
    batch: int,
    policy: str = "dynamic",
) -> Iterator[MegatronStep]:
    """All ranks call it together. batch: sequences of a step, over all lanes."""
    check_axes(tp=topology.tp, pp=topology.pp)
    check_policy(policy)
    planner = partial(make_plan, lanes=topology.lanes, capacity=capacity, policy=policy)
    size = BatchSize("sequences", batch)
    steps = StreamedSteps(samples, planner=planner, batch=size, topology=topology)
    try:
        for step in steps.from_place(Place(), stop=lambda: False):
            yield as_megatron(step, groups)
    finally:
        steps.close()


def check_axes(*, tp: int, pp: int) -> None:
    if tp > 1 or pp > 1:
        raise ValueError(
            f"the topology has tp {tp} and pp {pp}, and this example is for ranks that are one "
            "lane each; use tp 1 and pp 1, or Longshore's own training, which has both"
        )


def check_policy(policy: str) -> None:
    if not policy_named(policy).one_pack_per_lane:
        usable = policy_names(lambda each: each.one_pack_per_lane)
        raise ValueError(
            f"the policy {policy} may put packs of several CP sizes into one micro-batch, and "
            f"PackedSeqParams carries one CP group; use {', '.join(usable)}"
        )


def as_megatron(step: Step, groups: CPGroups) -> MegatronStep:
    stats = step.plan.stats
    return MegatronStep(
        rounds=[MegatronRound(tensors(b), packed_seq_params(b, groups)) for b in step.batches],
        num_microbatches=len(step.plan.rounds),
        real_tokens=stats.tokens,
        sum_squared_lengths=stats.sum_squared_lengths,
        loss_tokens=step.batches[0].counts.main,
    )


def tensors(batch: MicroBatch) -> dict[str, Tensor]:
    assert batch.token_ids is not None
    assert batch.targets is not None
    flat = {
        "tokens": batch.token_ids,
        "labels": batch.targets.labels.clamp(min=0),  # Megatron masks them instead
        "loss_mask": batch.targets.loss_mask.float(),
        "position_ids": batch.ctx.positions,
    }
    return {name: tensor.unsqueeze(0) for name, tensor in flat.items()}


def packed_seq_params(batch: MicroBatch, groups: CPGroups) -> dict[str, Any]:
    """The fields of PackedSeqParams, by name and meaning."""
    pack = only_pack(batch)
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": pack.real.cu_seqlens,
        "cu_seqlens_kv": pack.real.cu_seqlens,
        "cu_seqlens_q_padded": pack.padded.cu_seqlens,
        "cu_seqlens_kv_padded": pack.padded.cu_seqlens,
        "max_seqlen_q": pack.padded.longest,
        "max_seqlen_kv": pack.padded.longest,
        "local_cp_size": pack.group.cp_size,
        "cp_group": groups.group(pack.group.first_lane, pack.group.cp_size),
    }


def only_pack(batch: MicroBatch) -> PackContext:
    """The pack of a micro-batch; a lane without work has one of padding."""
    first, *others = batch.ctx.packs
    if others:
        sizes = [pack.group.cp_size for pack in batch.ctx.packs]
        raise ValueError(
            f"round {batch.round}, lane {batch.lane}: it has packs of CP sizes {sizes}, and "
            "PackedSeqParams carries one CP group; plan with one pack for each lane, and align=1"
        )
    return first


def draw(lane: int, count: int) -> Iterator[TokenizedSample]:
    """A lane's own data: here random tokens of very different lengths."""
    random = np.random.default_rng(lane)
    for number in range(count):
        tokens = random.integers(0, 64, int(random.lognormal(4.0, 1.3)) + 2).astype(np.int32)
        yield TokenizedSample(number, tokens, np.ones(len(tokens), bool))


def main() -> None:
    dist.init_process_group("gloo")
    lanes = dist.get_world_size()
    topology = make_topology(lanes=lanes, device="cpu")
    sizes = [size for size in (1, 2, 4, 8) if size <= lanes]
    with CPGroups(topology, sizes) as groups:
        steps = planned_steps(
            draw(topology.lane, 16), topology=topology, groups=groups, capacity=512, batch=32
        )
        for number, step in enumerate(steps):
            cp_sizes = [each.packed["local_cp_size"] for each in step.rounds]
            print(
                f"step {number}, lane {topology.lane}: {step.num_microbatches} micro-batches of CP "
                f"sizes {cp_sizes}; in all {step.real_tokens} tokens"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
