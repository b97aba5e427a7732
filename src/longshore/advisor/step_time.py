"""How long a round and a step take on a measured machine, and what the planner is told. No torch.

In: a MachineProfile, a decoder, the lengths of each micro-batch, and how the model runs. Out:
seconds, or a CostProfile for planner and simulator (`model_cost`).

What a part of a layer does in one micro-batch is Work: its matrix products, the values it saves,
the FLOPs of its core, its sequences. Of 3 tokens, attention with 1 head of 2 dims at width 4 has
four products of 3 rows, saves 3·(8 + 8) values beside statistics (8 of the norm), has 4·2·6 = 48
FLOPs in its core and 1·2 channels of a sequence. Calibration divides measured seconds by these
amounts, and prediction multiplies with them: a part takes the seconds of its products, and what its
kind costs beside them (PartCost).

The device works for the sum of all parts, while the host launches them: a round takes the longer of
the two, and with zero3 on several lanes at least as long as weights travel. Over a step the host
runs ahead, so there the sums are compared.

    device 3 + 2 s and host 1 + 4 s in two rounds: rounds of 3 and 4 s, but a step of 5 s

Recomputation adds the forward of every block. tp and pp divide the device's seconds, pp the host's,
as CostProfile.on_ranks does; ep divides nothing, since lanes share experts and rows alike. Left
out: what TP ranks and experts exchange, the pipeline's bubble, how unevenly experts are loaded, and
what scans of shared packs exchange.

Work is what a part of a layer (`Part.timed`) has to do in one micro-batch: amounts that calibration
divides measured seconds by and that the predictor multiplies with them. Attention with 1 head of 2
dims at width 4 has for 3 tokens four products of 3 rows, saves 3·(8 + 8) values beside statistics
(8 of the norm), has 4·2·6 = 48 FLOPs in its core and 1·2 channels of a sequence.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from pathlib import Path

import numpy as np

from longshore.advisor.machine import ARITHMETIC_PASSES, MachineProfile, PartCost, read_cost
from longshore.arch.costs import parameter_count, trained_parameters
from longshore.arch.decoder import DecoderConfig, HyperConfig, LoRAConfig
from longshore.arch.memory import ALONE, ITEM_BYTES
from longshore.arch.part import Part, Product, Saved
from longshore.plan.cost import CostProfile
from longshore.plan.types import Axes
from longshore.settings import ShardMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a part does in a micro-batch, forward."""

    kind: str
    """One of advisor/machine.py's KINDS."""
    head_dim: int
    """By which its costs are looked up first."""
    channels: int
    """By which its costs are looked up next."""
    rows: int
    """Rows of its products: tokens with padding."""
    products: tuple[Product, ...]
    """Factors of its plain products."""
    values: float
    """Saved for backward, in numbers of the dtype, with those of the norm before it."""
    core: float
    """FLOPs beyond the plain products; of a scan those of whole chunks."""
    sequences: float
    """Sequences times channels."""
    weights: float = 0
    """Weights that are read and whose gradients are written, beside those of plain products."""
    frozen: bool = False
    """Whether its weights have no gradients."""
    factors: tuple[Product, ...] = ()
    """Products of the low-rank factors beside its own."""

    def with_factors(self, lora: LoRAConfig | None) -> "Work":
        """The same where low-rank factors alone are trained."""
        if lora is None:
            return self
        return replace(self, frozen=True, factors=lora.factors(self.products))


def part_works(
    part: Part, width: int, lengths: Sequence[int], *, item: int, scan_chunk: int = 1
) -> tuple[Work, ...]:
    """The works of a part with its norm: one, or some more of what is timed on its own.

    lengths: of all runs of tokens, padding too. item: bytes of a number. scan_chunk: a scan's
    lengths are rounded up to a multiple of this.
    """
    rows, pieces = sum(lengths), part.timed(width)
    plain = sum(product.flops for piece in pieces for product in piece.products)
    chunk = scan_chunk if part.in_chunks else 1
    counted = Counter(-(-n // chunk) * chunk for n in lengths).items()
    core = sum(count * (part.flops(width, n) - n * plain) for n, count in counted)
    return tuple(
        Work(
            kind=piece.kind,
            head_dim=piece.head_dim,
            channels=piece.channels,
            rows=rows,
            products=piece.products,
            values=rows * _values(piece.saved, item),
            core=0 if place else core,
            sequences=0 if place else len(lengths) * piece.channels,
            weights=piece.weights,
        )
        for place, piece in enumerate(pieces)
    )


def embedding_work(config: DecoderConfig, rows: int) -> Work:
    """The look-up of one stream of rows; its gradient is as large as the table."""
    return Work(
        kind="embedding",
        head_dim=1,
        channels=config.width,
        rows=rows,
        products=(),
        values=rows * config.width,
        core=0,
        sequences=0,
        weights=config.vocab_size * config.width,
    )


def head_work(config: DecoderConfig, rows: int) -> Work:
    """The head with its loss, for one stream of rows. Its values are the logits."""
    return Work(
        kind="head",
        head_dim=1,
        channels=config.width,
        rows=rows,
        products=(Product(config.width, config.vocab_size),),
        values=rows * config.vocab_size,
        core=0,
        sequences=0,
        weights=config.vocab_size * config.width,
    )


def join_work(config: DecoderConfig, rows: int) -> Work:
    """What a depth of multi-token prediction does beside its block, embedding and head."""
    width = config.width
    return Work(
        kind="other",
        head_dim=1,
        channels=width,
        rows=rows,
        products=(Product(2 * width, width),),
        values=rows * 7 * width,
        core=0,
        sequences=0,
    )


def hyper_work(config: DecoderConfig, residuals: HyperConfig, rows: int, *, item: int) -> Work:
    """What hyper-connections do around one part."""
    width = config.width
    products = residuals.products(width)
    saved = Saved(config.row_width) + residuals.saved(width)
    return Work(
        kind="other",
        head_dim=1,
        channels=config.row_width,
        rows=rows,
        products=products,
        values=rows * _values(saved, item),
        core=rows * (residuals.flops(width) - sum(each.flops for each in products)),
        sequences=0,
    )


def collapse_work(config: DecoderConfig, residuals: HyperConfig, rows: int, *, item: int) -> Work:
    """What makes one row of several, at the end and at each depth."""
    width = config.width
    product = Product(config.row_width, residuals.count)
    return Work(
        kind="other",
        head_dim=1,
        channels=config.row_width,
        rows=rows,
        products=(product,),
        values=rows * _values(residuals.collapse_saved(width), item),
        core=rows * (residuals.collapse_flops(width) - product.flops),
        sequences=0,
    )


def block_works(
    config: DecoderConfig, lengths: Sequence[int], *, item: int, scan_chunk: int = 1
) -> Counter[Work]:
    """The works of all layers and depths, each with how often it is done; see part_works."""
    parts = Counter(config.parts)
    counted: Counter[Work] = Counter()
    for part, times in parts.items():
        for work in part_works(part, config.width, lengths, item=item, scan_chunk=scan_chunk):
            counted[work] += times
    if config.residuals is not None:
        rows = sum(lengths)
        counted[hyper_work(config, config.residuals, rows, item=item)] += parts.total()
        collapse = collapse_work(config, config.residuals, rows, item=item)
        counted[collapse] += 1 + len(config.mtp)
    if depths := len(config.mtp):
        counted[join_work(config, sum(lengths))] += depths
    return Counter({work.with_factors(config.lora): times for work, times in counted.items()})


def end_works(config: DecoderConfig, rows: int) -> Counter[Work]:
    """Embedding and head, once and once more for each depth."""
    works = (embedding_work(config, rows), head_work(config, rows))
    return Counter({work.with_factors(config.lora): 1 + len(config.mtp) for work in works})


def _values(saved: Saved, item: int) -> float:
    """Statistics are wider than values in half precision."""
    return saved.values + saved.stats * max(item, 4) / item


MOST_COLUMNS = 8


def fit_nonnegative(
    amounts: Sequence[Sequence[float]],
    seconds: Sequence[float],
    *,
    totals: Sequence[float] | None = None,
) -> list[float]:
    """Coefficients of the columns; those of columns that are 0 everywhere are 0.

    totals: what an error is relative to, where `seconds` are only a part of it.
    """
    scale = np.array(seconds if totals is None else totals, dtype=np.float64)
    matrix = np.array(amounts, dtype=np.float64) / scale[:, None]
    wanted = np.array(seconds, dtype=np.float64) / scale
    columns = matrix.shape[1]
    assert columns <= MOST_COLUMNS, columns
    sizes = np.abs(matrix).max(axis=0)
    used = [column for column in range(columns) if sizes[column] > 0]
    matrix[:, used] /= sizes[used]
    best, least = np.zeros(columns), float((wanted**2).sum())
    subsets = chain.from_iterable(combinations(used, n) for n in range(1, len(used) + 1))
    for subset in map(list, subsets):
        own = np.linalg.lstsq(matrix[:, subset], wanted, rcond=None)[0]
        if own.min() < 0:
            continue
        error = float(((matrix[:, subset] @ own - wanted) ** 2).sum())
        if error < least - 1e-12:
            best, least = np.zeros(columns), error
            best[subset] = own / sizes[subset]
    result: list[float] = best.tolist()
    return result


GATHERS = 3
"""Gathered rows travel forward, again in backward, and their gradients back."""


@dataclass(frozen=True, slots=True)
class PartTime:
    """Seconds of one part in one micro-batch."""

    forward: float
    """On the device."""
    backward: float
    """On the device."""
    host: float
    """To launch forward and backward."""
    host_forward: float
    """To launch forward."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Seconds that device, host and links are busy, all at the same time."""

    device: float
    host: float
    exchange: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.device, self.host, self.exchange)

    def __add__(self, other: "Busy") -> "Busy":
        exchange = self.exchange + other.exchange
        return Busy(self.device + other.device, self.host + other.host, exchange)


def part_time(machine: MachineProfile, work: Work) -> PartTime:
    """Seconds of a part by its kind; a kind that was not measured by FLOPs and bytes alone."""
    forward, backward = _products_seconds(machine, work)
    cost = machine.part(work.kind, head_dim=work.head_dim, channels=work.channels)
    if cost is not None and work.frozen:
        cost = _without_gradients(cost)
    if cost is None:
        moved = work.values * ITEM_BYTES[machine.dtype] * ARITHMETIC_PASSES
        rest = moved * machine.fixed.byte.seconds + 3 * work.core * machine.products.flop
        known = [part.host for part in machine.parts]
        host = sorted(known)[len(known) // 2] if known else 0.0
        return PartTime(forward + rest / 3, backward + rest * 2 / 3, host, host / 3)
    rest = sum(
        each * amount
        for each, amount in (
            (cost.call, 1),
            (cost.value, work.values),
            (cost.core, work.core),
            (cost.sequence, work.sequences),
            (cost.weight, work.weights),
        )
    )
    return PartTime(
        forward + rest * cost.forward,
        backward + rest * (1 - cost.forward),
        cost.host,
        cost.host_forward,
    )


def _products_seconds(machine: MachineProfile, work: Work) -> tuple[float, float]:
    """Forward and backward; a frozen weight has no gradient, which is half of backward."""

    def seconds(products: Sequence[Product]) -> tuple[float, float]:
        pairs = [machine.products.seconds(work.rows, each.k, each.n) for each in products]
        return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)

    forward, backward = seconds(work.products)
    more_forward, more_backward = seconds(work.factors)
    return forward + more_forward, backward / (1 + work.frozen) + more_backward


def _without_gradients(cost: PartCost) -> PartCost:
    """What a part costs whose weights are frozen, by arithmetic: the weights are only read.

    Experts' core are products, of which backward has one instead of two; nothing comes back to an
    embedding.
    """
    back = 0.5 if cost.kind == "experts" else 1.0
    core = cost.core * (cost.forward + (1 - cost.forward) * back)
    if cost.kind == "embedding":
        value = cost.value * cost.forward
        return replace(cost, value=value, weight=0.0, forward=1.0, host=cost.host_forward)
    return replace(cost, core=core, weight=cost.weight / 2)


def round_busy(
    machine: MachineProfile,
    config: DecoderConfig,
    lengths: Sequence[int],
    *,
    tokens: int,
    axes: Axes = ALONE,
    recompute: bool = False,
    graph: bool = False,
) -> Busy:
    """What a round keeps busy on one rank of a lane; graph: blocks are replayed by CUDA graphs."""
    if tokens < sum(lengths):
        raise ValueError(
            f"tokens is {tokens}, fewer than the {sum(lengths)} of the sequences; give the padded "
            "total"
        )
    item, fixed = ITEM_BYTES[machine.dtype], machine.fixed
    padding = [tokens - sum(lengths)] if tokens > sum(lengths) else []
    chunk = machine.scan_chunk
    blocks = block_works(config, [*lengths, *padding], item=item, scan_chunk=chunk)
    ends = end_works(config, tokens)
    device, host = _parts_busy(machine, blocks, again=recompute)
    if graph:
        host = fixed.graph_host.seconds * _block_count(config) * (2 if recompute else 1)
    more_device, more_host = _parts_busy(machine, ends, again=False)
    units = fsdp_units(config)
    device += more_device + fixed.block.seconds * units + fixed.round.seconds
    host += more_host + fixed.block_host.seconds * units + fixed.round_host.seconds
    device += fixed.round_token.seconds * tokens
    if axes.shard == "zero3":
        device += _copied(config, axes) * fixed.step_parameter.seconds
    else:
        device += trained_parameters(config) * fixed.round_parameter.seconds
    ranks = axes.tp * axes.pp
    exchange = _weights_seconds(machine, config, axes) if axes.shard == "zero3" else 0.0
    return Busy(device / ranks, host / axes.pp, exchange / ranks)


def step_seconds(
    machine: MachineProfile,
    config: DecoderConfig,
    rounds: Sequence[Sequence[int]],
    *,
    tokens: Sequence[int],
    axes: Axes = ALONE,
    recompute: bool = False,
    graph: bool = False,
) -> float:
    """All rounds of a lane, gradient norm and optimizer. tokens: of each round, padded."""
    busy, how = Busy(0.0, 0.0), partial(round_busy, axes=axes, recompute=recompute, graph=graph)
    for lengths, total in zip(rounds, tokens, strict=True):
        busy += how(machine, config, lengths, tokens=total)
    return (busy + update_busy(machine, config, axes)).seconds


def update_busy(machine: MachineProfile, config: DecoderConfig, axes: Axes) -> Busy:
    """What follows the rounds of a step, or happens once in them."""
    fixed, ranks = machine.fixed, axes.tp * axes.pp
    own = trained_parameters(config) / ranks
    shards = 1 if axes.shard == "none" else axes.lanes
    device = fixed.step.seconds
    device += own / shards * (fixed.optimizer.seconds + fixed.norm.seconds)
    if axes.shard != "zero3":
        device += _copied(config, axes) / ranks * fixed.step_parameter.seconds
        device += _weights_seconds(machine, config, axes) / ranks
    return Busy(device, fixed.step_host.seconds)


def _copied(config: DecoderConfig, axes: Axes) -> float:
    """Parameters that FSDP copies and casts; of frozen ones it copies weights where lanes share."""
    shared = axes.lanes > 1 and axes.shard != "none"
    frozen = parameter_count(config) if config.lora is not None and shared else 0
    return trained_parameters(config) + frozen / 2


def model_cost(
    cost: str | Path | MachineProfile | CostProfile,
    model: DecoderConfig,
    *,
    lanes: int,
    capacity: int,
    shard: ShardMode = "zero3",
    dtype: str | None = None,
    recompute: bool = False,
    ep: int = 1,
) -> CostProfile:
    """The planner's costs of a model, for `make_plan(…, profile=…)`.

    cost: a machine profile, which `longshore calibrate` writes or Longshore ships, such as "h200";
    a CostProfile is returned as it is. shard: zero3, zero2 or none. dtype: None for the profile's.
    recompute: whether blocks run again in backward. ep: ranks that experts are split over, which
    changes nothing, since lanes share experts and rows alike.
    """
    source = read_cost(str(cost)) if isinstance(cost, str | Path) else cost
    if isinstance(source, CostProfile):
        return source
    check_dtype(source, dtype or source.dtype)
    axes = Axes(lanes=lanes, shard=shard)
    return cost_profile(source, model, capacity=capacity, axes=axes, recompute=recompute)


def check_dtype(machine: MachineProfile, dtype: str) -> None:
    """Raises where a run computes in another dtype than was measured."""
    if dtype != machine.dtype:
        raise ValueError(
            f"the profile of {machine.device} was measured in {machine.dtype}, but the run "
            f"computes in {dtype}; measure it with longshore calibrate --dtype {dtype}"
        )


def cost_profile(
    machine: MachineProfile,
    config: DecoderConfig,
    *,
    capacity: int,
    axes: Axes = ALONE,
    recompute: bool = False,
    graph: bool = False,
) -> CostProfile:
    """The planner's cost model, fitted to predicted rounds of up to `capacity` tokens.

    It has no cost of a sequence and no larger of two, so it agrees within some percent. pack: what
    one more pack costs, the calls of the mixers.
    """
    whole = Axes(lanes=axes.lanes, shard=axes.shard)
    how = partial(round_busy, axes=whole, recompute=recompute, graph=graph)
    rows, seconds, device = [], [], []
    for lengths in sample_rounds(capacity):
        busy = how(machine, config, lengths, tokens=sum(lengths))
        rows.append([1.0, float(sum(lengths)), float(sum(n * n for n in lengths))])
        seconds.append(busy.seconds)
        device.append(busy.device)
    fitted = fit_nonnegative(rows, seconds)
    if not any(fitted[1:]):
        # The host or the links take longest, whatever the lengths: plans are still to be level in
        # what the device does, and the slowest sample takes what it took.
        once, *rest = fit_nonnegative(rows, device)
        fitted = [once + max(seconds) - max(device), *rest]
    # Rounded, so that ranks with different CPUs have the same costs, and so the same plans.
    once, linear, quadratic = map(_rounded, fitted)
    pack = min(once, _rounded(_pack_seconds(machine, config)))
    item = ITEM_BYTES[machine.dtype]
    gathered = sum(part.gathered() for part in config.parts) * item * GATHERS
    profile = CostProfile(
        linear=linear,
        quadratic=quadratic,
        gather=(
            gathered * machine.byte_gathered(across=False),
            gathered * machine.byte_gathered(across=True),
        ),
        node=machine.node,
        pack=pack,
        round=once - pack,
        message=config.row_width * item * machine.fixed.message.seconds,
    )
    return profile.on_ranks(tp=axes.tp, pp=axes.pp)


def sample_rounds(capacity: int) -> list[list[int]]:
    """Micro-batches of a full, half full and quarter full lane, of equal and of mixed lengths."""
    # Below 128 tokens, sequences of 64 would leave one sample: too few to tell slope from offset.
    shortest = 64 if capacity >= 128 else max(1, capacity // 4)
    samples = []
    for tokens in sorted({max(1, capacity // part) for part in (1, 2, 4)}):
        for count in (1, 2, 4, 8, 16, 32, 64):
            if tokens // count >= shortest:
                samples.append([tokens // count] * count)
        if tokens >= 256:
            half = tokens // 2
            samples.append([half, *[half // 8] * 8])
            samples.append([half, half // 2, half // 4, *[half // 32] * 8])
    return samples


def _parts_busy(
    machine: MachineProfile, works: Counter[Work], *, again: bool
) -> tuple[float, float]:
    """Seconds of device and host; again: forward runs twice."""
    device = host = 0.0
    for work, times in works.items():
        each = part_time(machine, work)
        device += times * (each.forward * (1 + again) + each.backward)
        host += times * (each.host + each.host_forward * again)
    return device, host


def fsdp_units(config: DecoderConfig) -> int:
    """Blocks, and parts with parameters that are never cast, which FSDP wraps on their own."""
    parts = config.parts
    mixing = len(parts) + 1 + len(config.mtp) if config.residuals else 0
    return _block_count(config) + sum(part.has_float32 for part in parts) + mixing


def _rounded(seconds: float) -> float:
    """To six digits."""
    return float(f"{seconds:.6g}")


def _block_count(config: DecoderConfig) -> int:
    return len(config.layers) + len(config.mtp)


def _pack_seconds(machine: MachineProfile, config: DecoderConfig) -> float:
    """The calls of all mixers, on the device or on the host."""
    works = block_works(config, [1], item=ITEM_BYTES[machine.dtype])
    device = host = 0.0
    for work, times in works.items():
        cost = machine.part(work.kind, head_dim=work.head_dim, channels=work.channels)
        if cost is not None and work.kind in ("attention", "mla", "mamba", "delta"):
            device, host = device + times * cost.call, host + times * cost.host
    return max(device, host)


def _weights_seconds(machine: MachineProfile, config: DecoderConfig, axes: Axes) -> float:
    """Seconds that weights and gradients travel between lanes: zero3 gathers twice a round."""
    if axes.lanes == 1:
        return 0.0
    item, master = ITEM_BYTES[machine.dtype], max(4, ITEM_BYTES[machine.dtype])
    gathered = {"zero3": 2 * item, "zero2": item, "none": 0}[axes.shard]
    # none: an all-reduce sends as much as a gather and a reduce-scatter.
    summed = 2 * master if axes.shard == "none" else master
    moved = trained_parameters(config) * (gathered + summed)
    if config.lora is not None:
        moved += parameter_count(config) * gathered
    share = moved * (axes.lanes - 1) / axes.lanes
    # Across nodes too: there all lanes of a node fetch together, each through its own link.
    return share * machine.byte_gathered(across=False)
