"""What a run decides about CUDA graphs: buckets, the cap on sequences, memory. No torch.

In: a config with its capacity, the decoder, the lanes and all lengths of the data. Out: the
GraphSetting that plan/graph_use.py reads, and notes for people. For graph.max_sequences=auto, some
of the run's steps are planned in advance, evenly spaced over the first epoch:

    graph.max_sequences: 24 serves 95 % of 512 sampled micro-batches with one unshared pack; …

Which steps depends on the data and the configuration alone, so all ranks decide alike.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from longshore.arch.decoder import DecoderConfig
from longshore.config.check import lane_align, planner_options
from longshore.config.schema import GraphConfig, RunConfig
from longshore.data.batches import Batches, Place
from longshore.plan.cost import Ints
from longshore.plan.graph_use import (
    BUCKETS,
    GraphSetting,
    MicroBatchSizes,
    needs_buckets,
    steady_cap,
)
from longshore.plan.planner import make_plan
from longshore.plan.types import Plan
from longshore.run.data import batch_size

SAMPLE_STEPS = 64
SAMPLE_SEQUENCES = 8192
"""A sample ends with the step that reaches one of these; it always has one step."""
GIB = 1 << 30


def graph_bytes(graph: GraphConfig, gpu_bytes: int) -> int:
    """Most memory that graphs may take on a GPU of `gpu_bytes`; 0 without graphs."""
    if not graph.layers:
        return 0
    return int(graph.memory_gib * GIB) or gpu_bytes // 10


def with_buckets(config: RunConfig, capacity: int) -> tuple[RunConfig, list[str]]:
    """The config with plan.buckets set where graphs would see too many shapes, and a note."""
    wanted = config.graph.layers and not config.plan.buckets
    if not wanted or not needs_buckets(capacity, lane_align(config)):
        return config, []
    note = f"plan.buckets: {BUCKETS}, because a CUDA graph replays one number of tokens"
    return replace(config, plan=replace(config.plan, buckets=BUCKETS)), [note]


def graph_setting(
    config: RunConfig, decoder: DecoderConfig, *, lanes: int, capacity: int, lengths: Ints
) -> tuple[GraphSetting | None, list[str]]:
    """What graphs serve, and notes. config: with the buckets of the run. lengths: of the data."""
    graph = config.graph
    if not graph.layers:
        return None, []
    halves = config.train.recompute == "none"
    if graph.max_sequences != "auto":
        return GraphSetting(graph.max_sequences, halves), []
    options = planner_options(config, lanes=lanes, capacity=capacity, decoder=decoder)
    data = config.data
    batches = Batches(lengths, batch_size(config), seed=data.seed, shuffle=data.shuffle)
    plans = list(sampled_plans(batches, partial(make_plan, **options)))
    cap = steady_cap(plans, graph.coverage)
    return GraphSetting(cap, halves), [_cap_note(MicroBatchSizes.of(plans), cap, halves=halves)]


def sampled_plans(batches: Batches, planner: Callable[[list[int]], Plan]) -> Iterator[Plan]:
    """Plans of some steps of the first epoch, evenly spaced, until there are enough."""
    steps = batches.steps(0)
    picked = min(steps, SAMPLE_STEPS)
    sequences = 0
    for number in _spread(picked):
        _, indices = next(batches.from_place(Place(0, number * steps // picked)))
        yield planner(batches.lengths[indices].tolist())
        sequences += len(indices)
        if sequences >= SAMPLE_SEQUENCES:
            return


def _spread(count: int) -> list[int]:
    """0 … count − 1 in an order whose beginnings are spread: by reversed bits. 4: 0 2 1 3."""
    bits = max(count - 1, 0).bit_length()
    order = [int(f"{place:0{bits}b}"[::-1], 2) if bits else 0 for place in range(1 << bits)]
    return [place for place in order if place < count]


def _cap_note(sizes: MicroBatchSizes, cap: int, *, halves: bool) -> str:
    count = len(sizes.alone)
    rest = "by halves of layers" if halves else "without graphs"
    if not count:
        return (
            f"graph.max_sequences: {cap}; none of {sizes.others:,} sampled micro-batches has one "
            f"unshared pack, so they are served {rest}"
        )
    note = (
        f"graph.max_sequences: {cap} serves {sizes.covered(cap):.0%} of {count:,} sampled "
        f"micro-batches with one unshared pack; {sizes.empty_share(cap):.0%} of slots are padding"
    )
    if sizes.others:
        note += f"; {sizes.others:,} others are served {rest}"
    return note
