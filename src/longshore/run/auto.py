"""What a run decides for itself: everything that is "auto" in its configuration.

In: a config, the decoder, the ranks' memory and dtype, the longest sequence. Out: Resolved, in
which nothing is "auto", with notes that say how each choice came about:

    parallel.shard: none, every rank holds all: model and optimizer take 2% of a rank's memory
"""

from dataclasses import dataclass, replace

import numpy as np

from longshore.arch.costs import auto_capacity
from longshore.arch.decoder import DecoderConfig
from longshore.arch.model_memory import model_bytes
from longshore.arch.part import Sharing
from longshore.arch.stage_memory import ModelSplit
from longshore.choices import ShardMode
from longshore.config.check import check_longest, pipeline_layout, shared_heads
from longshore.config.check_graph import check_graph, graph_layers, no_gpu
from longshore.config.located import settings_in_keys
from longshore.config.schema import RunConfig
from longshore.errors import SettingError
from longshore.ops.backends import is_installed
from longshore.plan.cost import Ints
from longshore.plan.graph_use import GraphSetting
from longshore.plan.layout import Layout
from longshore.plan.policy import policy_named
from longshore.plan.shapes import legal_cp_sizes
from longshore.run.graph_cap import (
    graph_bytes,
    graph_setting,
    with_buckets,
)


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
    """Of the arithmetic, by name, such as bfloat16."""
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
    _check_graph_device(config, decoder, device=device)
    layout = pipeline_layout(config, decoder)
    shard, why = _shard(config, decoder, layout, lanes=lanes, dtype=dtype, memory=memory)
    notes = [f"parallel.shard: {why}"] if config.parallel.shard == "auto" else []
    capacity = config.plan.capacity
    if capacity == "auto":
        capacity, arithmetic = auto_capacity(
            decoder,
            memory_bytes=memory - graph_bytes(config.graph, memory),
            lanes=lanes,
            shard=shard,
            dtype=dtype,
            recompute=config.train.recompute == "blocks",
            cp_sizes=possible_cp_sizes(config, decoder, lanes=lanes),
            sharing=Sharing(config.parallel.attention, config.parallel.scan),
            layout=layout if layout.pp > 1 else None,
            split=_split(config),
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


def _split(config: RunConfig) -> ModelSplit:
    return ModelSplit(tp=config.parallel.tp, ep=config.parallel.ep)


def _shard(
    config: RunConfig,
    decoder: DecoderConfig,
    layout: Layout,
    *,
    lanes: int,
    dtype: str,
    memory: int,
) -> tuple[ShardMode, str]:
    """How the stages are split: whole on every rank while that takes a quarter of the memory."""
    if config.parallel.shard != "auto":
        return config.parallel.shard, ""
    split = _split(config)
    whole = max(
        model_bytes(
            decoder,
            lanes=lanes,
            shard="none",
            dtype=dtype,
            layout=layout,
            pp_rank=rank,
            split=split,
        ).total
        for rank in range(layout.pp)
    )
    what = "its stages" if layout.pp > 1 else "the whole model"
    if split.any:
        what = f"its part of {what.removeprefix('its ')}"
    share = f"model and optimizer take {whole / memory:.0%} of a rank's memory"
    if lanes == 1 or whole <= memory / 4:
        return "none", f"none, every rank has {what}: {share}"
    if config.plan.sync == "step":
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


def _check_graph_device(config: RunConfig, decoder: DecoderConfig, *, device: str) -> None:
    """Refuses graphs on a CPU that train.device=auto has chosen, and all that check_graph does."""
    with settings_in_keys():
        check_graph(config, decoder)
        if config.graph.layers and device != "cuda":
            raise no_gpu()
        _check_kernels(config, decoder)


def _check_kernels(config: RunConfig, decoder: DecoderConfig) -> None:
    """Refuses scans by plain torch, which reads on the host how many chunks there are."""
    for layer, package in (("mamba", "triton"), ("delta", "fla")):
        if layer not in graph_layers(config, decoder):
            continue
        if config.train.kernels == "plain" or not is_installed(package):
            raise SettingError(
                f"{{graph_layers}} has {layer}, whose graphs need the kernels of {package}, but "
                f"{{kernels}} is plain or {package} is not installed; install longshore[gpu], or "
                f"leave {layer} out of {{graph_layers}}"
            )
