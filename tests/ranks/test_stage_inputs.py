"""What each rank of a pipeline gets, reads and sends, wherever multi-token prediction lies."""

from contextlib import ExitStack
from dataclasses import asdict, replace
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from tests.data.stage_batch import only
from tests.ranks.harness import run_ranks
from tests.ranks.test_data_path import (
    FIELDS,
    PACKING,
    RandomSource,
    assert_same,
    contents,
    lane_stream,
    planner,
    take,
)

from longshore.batch import Counts
from longshore.data import steps
from longshore.data.pack import count_targets, cut_shards, cut_tokens, lane_cuts, pack_step
from longshore.data.source import BatchSize, Place
from longshore.data.steps import IndexedSteps, StreamedSteps
from longshore.distributed.topology import make_topology
from longshore.plan.layout import parse_layout
from longshore.plan.shapes import route

BATCH = BatchSize("sequences", 12)
ID_BYTES = 4
LOSS_BYTES = 3 * 4 + 3 * 1 + 4 + 8
"""Of a token at the last stage: labels and masks of the main loss and 2 depths, and its fields."""
SEQUENCE_BYTES = 8
"""Of the field of a sequence."""


def packed(text, pp):
    letters = text.replace("|", "")
    layout = parse_layout(text, pp=pp, layers=letters.count("t"), depths=letters.count("m"))
    return replace(PACKING, depths=letters.count("m"), layout=layout)


def all_steps(topology, source, packing):
    """The steps of both classes, the second with data on the first rank of a lane and on all."""
    common = {"planner": planner(topology.lanes), "batch": BATCH, "topology": topology}
    yield IndexedSteps(source, seed=1, packing=packing, **common)
    for everywhere in (False, True):
        samples = lane_stream(source, topology.lanes, topology.lane, 1, batch=BATCH.amount)
        yield StreamedSteps(
            samples if everywhere or topology.is_first_of_lane else None,
            fields=FIELDS,
            everywhere=everywhere,
            packing=packing,
            **common,
        )


def restricted(step, source, lane, inputs, depths):
    """The full micro-batches of a lane, with what a rank reads."""
    plan = step.plan
    samples = dict(enumerate(step_samples(step, source)))
    labels = np.sum([count_targets(s.loss_mask, depths) for s in samples.values()], axis=0)
    counts = Counts.of(labels.tolist(), [s.length for s in samples.values()])
    shards = cut_shards(plan, samples, lane_cuts(plan, lane), depths=depths, fields=FIELDS)
    full = pack_step(plan, lane, shards, counts=counts, buckets=(32, 64), pad_id=3)
    return [only(batch, inputs) for batch in full]


def step_samples(step, source):
    """In the order of the plan; ids are places of the step with streams, of the source without."""
    ids = [int(sequence.id) for sequence in step.plan.sequences]
    if ids == list(range(len(ids))):
        return list(lane_stream(source, 1, 0, 1, batch=BATCH.amount))
    return [source[i] for i in ids]


def every_layout(lanes, pp, layouts):
    topology = make_topology(lanes=lanes, pp=pp, device="cpu")
    source = RandomSource(24, longest=60)
    for text in layouts:
        packing = packed(text, pp)
        inputs = packing.layout.inputs(topology.pp_rank)
        for made in all_steps(topology, source, packing):
            step = take(made, 1)[0]
            depths = packing.depths
            expected = restricted(step, source, topology.lane, inputs, depths)
            assert_same(contents(step), [batch.to_tensors() for batch in expected])
            for batch, same in zip(step.batches, expected, strict=True):
                assert batch.counts == same.counts
                assert len(batch.mtp) == len(same.mtp)
    topology.groups.close()
    return {name for name, needed in asdict(inputs).items() if needed}


EMBEDDING, DEPTHS = {"token_ids"}, {"depth_ids"}
LOSS = {"targets", "depth_targets", "token_fields", "sequence_fields"}


@pytest.mark.parametrize(
    ("lanes", "pp", "layouts", "inputs"),
    [
        (2, 2, ("Ett|L", "Ettmm|L", "Et|tm|m|L"), [EMBEDDING | DEPTHS, LOSS | DEPTHS]),
        (1, 4, ("E|tt|mm|L", "E|t|tmm|L", "E|t|t|t|t|m|m|L"), [EMBEDDING, DEPTHS, DEPTHS, LOSS]),
    ],
)
def test_each_rank_gets_the_full_micro_batches_restricted_to_what_it_reads(
    lanes, pp, layouts, inputs
):
    """inputs: by pipeline rank, what is read in the last layout."""
    by_rank = run_ranks(lanes * pp, every_layout, lanes, pp, layouts)
    assert by_rank == [names for names in inputs for _ in range(lanes)]


class Recorder:
    """Bytes of tokens that a rank sends and receives, by the name of the call."""

    def __init__(self):
        self.sent, self.received = {}, {}

    def around_delivery(self, stack):
        """Counts while sequences are delivered, and not while lengths are gathered."""
        deliver = steps.exchange_shards

        def counted(exchange, groups):
            with ExitStack() as inner:
                for name in ("send", "recv", "all_to_all_single", "broadcast"):
                    call = mock.patch.object(dist, name, self.wrapped(name, getattr(dist, name)))
                    inner.enter_context(call)
                return deliver(exchange, groups)

        stack.enter_context(mock.patch.object(steps, "exchange_shards", counted))

    def wrapped(self, name, call):
        def record(*args, **options):
            one = args[0].numel()
            sent, received = {"send": (one, 0), "recv": (0, one)}.get(name, (one, one))
            if name == "all_to_all_single":
                sent, received = args[1].numel(), one
            self.sent[name], self.received[name] = sent, received
            return call(*args, **options)

        return record


def bytes_of_tokens():
    """Of one step on 2 lanes and 3 stages, with the sequence tokens that lanes send each other."""
    topology = make_topology(lanes=2, pp=3, device="cpu")
    source = RandomSource(24, longest=60)
    recorder = Recorder()
    with ExitStack() as stack:
        recorder.around_delivery(stack)
        _, streamed, _ = all_steps(topology, source, packed("E|tt|mmL", 3))
        step = take(streamed, 1)[0]
    routes = route(step.plan, [0] * 6 + [1] * 6)
    pairs = [[routes[a, b] for b in range(2)] for a in range(2)]
    tokens = [[int(cut_tokens(step.plan, cuts).sum()) for cuts in row] for row in pairs]
    shards = [[len(cuts) for cuts in row] for row in pairs]
    topology.groups.close()
    return recorder.sent, recorder.received, tokens, shards


def test_a_stage_that_reads_no_tokens_sends_and_receives_none():
    results = run_ranks(6, bytes_of_tokens)
    for lane in range(2):
        first, middle, last = (results[stage * 2 + lane] for stage in range(3))
        assert middle[:2] == ({}, {})
        tokens, shards = np.array(first[2]), np.array(first[3])
        assert tokens.min() > 0
        loss = tokens * LOSS_BYTES + shards * SEQUENCE_BYTES
        sent, received = (tokens.sum(axis=axis)[lane] * ID_BYTES for axis in (1, 0))
        own = loss.sum(axis=1)[lane]
        assert first[0] == {"send": own, "all_to_all_single": sent}
        assert first[1] == {"send": 0, "all_to_all_single": received}
        assert last[0] == {"recv": 0, "all_to_all_single": own}
        assert last[1] == {"recv": own, "all_to_all_single": loss.sum(axis=0)[lane]}


class CountingSource(RandomSource):
    """Counts whole sequences that are read; the first tokens of a mask are not."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)

    def mask_head(self, index, count):
        return super().__getitem__(index).loss_mask[:count]


def reads():
    topology = make_topology(lanes=1, pp=3, device="cpu")
    source = CountingSource(24, longest=60)
    source.reads = 0
    indexed, *_ = all_steps(topology, source, packed("E|tt|mmL", 3))
    step = next(indexed.from_place(Place(), lambda: False))
    indexed.close()
    topology.groups.close()
    return source.reads, len(step.plan.sequences)


def test_a_stage_that_reads_no_tokens_reads_no_sequence():
    assert run_ranks(3, reads) == [(12, 12), (0, 12), (12, 12)]
