"""A fault on one rank, at any place between two collectives of the data path, reaches all ranks."""

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from tests.ranks.harness import run_ranks
from tests.ranks.test_data_path import FIELDS, RandomSource, indexed, lane_stream, packing, planner

from longshore.data import exchange, lane_broadcast, loader, steps
from longshore.data.batches import Batches, BatchSize
from longshore.data.lengths import StepLengths
from longshore.data.steps import IndexedSteps, StreamedSteps
from longshore.distributed.topology import make_topology

STEPS = 2
# What a rank does by itself, in the order in which a step comes by.
INDEXED = (
    (Batches, "_open"),
    (IndexedSteps, "_sequences"),
    (IndexedSteps, "_counts"),
    (steps, "cut_shards"),
    (steps, "pack_step"),
    (loader, "_pinned"),
)
STREAMED = (
    (StreamedSteps, "_draw"),
    (steps, "length_rows"),
    (StepLengths, "sequences"),
    (steps, "cut_parcels"),
    (exchange, "_to_bytes"),
    (steps, "open_parcels"),
    (steps, "pack_step"),
    (loader, "_pinned"),
)
SHARED = (
    (StepLengths, "counts"),
    (lane_broadcast, "zero_batches"),
    (lane_broadcast, "_pipeline_messages"),
    (lane_broadcast, "for_stage"),
    (lane_broadcast, "_to_bytes"),
    (lane_broadcast, "_fill"),
    (loader, "_pinned"),
)


def fail(*_, **__):
    raise OSError("shard-00003.arrow: bad\udcff disk")


def error_of(made, *, patched=None):
    """What taking steps raises, or None."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(loader, "_pinned", lambda step: step))
        if patched is not None:
            stack.enter_context(mock.patch.object(*patched, fail))
        with loader.Loader(made, pin=True) as taken:
            try:
                for _ in range(STEPS):
                    next(taken)
            except (OSError, RuntimeError, ValueError) as error:
                return error
    return None


def streamed(topology, source, samples=None):
    stream = samples or lane_stream(source, topology.lanes, topology.lane, STEPS)
    return StreamedSteps(
        iter(stream) if topology.is_first_of_lane else None,
        planner=planner(topology.lanes),
        batch=BatchSize("sequences", 24),
        topology=topology,
        fields=FIELDS,
        packing=packing(topology.pp),
    )


def check(error, *, broken, rank):
    kind, message = (OSError, "bad") if rank == broken else (RuntimeError, f"rank {broken} failed")
    assert isinstance(error, kind), (rank, error)
    assert message in str(error)
    assert "disk" in str(error)


def every_fault(lanes, tp, pp):
    """The places at which a fault on rank 0, and one on rank 1, ended this rank."""
    topology = make_topology(lanes=lanes, tp=tp, pp=pp, device="cpu")
    source = RandomSource(48, longest=60)
    cases = [(streamed, case) for case in SHARED]
    if lanes > 1:
        cases = [(indexed, case) for case in INDEXED] + [(streamed, case) for case in STREAMED]
    ended = []
    for broken in (0, 1):
        for make, case in cases:
            patched = case if topology.rank == broken else None
            error = error_of(make(topology, source), patched=patched)
            if error is not None:
                check(error, broken=broken, rank=topology.rank)
                ended.append((broken, case[1]))
    topology.groups.close()
    return ended


def both(names, broken=(0, 1)):
    return [(rank, name) for rank in broken for name in names]


def test_a_fault_on_one_lane_ends_all_lanes_with_its_error():
    ended = both([name for _, name in (*INDEXED, *STREAMED)])
    assert run_ranks(2, every_fault, 2, 1, 1, timeout=180) == [ended, ended]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_fault_on_one_rank_of_a_lane_ends_them_all(tp, pp):
    """All that this rank does: the first makes no zero batches, and in a pipeline fills none."""
    first, second = run_ranks(2, every_fault, 1, tp, pp, timeout=180)
    assert first == second
    names = [name for _, name in SHARED]
    unused = {"zero_batches"} if tp > 1 else {"zero_batches", "_fill"}
    assert first == both([n for n in names if n not in unused], [0]) + both(names, [1])


def undeclared():
    """The case that was met: a field on lane 0 that nobody declared."""
    topology = make_topology(lanes=2, device="cpu")
    source = RandomSource(48, longest=60)
    samples = list(lane_stream(source, 2, topology.lane, STEPS))
    if topology.rank == 0:
        samples[3] = replace(samples[3], fields={**samples[3].fields, "score": np.zeros(())})
    error = error_of(streamed(topology, source, samples))
    topology.groups.close()
    return type(error).__name__, "field 'score' is not declared" in str(error)


def test_an_undeclared_field_on_one_lane_is_told_on_both():
    assert run_ranks(2, undeclared, timeout=120) == [("ValueError", True), ("PeerError", True)]
