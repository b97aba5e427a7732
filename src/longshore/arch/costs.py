"""What a decoder costs: FLOPs, memory and capacity of a rank, its pipeline's stages. No torch.

FLOPs: in, a DecoderConfig and the sequences' real lengths; out, exact integers. A product of (m, k)
and (k, n) matrices is 2·m·k·n FLOPs, and attention counts only the pairs a token may see, n(n+1)/2
of a sequence of n, whatever a kernel really computes. Backward is twice the forward: each product
has two gradients, but for those with a weight that LoRA freezes, which have one, and factors have
products of their own. Recomputation is not counted, and only matrix products are. These FLOPs a
second, divided by the vendor's dense peak, are the MFU wherever Longshore shows one.

A decoder with one MLP of width 8, hidden width 4 and vocabulary 10, for 3 tokens: MLP
2·3·(3·4·8) = 576, head 2·3·4·10 = 240, so 816 forward and 2,448 for a step.

Memory: in, a DecoderConfig and how it is trained; out, bytes, and the capacity that is left with
its calculation. For each token a block saves what its backward reads; with recomputation only the
block's input is saved, and one block at a time has the rest. tiny-llama's block in float32 saves
1,408 values and 10 statistics per token, 5,672 bytes; with recomputation 64 values, 256 bytes. What
a layer gathers of shared packs comes on top, in one layer at a time (`Part.exchanged`).
arch/memory.py counts the model. In a pipeline a rank saves the activations of several rounds: with
1F1B rank p those of pp − p, with interleaving of 2·(pp − p − 1) + (vpp − 1)·pp + 1 of its stages.
The capacity is that of the rank with the least. These are estimates: a tenth is kept free for
kernels' buffers and fragmentation.

A cost profile from FLOPs (`flops_cost`), for models whose cost is no square of the length: what a
single token takes, and beyond that a curve over lengths of what a sequence takes together, at the
built-in profile's 400 TFLOP/s. A layer with a window of 2 and heads of 1 dim, 4 FLOPs a pair: 1
token has 1 pair, 5 tokens have 9. So the curve is 4 · (9 − 5) = 16 at length 5, at length 10 36.

Stages: a Layout whose most expensive stage is cheapest, counted in FLOPs of a sequence's forward,
and what part of a round's cost each stage has. Four equal layers on 2 ranks whose head costs as
much as two of them: `Ettt|tL`. Both stages then have half of what grows with tokens, but the first
has three quarters of what grows with squares. Where experts are split over ranks, lanes meet before
them and after them. What lies between such meetings is token-wise: the feed-forward part of a layer
with experts, and the head, which comes after the last. A feed-forward part without experts runs on
from its mixer.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from longshore.arch.decoder import DecoderConfig, LayerConfig, parts_of
from longshore.arch.memory import (
    ModelBytes,
    RankSetting,
    block_saved,
    block_working,
    item_bytes,
    model_bytes,
    most_in_flight,
    rank_layers,
    sent_width,
    stage_saved,
)
from longshore.arch.part import Part, Sharing
from longshore.ops.sizes import loss_bytes
from longshore.plan.cost import BUILT_IN, CostProfile, StageCosts, share_out
from longshore.plan.layout import Layout, balanced_layout, parse_layout

INDEX_BYTES = 4
"""Bytes of each index of a row: to natural order, back, and of the rows that are seen."""


def exchanged_by(
    layers: Iterable[LayerConfig], cp_size: int, tokens: int, *, sharing: Sharing, item: int
) -> int:
    """Bytes of a lane full of packs of this CP size, in the layer that needs most."""
    indices = INDEX_BYTES * (3 * cp_size + 1) * tokens if cp_size > 1 else 0
    each = (
        part.exchanged(cp_size, tokens, sharing=sharing, item=item)
        for part in set(parts_of(layers))
    )
    return indices + max(each, default=0)


def step_flops(config: DecoderConfig, lengths: Sequence[int]) -> int:
    """FLOPs of forward and backward over these sequences, together or in any packs.

    With low-rank factors the gradients of rows below the first factor are counted, though nothing
    reads them: 0.1 % of Qwen3-8B.
    """
    trained = 3 * sum(
        count * forward_flops(config, length) for length, count in Counter(lengths).items()
    )
    return trained + sum(lengths) * (factor_flops(config) - frozen_flops(config))


def frozen_flops(config: DecoderConfig) -> int:
    """Forward FLOPs of a token in products with weights that low-rank factors freeze."""
    if config.lora is None:
        return 0
    width, depths, residuals = config.width, len(config.mtp), config.residuals
    parts = config.parts
    total = sum(times * weight_flops(part, width) for part, times in Counter(parts).items())
    if residuals is not None:
        mixing = sum(each.flops for each in residuals.products(width))
        total += len(parts) * mixing + (1 + depths) * 2 * config.row_width * residuals.count
    return total + depths * 4 * width * width + (1 + depths) * 2 * width * config.vocab_size


def weight_flops(part: Part, width: int) -> int:
    """Forward FLOPs of a token in a part's products with weights; the rest is its core."""
    products = part.products(width)
    if part.routed_experts or not products:  # experts' weights are in no plain product
        return min(part.flops(width, 1), 2 * part.parameters(width))
    return sum(each.flops for each in products)


def factor_flops(config: DecoderConfig) -> int:
    """FLOPs of a token in the products of low-rank factors, forward and backward."""
    if config.lora is None:
        return 0
    return 3 * sum(
        times * sum(each.flops for each in config.lora.factors(part.products(config.width)))
        for part, times in Counter(config.parts).items()
    )


PEAKS = {
    "H100 PCIe": 756.5e12,
    "H100 NVL": 835.5e12,
    "H200 NVL": 835.5e12,
    "GB200": 2500e12,
    "H200": 989.5e12,  # SXM; 1,979 TFLOP/s with sparsity
    "H100": 989.5e12,
    "A100": 312e12,
    "B200": 2250e12,  # DGX B200, each of its 8 GPUs; 4,500 TFLOP/s with sparsity
    # 64 cores at 2.45 GHz, each of 32 float32 FLOPs a cycle with AVX2.
    "AMD EPYC 7763": 64 * 2.45e9 * 32,
}
"""Dense FLOP/s by a part of the device's name, from data sheets; the first that matches counts."""


def vendor_peak(device: str, dtype: str) -> float | None:
    """Dense FLOP/s of a device of this name, as torch has it; None if it is not known."""
    name = next((name for name in PEAKS if name in device), "")
    measured = "float32" if name.startswith("AMD") else "bfloat16"
    return PEAKS.get(name) if dtype == measured else None


def trained_parameters(config: DecoderConfig) -> int:
    """Parameters that have a gradient: all, or those of low-rank factors."""
    return parameter_count(config) if config.lora is None else factor_flops(config) // 6


def forward_flops(config: DecoderConfig, length: int) -> int:
    """FLOPs of one sequence's forward, with the logits of every token; without low-rank factors."""
    width, depths = config.width, len(config.mtp)
    kinds = Counter((*config.layers, *config.mtp))
    layers = sum(count * layer.flops(width, length) for layer, count in kinds.items())
    joins = depths * 2 * length * 2 * width * width
    collapse = config.residuals.collapse_flops(width) if config.residuals else 0
    return layers + joins + (1 + depths) * length * (collapse + 2 * width * config.vocab_size)


def parameter_count(config: DecoderConfig) -> int:
    """Parameters of the decoder; a tied head has none of its own."""
    layers = sum(layer.parameters(config.width) for layer in (*config.layers, *config.mtp))
    ends = len(config.mtp) * config.join_parameters + config.norm_parameters
    return layers + ends + config.vocab_size * config.width * (2 - config.tied)


KEPT_FREE = 10
"""One part in ten is kept free."""
STEP_TOKENS = 256
"""A capacity is a multiple of this."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes per token."""

    saved: int
    """From forward to backward."""
    working: int
    """While its block is in backward."""


def token_bytes(config: DecoderConfig, how: RankSetting) -> TokenBytes:
    """Bytes of one token of each round."""
    item, axes, layout = item_bytes(how.dtype), how.axes, how.stages(config)
    each = {number: stage_saved(config, number, how) for number in layout.of_rank(how.pp_rank)}
    layers, width = rank_layers(config, how), config.width
    times = 2 if how.recompute else 1
    blocks = [
        times * block_saved(layer, width, item=item, axes=axes, lora=config.lora)
        + block_working(layer, width, item=item, axes=axes)
        for layer in layers
    ]
    working = max(blocks, default=0)
    if layout.pp > 1:
        # A message that is received and one that is sent.
        row = max(sent_width(config, layout, number) for number in each)
        working += -(-2 * row * item // axes.tp)
    return TokenBytes(saved=most_in_flight(layout, how.pp_rank, each), working=working)


def logits_bytes(config: DecoderConfig, tokens: int, *, dtype: str, tp: int = 1) -> int:
    """The loss's chunk of logits, and the gradients of the head: the most of any backend.

    tp: ranks that the vocabulary is split over.
    """
    plain, by_kernels = (
        loss_bytes(
            tokens,
            vocabulary=-(-config.vocab_size // tp),
            width=config.width,
            item=item_bytes(dtype),
            heads=1 + len(config.mtp),
            kernels=kernels,
            trains=config.lora is None,
        )
        for kernels in (False, True)
    )
    # Kernels leave float64 to plain torch.
    return plain if dtype == "float64" else max(plain, by_kernels)


def auto_capacity(
    config: DecoderConfig, how: RankSetting, *, memory_bytes: int, cp_sizes: Sequence[int]
) -> tuple[int, list[str]]:
    """The tokens a lane may hold in a round, a multiple of 256, and the calculation as lines.

    With a pipeline they are those of the rank with the least. cp_sizes: those that a pack may
    have; a lane may be full of its shard of one.
    """
    ranks = (
        _rank_capacity(config, replace(how, pp_rank=rank), memory=memory_bytes, cp_sizes=cp_sizes)
        for rank in range(how.stages(config).pp)
    )
    return min(ranks, key=lambda rank: rank[0])


def _rank_capacity(
    config: DecoderConfig, how: RankSetting, *, memory: int, cp_sizes: Sequence[int]
) -> tuple[int, list[str]]:
    """auto_capacity of one pipeline rank."""
    model, token, layout = model_bytes(config, how), token_bytes(config, how), how.stages(config)
    layers, item = rank_layers(config, how), item_bytes(how.dtype)
    has_head = any(layout.stages[number].head for number in layout.of_rank(how.pp_rank))
    free = memory // KEPT_FREE
    usable, fixed = memory - free - model.total, token.saved + token.working

    def loss_at(tokens: int) -> int:
        tp = how.axes.tp
        return logits_bytes(config, tokens, dtype=how.dtype, tp=tp) if has_head else 0

    def exchanged_at(tokens: int) -> tuple[int, int]:
        """The most bytes, and the CP size that needs them, negative."""
        of = partial(exchanged_by, layers, tokens=tokens, sharing=how.sharing, item=item)
        return max((of(size), -size) for size in cp_sizes)

    def is_too_much(steps: int) -> bool:
        tokens = steps * STEP_TOKENS
        return fixed * tokens + exchanged_at(tokens)[0] + loss_at(tokens) > usable

    most = max(0, usable // (STEP_TOKENS * fixed))
    # All below one that fits fit too.
    capacity = STEP_TOKENS * bisect_left(range(1, most + 1), True, key=is_too_much)
    tokens = max(capacity, STEP_TOKENS)
    loss, (in_layer, cp_size) = loss_at(tokens), exchanged_at(tokens)
    gathered = -(-in_layer // tokens)
    each, left = fixed + gathered, usable - loss
    lines = [
        f"memory {_size(memory)}, {_size(free)} of it kept free",
        _model_line(model, how, layout),
        f"loss {_size(loss)}: a chunk of logits, and gradients of the head and its inputs",
        f"a token {_size(each)}: {_size(token.saved)} saved"
        f"{' for all rounds in flight' if layout.pp > 1 else ''}"
        f"{', blocks recomputed' if how.recompute else ''}, {_size(token.working)} in "
        f"backward, {_size(gathered)} gathered or expanded by a layer at CP size {-cp_size}",
    ]
    if (largest := max(cp_sizes)) > 1:
        rows = f"{capacity * largest:,} tokens of a full pack"
        lines.append(f"at CP size {largest} a lane's layer reads up to {rows}")
    lines.append(f"capacity {_size(max(left, 0))} / {_size(each)} = {capacity} tokens")
    if not capacity:
        ways = ", or ".join(_ways_out(how, largest))
        raise ValueError(
            f"not even {STEP_TOKENS} tokens fit into a lane's memory: "
            f"{_size(STEP_TOKENS * each - left)} are missing; {ways}\n" + "\n".join(lines)
        )
    return capacity, lines


def _model_line(model: ModelBytes, how: RankSetting, layout: Layout) -> str:
    axes = how.axes
    rank = f" of pipeline rank {how.pp_rank} in {layout}" if layout.pp > 1 else ""
    split = f", tp {axes.tp}, ep {axes.ep}" if axes.splits_layers else ""
    return (
        f"model {_size(model.total)}{rank} with {axes.shard} over {axes.lanes} lanes{split}: "
        f"weights {_size(model.parameters)}, gradients {_size(model.gradients)}, "
        f"optimizer {_size(model.optimizer)}, gathered {_size(model.gathered)}"
    )


def _ways_out(how: RankSetting, largest_cp: int) -> Iterator[str]:
    if not how.recompute:
        yield "recompute blocks in backward"
    if how.axes.shard != "zero3":
        yield "shard the model as zero3"
    if largest_cp > 1:
        yield "allow only smaller CP sizes"
    yield "use more lanes or a smaller model"


def _size(amount: int) -> str:
    """1610612736 as "1.5 GiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if amount >= unit:
            return f"{amount / unit:.1f} {name}"
    return f"{amount} B"


RATE = 4e14
"""FLOP/s."""
KNOTS = 4
"""For each doubling of the length."""
LONGEST = 22
"""Doublings."""


def needs_curve(config: DecoderConfig) -> bool:
    """Whether squared lengths say nothing about the model."""
    return any(part.needs_curve for part in config.parts)


def flops_cost(config: DecoderConfig) -> CostProfile:
    """Forward and backward; what is gathered and launched as in the built-in profile."""
    token = forward_flops(config, 1)
    lengths = sorted({round(2 ** (i / KNOTS)) for i in range(KNOTS * LONGEST + 1)})
    beyond = [forward_flops(config, length) - length * token for length in lengths]
    highest, curve = 0.0, []
    for length, flops in zip(lengths, beyond, strict=True):
        highest = max(highest, float(flops))
        curve.append((length, highest))
    linear = 3 * token / RATE
    return replace(
        BUILT_IN,
        linear=linear,
        quadratic=3 / RATE,
        gather=(
            BUILT_IN.gather[0] / BUILT_IN.linear * linear,
            BUILT_IN.gather[1] / BUILT_IN.linear * linear,
        ),
        pack=BUILT_IN.pack / BUILT_IN.linear * linear,
        curve=tuple(curve),
    )


USUAL_LENGTH = 4096
"""Tokens of the sequence by which stages are balanced."""


def make_layout(
    decoder: DecoderConfig, *, pp: int, vpp: int, text: str = "", length: int = USUAL_LENGTH
) -> Layout:
    """Which parts of a decoder each pipeline stage has: as `text` says, or balanced by FLOPs.

    pp, vpp: pipeline ranks, and stages for each. text: such as "Ettt|tL". length: of the sequence
    whose forward FLOPs are balanced.
    """
    layers, depths = len(decoder.layers), len(decoder.mtp)
    if not text:
        costs = [*layer_flops(decoder, length), head_flops(decoder, length)]
        embed = embed_flops(decoder, length)
        layout = balanced_layout(costs, pp=pp, vpp=vpp, depths=depths, embed=embed)
        return replace(layout, id_layers=decoder.hashed_layers)
    layout = parse_layout(text, pp=pp, layers=layers, depths=depths)
    if layout.vpp != vpp:
        raise ValueError(
            f"parallel.layout is {text!r}, which has {layout.vpp} stages for each of {pp} pipeline "
            f"ranks, but parallel.vpp is {vpp}; set parallel.vpp to {layout.vpp}"
        )
    return replace(layout, id_layers=decoder.hashed_layers)


def layer_flops(decoder: DecoderConfig, length: int) -> list[int]:
    """Forward FLOPs of each layer, then of each depth with its join, for one sequence."""
    width = decoder.width
    kinds = {kind: kind.flops(width, length) for kind in Counter((*decoder.layers, *decoder.mtp))}
    join = 2 * length * 2 * width * width
    layers = [kinds[layer] for layer in decoder.layers]
    return layers + [kinds[layer] + join for layer in decoder.mtp]


def expert_flops(decoder: DecoderConfig, length: int) -> list[int]:
    """Forward FLOPs of each layer's feed-forward part, if it has experts, then of each depth's."""
    parts = [layer.mlp for layer in (*decoder.layers, *decoder.mtp)]
    return [
        part.flops(decoder.width, length) if part is not None and part.routed_experts else 0
        for part in parts
    ]


def head_flops(decoder: DecoderConfig, length: int) -> int:
    """Forward FLOPs of the head, which runs once and once more for each depth."""
    return (1 + len(decoder.mtp)) * 2 * length * decoder.width * decoder.vocab_size


def embed_flops(decoder: DecoderConfig, length: int) -> int:
    """A look-up has no products; it counts as one for each channel, so that it is not free."""
    return 2 * length * decoder.width


def stage_costs(
    decoder: DecoderConfig, layout: Layout, *, recompute: bool, length: int = USUAL_LENGTH
) -> StageCosts:
    """How the stages share a round's cost; recompute: blocks run again in backward.

    A backward takes twice the forward, and a recomputed block once more. length: of the sequence
    whose FLOPs are counted.
    """
    again = 3 if recompute else 2
    experts = expert_flops(decoder, length)
    layers, twice = layer_flops(decoder, length), layer_flops(decoder, 2 * length)
    # What grows with the square shows in the second difference: (2n)² − 2·n² = 2·n².
    squares = [max(0, (b - 2 * a) // 2) for a, b in zip(layers, twice, strict=True)]
    linear, quadratic, tokenwise = [], [], []
    for stage in layout.stages:
        places = [*stage.layers, *(len(decoder.layers) + depth for depth in stage.depths)]
        square = sum(squares[place] for place in places)
        blocks = sum(layers[place] for place in places) - square
        ends = stage.head * head_flops(decoder, length) + stage.embed * embed_flops(decoder, length)
        linear.append((blocks + ends, again * blocks + 2 * ends))
        quadratic.append((square, again * square))
        apart = sum(experts[place] for place in places)
        head = stage.head * head_flops(decoder, length) if apart else 0
        tokenwise.append((apart + head, again * apart + 2 * head))
    # In messages of row_width, as many as the rows of a token take.
    streams = [
        -(-sent_width(decoder, layout, stage) // decoder.row_width)
        for stage in range(len(layout.stages))
    ]
    return share_out(
        linear=linear, quadratic=quadratic, streams=streams, pp=layout.pp, tokenwise=tokenwise
    )
