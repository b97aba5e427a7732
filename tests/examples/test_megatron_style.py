"""Megatron's fields, by name and meaning, from plans on four ranks with an iterator each."""

import importlib.util
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from examples import megatron_style as example
from tests.ranks.harness import run_ranks

from longshore import CPGroups, make_topology

# PackedSeqParams of megatron-core 0.16.1, in its order.
FIELDS = (
    "qkv_format",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "max_seqlen_q",
    "max_seqlen_kv",
    "local_cp_size",
    "cp_group",
)
LANES, BATCH, CAPACITY = 4, 32, 256


def steps_of_rank(policy):
    topology = make_topology(lanes=LANES, device="cpu")
    with CPGroups(topology, (1, 2, 4)) as groups:
        steps = example.planned_steps(
            example.draw(topology.lane, 16),
            topology=topology,
            groups=groups,
            capacity=CAPACITY,
            batch=BATCH,
            policy=policy,
        )
        return [as_plain(step) for step in steps]


def as_plain(step):
    """What can be sent to the test: a group as its size."""
    rounds = []
    for each in step.rounds:
        group = each.packed["cp_group"]
        rounds.append((each.batch, {**each.packed, "cp_group": group.size()}))
    numbers = step.num_microbatches, step.real_tokens, step.sum_squared_lengths, step.loss_tokens
    return rounds, numbers


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(LANES, steps_of_rank, "dynamic")


def drawn_lengths(step):
    """Lengths of all lanes' samples of a step: of 16 each, 8 in each step."""
    per_lane = [list(example.draw(lane, 16)) for lane in range(LANES)]
    return [len(s.tokens) for lane in per_lane for s in lane[8 * step : 8 * step + 8]]


def test_all_lanes_agree_on_what_the_schedule_wants_to_know(ranks):
    assert len(ranks[0]) == 2
    for number in range(2):
        lengths = drawn_lengths(number)
        (numbers,) = {rank[number][1] for rank in ranks}
        assert {len(rank[number][0]) for rank in ranks} == {numbers[0]}
        assert numbers[1:3] == (sum(lengths), sum(length**2 for length in lengths))
        assert numbers[3] == sum(lengths) - len(lengths)


def test_fields_have_the_names_of_megatron_core(ranks):
    packed = ranks[0][0][0][0][1]
    assert tuple(packed) == FIELDS
    if importlib.util.find_spec("megatron") is not None:
        core = pytest.importorskip("megatron.core.packed_seq_params")
        assert {field.name for field in fields(core.PackedSeqParams)} >= set(FIELDS)
        assert core.PackedSeqParams(**packed).qkv_format == "thd"


def test_boundaries_are_those_of_whole_sequences(ranks):
    """Each lane's tensors are a CP size's share of the padded pack, and lengths are all there."""
    sizes, lengths = set(), []
    for lane, rank in enumerate(ranks):
        for batch, packed in rank[0][0]:
            size = packed["local_cp_size"]
            sizes.add(size)
            real, padded = packed["cu_seqlens_q"].diff(), packed["cu_seqlens_q_padded"].diff()
            assert packed["cu_seqlens_q"].dtype == torch.int32
            assert torch.equal(packed["cu_seqlens_kv"], packed["cu_seqlens_q"])
            assert torch.equal(packed["cu_seqlens_kv_padded"], packed["cu_seqlens_q_padded"])
            assert (padded % (2 * size if size > 1 else 1) == 0).all()
            assert packed["max_seqlen_q"] == packed["max_seqlen_kv"] == int(padded.max())
            assert packed["cp_group"] == size
            assert {tuple(t.shape) for t in batch.values()} == {(1, int(padded.sum()) // size)}
            if lane % size == 0:  # the first lane of its group
                lengths += [length for length in real.tolist() if length]
    assert sizes > {1}
    assert sorted(lengths) == sorted(drawn_lengths(0))


def test_every_label_counts_once(ranks):
    for number in range(2):
        counted = sum(batch["loss_mask"].sum() for r in ranks for batch, _ in r[number][0])
        assert counted == ranks[0][number][1][3]


@pytest.mark.parametrize("axes", [{"tp": 2, "pp": 1}, {"tp": 1, "pp": 2}])
def test_tp_and_pp_are_refused(axes):
    topology = SimpleNamespace(lanes=2, **axes)
    steps = example.planned_steps(
        iter(()), topology=topology, groups=None, capacity=CAPACITY, batch=BATCH
    )
    with pytest.raises(ValueError, match=f"tp {axes['tp']} and pp {axes['pp']}, .* use tp 1 and"):
        next(steps)


def test_mixed_is_refused():
    with pytest.raises(ValueError, match="PackedSeqParams carries one CP group; use dynamic, "):
        example.check_policy("mixed")
