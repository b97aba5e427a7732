"""What a run decides for itself: everything that is "auto" in its configuration. No torch.

In: a config, the decoder, the ranks' memory and dtype, the longest sequence. Out: Resolved, in
which nothing is "auto", with notes that say how each choice came about:

    parallel.shard: none, every rank holds all: model and optimizer take 2% of a rank's memory

For CUDA graphs it chooses buckets, memory and the cap on sequences that plan/graph_use.py reads.
For graph.max_sequences=auto some of the run's steps are planned in advance, evenly spaced over the
first epoch; which of them depends on the data and the configuration alone, so all ranks decide
alike:

    graph.max_sequences: 24 serves 95 % of 512 sampled micro-batches with one unshared pack; …
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from longshore.arch.costs import auto_capacity
from longshore.arch.decoder import DecoderConfig
from longshore.arch.memory import RankSetting, model_bytes
from longshore.arch.part import Sharing
from longshore.config.check import (
    NO_GPU,
    check_longest,
    graph_layers,
    graph_refusals,
    lane_align,
    pipeline_layout,
    planner_setting,
    refuse,
    shared_heads,
)
from longshore.config.schema import GraphConfig, RunConfig
from longshore.data.source import Batches, Place
from longshore.plan.cost import Ints
from longshore.plan.graph_use import (
    BUCKETS,
    GraphSetting,
    MicroBatchSizes,
    needs_buckets,
    steady_cap,
)
from longshore.plan.layout import Layout
from longshore.plan.planner import plan_step
from longshore.plan.shapes import legal_cp_sizes
from longshore.plan.types import Axes, Plan, policy_named
from longshore.run.data import batch_size
from longshore.settings import ShardMode
from longshore.user_code import is_installed

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
    setting = planner_setting(config, lanes=lanes, capacity=capacity, decoder=decoder)
    data = config.data
    batches = Batches(lengths, batch_size(config), seed=data.seed, shuffle=data.shuffle)
    plans = list(sampled_plans(batches, partial(plan_step, setting=setting)))
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


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration, and what became of everything "auto" in it."""

    config: RunConfig
    """As it was given, with plan.capacity as a number."""
    decoder: DecoderConfig
    """The model."""
    shard: ShardMode
    """What of the model is split over ranks."""
    capacity: int
    """Most tokens a rank holds in a round."""
    dtype: str
    """Name of the dtype of the arithmetic, such as bfloat16."""
    compile: bool
    """Whether blocks go through torch.compile."""
    layout: Layout
    """The stages of the pipeline."""
    graph: GraphSetting | None
    """Which micro-batches CUDA graphs serve; None: graphs are off."""
    notes: tuple[str, ...]
    """How each choice came about, for people."""


def resolve(
    config: RunConfig,
    decoder: DecoderConfig,
    *,
    lanes: int,
    dtype: str,
    device: str,
    memory: int,
    longest: int,
    lengths: Ints | None = None,
) -> Resolved:
    """Decides what is "auto"; device: cpu or cuda; memory: bytes of the rank that has least.

    lengths: of all sequences, for graph.max_sequences; without them that of the longest.
    """
    refuse(_graph_refusals(config, decoder, device=device))
    layout = pipeline_layout(config, decoder)
    how = RankSetting(
        axes=run_axes(config, lanes),
        dtype=dtype,
        recompute=config.train.recompute == "blocks",
        layout=layout,
        sharing=Sharing(config.parallel.attention, config.parallel.scan),
    )
    shard, why = _shard(how, decoder, memory=memory, sync=config.plan.sync)
    notes = [f"parallel.shard: {why}"] if config.parallel.shard == "auto" else []
    capacity = config.plan.capacity
    if capacity == "auto":
        capacity, arithmetic = auto_capacity(
            decoder,
            replace(how, axes=replace(how.axes, shard=shard)),
            memory_bytes=memory - graph_bytes(config.graph, memory),
            cp_sizes=possible_cp_sizes(config, decoder, lanes=lanes),
        )
        notes.append(f"plan.capacity: {capacity:,} tokens per rank and round")
        notes += [f"  {line}" for line in arithmetic]
    compiles, why = _compile(config, device)
    notes += [f"train.compile: {why}"] if why else []
    resolved = replace(config, plan=replace(config.plan, capacity=capacity))
    resolved, bucket_notes = with_buckets(resolved, capacity)
    check_longest(resolved, lanes, longest)
    graph, graph_notes = graph_setting(
        resolved,
        decoder,
        lanes=lanes,
        capacity=capacity,
        lengths=np.array([longest]) if lengths is None else lengths,
    )
    notes += bucket_notes + graph_notes
    if layout.pp > 1:
        notes.append(f"pipeline: {layout}, stage s on pipeline rank s % {layout.pp}")
    return Resolved(
        resolved, decoder, shard, capacity, dtype, compiles, layout, graph, tuple(notes)
    )


def possible_cp_sizes(config: RunConfig, decoder: DecoderConfig, *, lanes: int) -> tuple[int, ...]:
    """The CP sizes that packs of the run may have: the one that is set, or all legal ones.

    Any policy may fill a pack of any legal size with many short sequences, up to the capacity.
    """
    plan = config.plan
    if plan.cp_size and policy_named(plan.policy).one_cp_size:
        return (plan.cp_size,)
    return legal_cp_sizes(
        lanes,
        kind=plan.cp_sizes,
        min_cp=plan.min_cp,
        max_cp=plan.max_cp or None,
        heads=shared_heads(decoder, config.parallel),
    )


def run_axes(config: RunConfig, lanes: int) -> Axes:
    """The parallel axes of a run, as it is configured."""
    of = config.parallel
    return Axes(lanes=lanes, tp=of.tp, pp=of.pp, vpp=of.vpp, ep=of.ep, shard=of.shard)


def _shard(
    how: RankSetting, decoder: DecoderConfig, *, memory: int, sync: str
) -> tuple[ShardMode, str]:
    """How the stages are split: whole on every rank while that takes a quarter of the memory."""
    axes = how.axes
    if axes.shard != "auto":
        return axes.shard, ""
    none = replace(how, axes=replace(axes, shard="none"))
    ranks = (replace(none, pp_rank=rank) for rank in range(axes.pp))
    whole = max(model_bytes(decoder, rank).total for rank in ranks)
    what = "its stages" if axes.pp > 1 else "the whole model"
    if axes.splits_layers:
        what = f"its part of {what.removeprefix('its ')}"
    share = f"model and optimizer take {whole / memory:.0%} of a rank's memory"
    if axes.lanes == 1 or whole <= memory / 4:
        return "none", f"none, every rank has {what}: {share}"
    if sync == "step":
        return "zero2", f"zero2, because plan.sync is step: {share}"
    return "zero3", f"zero3: {share}"


def _compile(config: RunConfig, device: str) -> tuple[bool, str]:
    """Whether blocks are compiled: by itself only on GPUs where our kernels do not serve them."""
    train = config.train
    if train.compile != "auto":
        return train.compile, ""
    if device != "cuda" or not is_installed("triton"):
        return False, ""
    if config.model.code == "transformers":
        return True, "true, because transformers' code has no kernels of its own"
    if train.kernels == "auto":
        return False, ""
    if config.graph.layers:
        return False, "false, because graph.layers is set"
    return True, "true, because train.kernels is plain"


def _graph_refusals(config: RunConfig, decoder: DecoderConfig, *, device: str) -> Iterator[str]:
    """Graphs on a CPU that train.device=auto has chosen, scans by plain torch, and the rest.

    Plain torch reads on the host how many chunks a scan has.
    """
    if not config.graph.layers:
        return
    yield from graph_refusals(config, decoder)
    if device != "cuda":
        yield NO_GPU
    for layer, package in (("mamba", "triton"), ("delta", "fla")):
        if layer not in graph_layers(config, decoder):
            continue
        if config.train.kernels == "plain" or not is_installed(package):
            yield (
                f"graph.layers has {layer}, whose graphs need the kernels of {package}, but "
                f"train.kernels is plain or {package} is not installed; install longshore[gpu], "
                f"or leave {layer} out of graph.layers"
            )
