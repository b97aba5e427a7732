"""A fault on one rank, at any place between two collectives of the data path, reaches all ranks.

A first run notes every function of the data path that making a step calls, on each rank. Then each
of them raises on one of the ranks that call it, and every rank has to end with that error.
"""

import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from unittest import mock
from zlib import crc32

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import settings
from tests.ranks.harness import run_ranks
from tests.ranks.test_data_path import FIELDS, RandomSource, lane_stream, packing

import longshore
from longshore.data import steps as loader
from longshore.data.source import BatchSize
from longshore.data.steps import IndexedSteps, StreamedSteps
from longshore.distributed.topology import Groups, Topology, make_topology
from longshore.plan import make_plan

OURS = Path(longshore.__file__).parent
FOLDERS = (f"{OURS}/data/", *(f"{OURS}/plan/{name}.py" for name in ("check", "shapes")))
# These communicate, or are the loop around those that do: between two collectives they only call
# what is in agreed(). Everything else may fail.
FRAMES = {
    "steps.py": {"from_place", "__init__", "agreed", "closed_on_error", "any_rank", "check_same"}
    | {"gather_rows_of_lanes", "_broadcast_in_lane", "close"}
    | {"__iter__", "__next__", "__enter__", "__exit__", "_run", "_put"},
    "exchange.py": {"exchange_shards"},
}
BATCH = BatchSize("sequences", 6)
STEPS = 2
LONGEST_S = 30.0  # the promise; a fault takes a fraction of a second to end all ranks


@dataclass
class Watch:
    """Counts the calls of the data path's functions in the first step; `broken` raises at one."""

    broken: tuple[str, str] | None = None
    at_call: int = 1
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    is_over: bool = False

    def __call__(self, frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(FOLDERS) or code.co_name[0] == "<":
            return
        name = (Path(code.co_filename).name, code.co_name)
        self.is_over |= name == ("steps.py", "_put")
        if self.is_over or code.co_name in FRAMES.get(name[0], ()):
            return
        self.calls[name] = self.calls.get(name, 0) + 1
        if name == self.broken and self.calls[name] == self.at_call:
            raise OSError("shard-00003.arrow: bad\udcff disk")


@contextmanager
def watched_by(watch, set_profile):
    set_profile(watch)
    try:
        yield
    finally:
        set_profile(None)


def error_of(make, watch=None):
    """What making steps and taking some raises, or None; the watch is also on the thread."""
    errors = (OSError, RuntimeError, ValueError, SystemExit, UnreadableError)
    try:
        with watched_by(watch, sys.setprofile):
            steps = make()
        with watched_by(watch, threading.setprofile), loader.Loader(steps, prefetch=1) as taken:
            for _ in range(STEPS):
                next(taken)
    except errors as error:
        return error
    return None


class KeptGroups(Groups):
    """Process groups that serve many loaders in turn, since making them takes longest."""

    def close(self):
        pass


@contextmanager
def on_ranks(lanes, tp, pp):
    """The topology, whose loaders share one set of groups."""
    topology = make_topology(lanes=lanes, tp=tp, pp=pp, device="cpu")
    host = topology.host_groups()
    kept = KeptGroups(**{name: getattr(host, name) for name in Groups.__slots__})
    with mock.patch.object(Topology, "host_groups", return_value=kept):
        yield topology
    host.close()
    topology.groups.close()


def planner(lanes):
    return partial(make_plan, lanes=lanes, capacity=64, policy="static", cp_size=lanes)


def indexed(topology, source):
    return IndexedSteps(
        source,
        planner=planner(topology.lanes),
        batch=BATCH,
        seed=1,
        topology=topology,
        packing=packing(topology.pp),
    )


def streamed(topology, source, samples=None, *, everywhere=False):
    if samples is None:
        samples = lane_stream(source, topology.lanes, topology.lane, STEPS, batch=BATCH.amount)
    return StreamedSteps(
        iter(samples) if everywhere or topology.is_first_of_lane else None,
        planner=planner(topology.lanes),
        batch=BATCH,
        topology=topology,
        fields=FIELDS,
        everywhere=everywhere,
        packing=packing(topology.pp),
    )


KINDS = {
    "indexed": indexed,
    "streamed": streamed,
    "everywhere": partial(streamed, everywhere=True),
}


def cases(watch, topology, part, *, every):
    """(function, rank, call) to break: every one, or for one function in three its last call.

    part: which third; then ranks take turns.
    """
    calls = [None] * topology.world_size
    dist.all_gather_object(calls, watch.calls)
    chosen = []
    for number, name in enumerate(sorted(set(chain.from_iterable(calls)))):
        if not every and crc32(" ".join(name).encode()) % 3 != part:
            continue
        ranks = [rank for rank, counts in enumerate(calls) if name in counts]
        for rank in ranks if every else [ranks[number % len(ranks)]]:
            last = calls[rank][name]  # what is called in two places fails in both
            chosen += [(name, rank, at) for at in (range(1, last + 1) if every else [last])]
    return chosen


def every_fault(kind, lanes, tp, pp, part, every):
    """How many faults were tried; each has ended this rank with its error."""
    with on_ranks(lanes, tp, pp) as topology:
        source = RandomSource(12, longest=60)
        make = partial(KINDS[kind], topology, source)
        watch = Watch()
        assert error_of(make, watch) is None
        chosen = cases(watch, topology, part, every=every)
        for name, rank, at in chosen:
            started = time.monotonic()
            error = error_of(make, Watch(name, at) if rank == topology.rank else None)
            kind, message = (OSError, "bad") if rank == topology.rank else (RuntimeError, "OSError")
            assert isinstance(error, kind), (name, rank, at, error)
            assert message in str(error), (name, rank, at, error)
            assert "shard-00003" in str(error), (name, rank, at, error)
            assert time.monotonic() - started < LONGEST_S, (name, rank, at)
        return [name for (_, name), _, _ in chosen]


THIRDS = (
    ("indexed", 2, 1, 2, 0),
    ("streamed", 2, 1, 2, 1),
    ("streamed", 2, 2, 1, 2),
    ("streamed", 1, 1, 3, 0),
    ("everywhere", 2, 2, 1, 1),
)


@pytest.mark.fuzz
@pytest.mark.parametrize(("kind", "lanes", "tp", "pp", "part"), THIRDS)
def test_a_fault_anywhere_on_one_rank_ends_all_with_its_error(kind, lanes, tp, pp, part):
    every, ranks = settings.get_current_profile_name() == "fuzz", lanes * tp * pp
    args = (kind, lanes, tp, pp, part, every)
    names, *others = run_ranks(ranks, every_fault, *args, timeout=3000 if every else 120)
    assert others == [names] * (ranks - 1)
    assert len(set(names)) >= (50 if every else 15)


class UnreadableError(Exception):
    def __str__(self):
        raise KeyError("text")


def undeclared(samples):
    samples[4] = replace(samples[4], fields={**samples[4].fields, "score": np.zeros(())})
    return samples


def too_short(samples):
    fields = samples[4].fields
    samples[4] = replace(samples[4], fields={**fields, "old_logp": fields["old_logp"][1:]})
    return samples


def raising(error, samples):
    yield from samples[:4]  # of the second step
    raise error


DATA = {
    "undeclared": (undeclared, ValueError, "field 'score' is not declared"),
    "too short": (too_short, ValueError, "field 'old_logp' has shape"),
    "cut off": (partial(raising, OSError("line 17 is cut off")), OSError, "line 17 is cut off"),
    "exit": (partial(raising, SystemExit("no more data")), SystemExit, "no more data"),
    "unreadable": (partial(raising, UnreadableError()), UnreadableError, "cannot be read"),
}


def bad_data(tp, pp):
    """For each case of DATA, the error on this rank."""
    with on_ranks(2, tp, pp) as topology:
        broken = topology.rank_at(lane=1)
        source, ended = RandomSource(12, longest=60), []
        for change, _, _ in DATA.values():
            samples = list(lane_stream(source, 2, topology.lane, STEPS, batch=BATCH.amount))
            samples = change(samples) if topology.rank == broken else samples
            error = error_of(partial(streamed, topology, source, samples))
            text = "" if isinstance(error, UnreadableError) else str(error)
            ended.append((type(error).__name__, text))
        return topology.rank == broken, ended


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1)])
def test_bad_data_on_one_lane_is_told_on_all(tp, pp):
    for is_broken, ended in run_ranks(4, bad_data, tp, pp, timeout=120):
        for (name, text), (_, kind, message) in zip(ended, DATA.values(), strict=True):
            assert name == (kind.__name__ if is_broken else "PeerError")
            assert message in text or (is_broken and kind is UnreadableError)


def bad_settings():
    """What the constructors raise where rank 3 differs, and a loader of different plans."""
    with on_ranks(2, 1, 2) as topology:
        source, is_other = RandomSource(12, longest=60), topology.rank == 3
        packed = packing(2)
        shorter = replace(packed, buckets=(64,))
        unfitting = replace(packed, layout=packing(1).layout)
        make = partial(IndexedSteps, source, planner=planner(2), batch=BATCH, seed=1)
        stream = partial(StreamedSteps, planner=planner(2), batch=BATCH, packing=packed)
        samples = iter(()) if topology.is_first_of_lane or is_other else None
        errors = [
            error_of(partial(make, topology=topology, packing=shorter if is_other else packed)),
            error_of(partial(make, topology=topology, packing=unfitting if is_other else packed)),
            error_of(partial(stream, samples, topology=topology, fields=FIELDS)),
        ]
        return [str(error) for error in errors]


def test_settings_that_differ_between_ranks_are_told_before_the_first_step():
    for rank, (differ, layout, samples) in enumerate(run_ranks(4, bad_settings)):
        assert (
            "2 different versions of the data settings: ranks 0, 1 and 2 against rank 3" in differ
        )
        assert "needs a layout for them; Packing has one of 1 ranks, 2 depths" in layout
        assert "rank 3: `samples` is given, but with everywhere=False only the first" in samples
        assert ("rank 3 failed" in layout) == (rank != 3)
