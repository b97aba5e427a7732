"""Packs that travel while others are attended to: what is begun when, on gloo ranks."""

from functools import partial

import torch
import torch.distributed as dist
from tests.ranks.exchanged import count
from tests.ranks.harness import run_ranks
from tests.ranks.spine import batches_of, dense, exact, lanes_of, make_samples, sharded
from tests.ranks.test_exactness import check, several_packs
from tests.ranks.test_mla import LATENT

from longshore.distributed import collectives
from longshore.parallel.fsdp import begin_round

LAYERS = 2


def begun() -> tuple[bool, ...]:
    """Two gathers and a sum begun before the first is waited for, against the plain calls."""
    world = dist.group.WORLD
    x = torch.arange(6.0).view(3, 2) + 10 * dist.get_rank()
    wide = torch.arange(12.0).view(6, 2) * (1 + dist.get_rank())
    with count() as counts:
        first = collectives.begin_gather(x, world)
        second = collectives.begin_gather(x.T, world)
        third = collectives.begin_reduce_scatter(wide, world)
    plain = [
        collectives.gather(x, world),
        collectives.gather(x.T, world),
        collectives.reduce_scatter(wide, world),
    ]
    pairs = zip((third, second, first), reversed(plain), strict=True)
    assert [kind for kind, _ in counts.log] == ["gather", "gather", "reduce_scatter"]
    return tuple(torch.equal(pending.wait(), value) for pending, value in pairs)


def test_begun_collectives_bring_what_the_plain_ones_do() -> None:
    assert run_ranks(2, begun) == [(True,) * 3] * 2
    assert run_ranks(1, begun_alone) == [True]


def begun_alone() -> bool:
    x = torch.ones(2, 3)
    with count() as counts:
        same = collectives.begin_gather(x, dist.group.WORLD).wait() is x
        same &= collectives.begin_reduce_scatter(x, dist.group.WORLD).wait() is x
    return same and not counts.log


def calls_of(config, **ways) -> list[tuple[list[int], list[str], list[str]]]:
    """Of each round: the sizes of the lane's shared packs, and what is called both ways."""
    plan = several_packs()
    rounds = []
    with lanes_of(4) as (topology, groups):
        model = sharded(config, topology, groups, exact(mode="none", **ways))
        for batch in batches_of(plan, make_samples(plan), topology.lane):
            with count() as forward:
                nll = model(batch.token_ids, batch.ctx, batch.targets.labels).values
            begin_round(model, mode="none", is_last=False)  # FSDP sums no gradients
            with count() as backward:
                nll.sum().backward()
            sizes = [p.group.cp_size for p in batch.ctx.packs if p.group.cp_size > 1]
            logs = [[kind for kind, _ in c.log] for c in (forward, backward)]
            rounds.append((sizes, *logs))
    return rounds


def test_gathers_of_all_packs_are_begun_before_the_first_sum() -> None:
    for config in (dense(2), LATENT):
        for rounds in run_ranks(4, partial(calls_of, config, attention="gather")):
            for sizes, forward, backward in rounds:
                gathers, sums = ["gather"] * len(sizes), ["reduce_scatter"] * len(sizes)
                assert forward == gathers * LAYERS
                assert backward == (gathers + sums) * LAYERS
        assert rounds[0][0] == [4, 2]


def test_a_lane_without_shared_packs_begins_nothing() -> None:
    for lane, rounds in enumerate(run_ranks(4, partial(calls_of, dense(2), attention="gather"))):
        if lane < 2:
            assert rounds[1] == ([], [], [])


def test_packs_over_heads_come_before_gathered_ones() -> None:
    # 4 KV heads of 8: heads at CP size 4, gather at CP size 2.
    for rounds in run_ranks(4, partial(calls_of, dense(4))):
        sizes, forward, backward = rounds[0]
        assert sizes == [4, 2]
        assert forward == ["all_to_all", "all_to_all", "gather"] * LAYERS
        assert backward == ["gather", "reduce_scatter", "all_to_all", "all_to_all"] * LAYERS


def test_both_ways_in_one_micro_batch_as_alone() -> None:
    check(4, [(dense(4), several_packs(), exact(mode="zero3", attention="auto"))])
