"""Recordings of what ranks issue: complete, the same order on all ranks, and no deadlock."""

from collections import Counter
from functools import cache

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.ranks.harness import run_ranks
from tests.ranks.hybrids import deepseek, hybrid
from tests.ranks.piped import deep, stage_batches, staged
from tests.ranks.spine import MTP_WEIGHT, dense, exact, make_samples
from tests.ranks.test_sparse_attention import MODEL as SPARSE
from torch.distributed.fsdp import fully_shard

from longshore.distributed import collectives
from longshore.distributed.recording import (
    KINDS,
    DeadlockError,
    MismatchError,
    Operation,
    check_recordings,
    compared,
    recorded,
)
from longshore.distributed.topology import CPGroups, make_topology
from longshore.parallel.pipeline import Executor
from longshore.plan import Pack, Plan, Round, make_plan
from longshore.plan.layout import make_order, one_stage, parse_layout
from longshore.plan.simulate import Queue, message_of
from longshore.train.losses import make_loss
from longshore.train.step import Stepper

Recordings = list[list[Operation]]
BROKEN = (DeadlockError, MismatchError)


def odd_packs() -> Plan:
    """CP sizes 4, 3, 2 and 1; sequences so short that halos come from several lanes."""
    first = Round((Pack(0, 4, (0, 1), 12), Pack(0, 3, (2,), 4), Pack(2, 1, (3,), 5)))
    second = Round((Pack(0, 3, (4, 5), 8), Pack(0, 2, (6,), 4)))
    third = Round((Pack(3, 1, (7,), 6),))
    lengths = [33, 3, 9, 5, 2, 13, 7, 6]
    plan = make_plan(lengths, lanes=4, capacity=64, cp_sizes="any")
    return Plan(plan.setting, plan.sequences, (first, second, third), plan.stats, "by hand")


def record(axes: dict[str, int], cases) -> list[list[Operation]]:
    """What this rank issues in a step of each case: (config, layout or "", plan or None, choices).

    In groups of any size up to the lanes.
    """
    recordings = []
    for config, text, plan, choices in cases:
        topology = make_topology(**axes, device="cpu")
        with CPGroups(topology, range(1, topology.lanes + 1)) as groups:
            layers, depths = len(config.layers), len(config.mtp)
            layout = one_stage(layers=layers, depths=depths)
            if text:
                layout = parse_layout(text, pp=topology.pp, layers=layers, depths=depths)
            plan = plan or make_plan(
                [3, 40, 17, 5, 60, 2, 40],
                lanes=topology.lanes,
                capacity=32,
                pp=topology.pp,
                vpp=layout.vpp,
                tp=topology.tp,
            )
            model = staged(config, layout, topology, groups, choices)
            stepper = Stepper(model, None, topology, choices.mode, make_loss(), 0.0, MTP_WEIGHT)
            batches = stage_batches(plan, make_samples(plan), topology, layout)
            with recorded() as recording:
                stepper.gradients(batches, max(1, batches[0].counts.main), plan=plan)
            recordings.append(recording)
    return recordings


@cache
def all_axes() -> Recordings:
    """2 lanes × tp 2 × pp 2 with two stages a rank, ep 4: delta net, Mamba2, attention, experts."""
    case = (hybrid(experts=8), "Et|tt|m|L", None, exact(mode="zero3", recompute="blocks"))
    axes = {"lanes": 2, "tp": 2, "pp": 2, "ep": 4}
    return [rank[0] for rank in run_ranks(8, record, axes, [case])]


@cache
def shared_packs() -> Recordings:
    """4 lanes that share packs of 4, 3 and 2 lanes."""
    case = (dense(4), "", odd_packs(), exact(mode="zero2", attention="gather"))
    return [rank[0] for rank in run_ranks(4, record, {"lanes": 4}, [case])]


def test_every_operator_of_torch_that_has_a_group_is_recorded() -> None:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("c10d::")]
    schemas = [torch._C._get_schema(name, "") for name in names]
    of_groups = {s.name.removeprefix("c10d::") for s in schemas if "ProcessGroup" in str(s)}
    assert of_groups - KINDS.keys() == {"monitored_barrier_", "recv_any_source_"}


def issue_by_hand() -> list[str]:
    """Collectives of FSDP, of torch and of ours, a message, and what a group of one rank does."""
    topology = make_topology(lanes=2, device="cpu")
    world, rank = topology.groups.world, topology.rank
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2, bias=False))
    for part in (*model, model):
        fully_shard(part)
    rows = torch.ones(2 + rank, 3, requires_grad=True)
    with recorded() as outer:
        model(torch.ones(3, 4)).sum().backward()
        with recorded() as inner:
            sizes = {"sends": (1, 1), "receives": (1, 1)} if rank == 0 else {}
            sizes = sizes or {"sends": (1, 2), "receives": (1, 2)}
            collectives.all_to_all(rows, world, **sizes).sum().backward()
        dist.barrier(group=world)
        collectives.sum_over(torch.ones(5, dtype=torch.int32), world)
        collectives.sum_over(torch.ones(5), topology.groups.tp)
        work = dist.isend(rows.detach()[0], 1) if rank == 0 else dist.irecv(torch.ones(3), 0)
        work.wait()
    dist.all_reduce(torch.ones(1))
    assert [o for o in outer if o.kind == "all_to_all"] == inner
    topology.close()
    return [f"{o.kind} {o.group} {o.bytes}" for o in outer]


def test_a_recording_by_hand() -> None:
    first, second = run_ranks(2, issue_by_hand)
    gathers = [f"gather (0, 1) {amount}" for amount in (40, 16, 16, 40)]
    sums = [f"reduce_scatter (0, 1) {amount}" for amount in (16, 40)]
    assert sorted(first[:6]) == sorted(gathers + sums)
    assert first[6:8] == ["all_to_all (0, 1) 12"] * 2
    assert second[6:8] == ["all_to_all (0, 1) 12"] * 2
    assert first[9:] == ["all_reduce (0, 1) 20", "send (0, 1) 12"]
    assert second == [*first[:-1], "receive (0, 1) 12"]


def test_a_recording_has_every_axis() -> None:
    """Those of FSDP, shared packs, TP, EP and the pipeline, on one rank in one order."""
    everything = all_axes()
    kinds = Counter((o.kind, o.group) for o in everything[0] if o.where)
    assert {kind for kind, group in kinds if group == (0, 2)} >= {
        "gather",  # zero3's parameters
        "reduce_scatter",
        "all_to_all",  # packs of two lanes
    }
    assert {kind for kind, group in kinds if group == (0, 1)} >= {"gather", "reduce_scatter"}
    assert {kind for kind, group in kinds if group == (0, 1, 2, 3)} >= {"all_to_all"}
    assert {kind for kind, group in kinds if group in ((0, 4), (4, 0))} >= {"send", "receive"}
    assert len(everything) == 8
    assert min(map(len, everything)) > 200


@pytest.mark.parametrize("recordings", [all_axes, shared_packs])
def test_the_ranks_of_a_step_run_to_the_end(recordings) -> None:
    check_recordings(recordings())


@pytest.mark.fuzz
def test_every_mixer_mode_and_recomputation_runs_to_the_end(is_fuzz: bool) -> None:
    if not is_fuzz:
        pytest.skip("in `make fuzz`; samples are above and in `composed`")
    cases = [
        (config, "", odd_packs(), exact(mode=mode, recompute=recompute))
        for config in (hybrid(), deepseek(), SPARSE)
        for mode in ("zero3", "zero2", "none")
        for recompute in ("none", "blocks")
    ]
    for each in zip(*run_ranks(4, record, {"lanes": 4}, cases, timeout=400.0), strict=True):
        check_recordings(each)


def changed(recordings: Recordings, rank: int, mine: list[Operation]) -> Recordings:
    return [*recordings[:rank], mine, *recordings[rank + 1 :]]


def swapped(mine: list[Operation], one: int, other: int) -> list[Operation]:
    """Two operations at each other's places; places keep their batches of messages."""
    result = list(mine)
    result[one], result[other] = mine[other], mine[one]
    if mine[one].batch and mine[other].batch:
        for place in (one, other):
            result[place] = result[place]._replace(batch=mine[place].batch)
    return result


@pytest.mark.property
@given(st.data(), st.sampled_from([all_axes, shared_packs]))
def test_two_operations_swapped_on_one_rank_are_noticed(data: st.DataObject, recordings) -> None:
    """Wherever the operations that some other rank has part in change their order.

    Neighbours whose groups share only this rank may change places: that is a legal order.
    """
    everything = recordings()
    rank = data.draw(st.integers(0, len(everything) - 1))
    mine = everything[rank]
    one = data.draw(st.integers(0, len(mine) - 2))
    other = data.draw(st.integers(one + 1, len(mine) - 1) | st.just(one + 1))
    assume(not mine[one].batch or mine[one].batch != mine[other].batch)
    wrong = swapped(mine, one, other)
    peers = [peer for peer in range(len(everything)) if peer != rank]
    if any(seen_by(peer, mine) != seen_by(peer, wrong) for peer in peers):
        with pytest.raises(BROKEN, match=rf"rank {rank} at its operation \d+"):
            check_recordings(changed(everything, rank, wrong))
    elif not any(operation.batch for operation in mine[one : other + 1]):
        check_recordings(changed(everything, rank, wrong))


def seen_by(peer: int, operations: list[Operation]) -> list[tuple]:
    """What matters to another rank of those that it has part in."""
    seen = []
    for o in operations:
        if peer in o.group:
            at = o.group.index(peer)
            sizes = (o.sends[at], o.receives[at]) if o.sends else (o.bytes,)
            seen.append((o.kind, o.group, o.where, *sizes))
    return seen


@pytest.mark.property
@given(st.data(), st.sampled_from([all_axes, shared_packs]))
def test_another_size_on_one_rank_is_noticed(data: st.DataObject, recordings) -> None:
    everything = recordings()
    rank = data.draw(st.integers(0, len(everything) - 1))
    mine = list(everything[rank])
    place = data.draw(st.integers(0, len(mine) - 1))
    operation = mine[place]
    mine[place] = operation._replace(bytes=operation.bytes + 4)
    if operation.kind == "all_to_all":
        peer = data.draw(st.integers(0, len(operation.group) - 1))
        parts = list(operation.sends)
        parts[peer] += 4
        mine[place] = operation._replace(sends=tuple(parts))
    with pytest.raises(MismatchError, match=rf"rank {rank} at its operation {place}: "):
        check_recordings(changed(everything, rank, mine))


@pytest.mark.property
@given(st.data(), st.sampled_from([all_axes, shared_packs]))
def test_a_missing_operation_is_noticed(data: st.DataObject, recordings) -> None:
    everything = recordings()
    rank = data.draw(st.integers(0, len(everything) - 1))
    mine = everything[rank]
    place = data.draw(st.integers(0, len(mine) - 1))
    with pytest.raises(BROKEN):
        check_recordings(changed(everything, rank, [*mine[:place], *mine[place + 1 :]]))


def one_at_a_time(executor: Executor, plan: Plan, *, rounds: int) -> Queue:
    """Receives just before they are needed, sends right after their action, each by itself."""
    layout, stages = executor.layout, len(executor.layout.stages)
    order = make_order(rounds, pp=layout.pp, vpp=layout.vpp)
    messages = [
        message
        for actions in order
        for action in actions
        if (message := message_of(action, pp=layout.pp, stages=stages)) is not None
    ]
    needed = {message.needed_by: (message,) for message in messages}
    sent = {message.action: (message,) for message in messages}
    return tuple(
        entry
        for action in order[executor.topology.pp_rank]
        for entry in (needed.get(action), action, sent.get(action))
        if entry is not None
    )


def record_both_queues(text: str) -> list[list[Operation]]:
    """A step with the executor's own queue, then one with messages one at a time."""
    layers = text.count("t")
    plan = make_plan(
        [8] * 8, lanes=1, capacity=24, pp=2, vpp=parse_layout(text, pp=2, layers=layers).vpp
    )
    case = (deep(layers), text, plan, exact(mode="none"))
    right = record({"lanes": 1, "pp": 2}, [case])
    Executor.queue = one_at_a_time
    return right + record({"lanes": 1, "pp": 2}, [case])


@pytest.mark.parametrize("text", ["Et|tL", "Et|t|t|tL"])
def test_messages_one_at_a_time_deadlock(text: str) -> None:
    """gloo does not wait for sends, so such a step ends there."""
    right, wrong = zip(*run_ranks(2, record_both_queues, text), strict=True)
    check_recordings(right)
    with pytest.raises(DeadlockError, match=r"ranks wait forever\nrank 0 at its operation \d+: "):
        check_recordings(wrong)


def test_the_order_of_packs_on_one_lane_matters() -> None:
    everything = shared_packs()
    places = [n for n, o in enumerate(everything[0]) if o.group in ((0, 1, 2, 3), (0, 1, 2))]
    at = next(
        n for n in places if everything[0][n + 1].group == (0, 1, 2) != everything[0][n].group
    )
    mine = swapped(everything[0], at, at + 1)
    with pytest.raises(DeadlockError) as error:
        check_recordings(changed(everything, 0, mine))
    lines = str(error.value).splitlines()
    assert lines[0] == "4 of 4 ranks wait forever"
    assert lines[1].startswith(f"rank 0 at its operation {at}: gather (0, 1, 2) of ")
    assert lines[2].startswith(f"rank 1 at its operation {at}: gather (0, 1, 2, 3) of ")


def disagree(how: str) -> str:
    """What each of two ranks is told, where gloo itself goes on."""
    topology = make_topology(lanes=2, device="cpu")
    rank, world, other = topology.rank, topology.groups.world, dist.new_group()
    tensors = [(torch.ones(2), world), (torch.ones(3), other)]

    def issue() -> None:
        if how == "order":
            pairs = reversed(tensors) if rank else tensors
            for begun in [collectives.begin_gather(*pair) for pair in pairs]:
                begun.wait()
        elif rank == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.ones(4), 0)

    with pytest.raises((ValueError, RuntimeError)) as error, compared(topology.groups):
        issue()
    topology.close()
    return str(error.value)


def test_ranks_that_disagree_are_named_on_all_ranks() -> None:
    for text in run_ranks(2, disagree, "order"):
        assert "rank 0 at its operation 0: gather (0, 1) of 8 bytes" in text
        assert "rank 1 at its operation 0: gather (0, 1) of 12 bytes" in text
    for text in run_ranks(2, disagree, "size"):
        assert "rank 0 at its operation 0: send 0 → 1 of 12 bytes in message 0" in text
        assert "rank 1 at its operation 0: receive 0 → 1 of 16 bytes in message 0" in text


def test_an_error_lists_few_ranks() -> None:
    pairs = [Operation("barrier", (rank, rank ^ 1), 0, "") for rank in range(20)]
    with pytest.raises(DeadlockError, match=r"^10 of 20 ranks wait forever\n(rank .*\n){8}and 2 m"):
        check_recordings([[pair] if rank % 2 else [] for rank, pair in enumerate(pairs)])
