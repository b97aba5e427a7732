import pickle
from dataclasses import FrozenInstanceError, dataclass
from typing import NamedTuple

import pytest
import torch
from tests.data.plans import make_samples, pack_all, plan_of
from tests.data.stage_batch import only

from longshore.batch import Counts, MicroBatch, whole_context
from longshore.data.pack import lane_context
from longshore.plan import Pack, Round
from longshore.plan.layout import StageInputs

CONTEXT = {"ctx.positions", "ctx.sequence_index", "ctx.is_real", "ctx.lengths"}
CONTEXT |= {f"ctx.packs.{i}.{part}.cu_seqlens" for i in range(2) for part in ("real", "padded")}
CONTEXT |= {f"ctx.packs.0.zigzag.{part}.cu_seqlens" for part in ("local", "chunks")}
CONTEXT |= {"ctx.packs.0.zigzag.to_natural", "ctx.packs.0.zigzag.to_shards"}
CONTEXT |= {"ctx.packs.0.zigzag.visible.cu_seqlens", "ctx.packs.0.zigzag.visible_rows"}
TARGETS = {"targets.labels", "targets.loss_mask"}
DEPTHS = {f"mtp.{d}.{name}" for d in range(2) for name in ("token_ids", *TARGETS)}
DEPTH_IDS = {f"mtp.{d}.token_ids" for d in range(2)}
FIELDS = {"token_fields.weight", "token_fields.advantage", "sequence_fields.sample_id"}


def make_batch() -> MicroBatch:
    rounds = [Round((Pack(0, 2, (0,), 4), Pack(0, 1, (1,), 3))), Round(())]
    plan = plan_of([7, 3], rounds, lanes=2, align=8)
    return pack_all(plan, make_samples(plan), depths=2)[0][0]


def same(a: MicroBatch, b: MicroBatch) -> bool:
    ours, theirs = a.to_tensors(), b.to_tensors()
    host = [(m.lane, m.round, m.rounds, m.counts, m.ctx.sequences, m.ctx.tokens) for m in (a, b)]
    packs = [
        [(p.group, p.rows, p.first_sequence, p.lengths, p.padded.offsets) for p in m.ctx.packs]
        for m in (a, b)
    ]
    equal = [
        ours[k].dtype == theirs[k].dtype and torch.equal(ours[k], theirs[k])
        for k in ours.keys() & theirs.keys()
    ]
    return list(ours) == list(theirs) and host[0] == host[1] and packs[0] == packs[1] and all(equal)


def test_names_every_tensor_once() -> None:
    batch = make_batch()
    tensors = batch.to_tensors()
    assert tensors.keys() == CONTEXT | {"token_ids"} | TARGETS | DEPTHS | FIELDS
    assert tensors["token_ids"] is batch.token_ids
    tokens = {"ctx.positions", "ctx.sequence_index", "ctx.is_real", "token_ids"} | TARGETS | DEPTHS
    assert {tensors[name].shape for name in tokens} == {(8,)}
    assert {tensors[name].dtype for name in tokens} == {torch.int64, torch.bool}


@pytest.mark.parametrize("first", [True, False])
def test_travels_as_a_skeleton_and_tensors(first: bool) -> None:
    first_stage = {"token_ids", "depth_ids"}
    needed = first_stage if first else set(StageInputs.__slots__) - first_stage
    batch = only(
        make_batch(), StageInputs(**{name: name in needed for name in StageInputs.__slots__})
    )
    skeleton = pickle.loads(pickle.dumps(batch.skeleton()))
    tensors = skeleton.to_tensors()
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    sent = batch.to_tensors()
    received = {name: torch.empty_like(t, device="cpu") for name, t in tensors.items()}
    for name, tensor in received.items():
        tensor.copy_(sent[name])
    assert same(MicroBatch.from_tensors(skeleton, received), batch)


def test_moving_leaves_the_original_alone() -> None:
    batch = make_batch()
    moved = batch.to("meta", non_blocking=True)
    assert {t.device.type for t in moved.to_tensors().values()} == {"meta"}
    assert {t.device.type for t in batch.to_tensors().values()} == {"cpu"}
    assert same(batch.to("cpu"), batch)
    ctx = batch.ctx.to("meta")
    assert ctx.packs[0].zigzag.to_natural.device.type == "meta"
    assert ctx.packs[0].lengths == batch.ctx.packs[0].lengths


def test_pins_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.data_ptr())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = make_batch()
    assert same(batch.pin_memory(), batch)
    assert pinned == [tensor.data_ptr() for tensor in batch.to_tensors().values()]


def test_refuses_tensors_of_another_micro_batch() -> None:
    batch = make_batch()
    tensors = batch.to_tensors()
    less = {name: tensor for name, tensor in tensors.items() if name != "token_ids"}
    with pytest.raises(ValueError, match="tensor token_ids is missing"):
        MicroBatch.from_tensors(batch.skeleton(), less)
    with pytest.raises(ValueError, match="tensor other is not in the skeleton"):
        MicroBatch.from_tensors(batch.skeleton(), tensors | {"other": torch.zeros(1)})
    for wrong in (torch.zeros(7, dtype=torch.int64), torch.zeros(8, dtype=torch.int32)):
        with pytest.raises(
            ValueError, match=r"tensor token_ids is .* says torch.int64 of shape \(8,\)"
        ):
            MicroBatch.from_tensors(batch.skeleton(), tensors | {"token_ids": wrong})


def test_is_frozen_and_has_no_room_for_more() -> None:
    batch = make_batch()
    with pytest.raises(FrozenInstanceError):
        batch.lane = 3
    for part in (batch, batch.ctx, batch.ctx.packs[0], batch.targets, batch.mtp[0], batch.counts):
        assert not hasattr(part, "__dict__")


def test_the_context_of_whole_sequences() -> None:
    ctx = whole_context([2, 3])
    assert (ctx.tokens, ctx.real_tokens, ctx.sequences) == (5, 5, (0, 1))
    assert ctx.positions.tolist() == [0, 1, 0, 1, 2]
    assert ctx.sequence_index.tolist() == [0, 0, 1, 1, 1]
    assert (ctx.lengths.tolist(), bool(ctx.is_real.all())) == ([2, 3, 1], True)
    (pack,) = ctx.packs
    assert (pack.padded.offsets, pack.padded.longest, pack.zigzag) == ((0, 2, 5), 3, None)
    with pytest.raises(ValueError, match="give at least one, each of 1 or more"):
        whole_context([3, 0])


def test_ahead_leaves_out_the_tokens_that_have_none_so_far_on() -> None:
    """Lane 0 of two: positions 0 1 6 7 of a sequence of 7, a whole one of 3, and padding."""
    packs = (Pack(0, 2, (0,), 4), Pack(0, 1, (1,), 3))
    ctx = lane_context(plan_of([7, 3], [Round(packs)], lanes=2, align=8), 0, 0)
    assert ctx.sequence_index.tolist() == [0, 0, 0, 2, 1, 1, 1, 2]
    one, three = ctx.ahead(1), ctx.ahead(3)
    assert one.sequence_index.tolist() == [0, 0, 2, 2, 1, 1, 2, 2]
    assert one.is_real.tolist() == [True, True, False, False, True, True, False, False]
    assert one.lengths.tolist() == [6, 2, 1]
    assert three.sequence_index.tolist() == [0, 0, *[2] * 6]
    assert three.lengths.tolist() == [4, 1, 1]
    assert one.packs is ctx.packs
    assert one.positions is ctx.positions


def test_counts_of_a_step() -> None:
    """Sequences of 5, 1 and 2 tokens: 8, at depth 1 those of 4, 0 and 1, at depth 2 3, 0 and 0."""
    counts = Counts.of([6, 4, 2], [5, 1, 2])
    assert counts == Counts(main=6, mtp=(4, 2), tokens=8, sequences=3, mtp_tokens=(5, 3))
    assert [counts.tokens_at(depth) for depth in range(3)] == [8, 5, 3]


class Pair(NamedTuple):
    first: int
    second: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Inner:
    rows: torch.Tensor
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Outer:
    inner: Inner
    parts: tuple[Inner, ...]
    count: int


def test_tables_of_all_kinds_travel() -> None:
    batch = make_batch()
    numbers = torch.arange(5)
    inner = Inner(numbers, (3, 2))
    tables = batch.ctx.packs[0].padded.tables
    tables["alone"] = numbers
    tables["nested, of 4"] = {"below": Outer(inner, (inner, inner), 4)}
    tables["tuple"] = (3, numbers)
    tables["named"] = Pair(3, numbers)
    tables["nothing"] = None
    paths = [path for path in batch.to_tensors() if ".tables." in path]
    below = "ctx.packs.0.padded.tables."
    nested = [f"{below}nested, of 4.below.{name}.rows" for name in ("inner", "parts.0", "parts.1")]
    assert paths == [f"{below}alone", *nested, f"{below}tuple.1", f"{below}named.1"]

    skeleton = pickle.loads(pickle.dumps(batch.skeleton()))
    assert all(tensor.is_meta for tensor in skeleton.to_tensors().values())
    copy = MicroBatch.from_tensors(skeleton, batch.to_tensors())
    assert same(copy, batch)
    arrived = copy.ctx.packs[0].padded.tables
    assert arrived["nested, of 4"]["below"].parts[1].steps == (3, 2)
    assert isinstance(arrived["named"], Pair)
    assert arrived["nothing"] is None
    assert arrived is not tables
    assert copy.ctx.ahead(1).packs[0].padded.tables is arrived
