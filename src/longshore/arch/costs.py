"""What a decoder costs: parameters, FLOPs of a step, memory of a rank and the capacity. No torch.

FLOPs: in, a DecoderConfig and the sequences' real lengths; out, exact integers. A product of (m, k)
and (k, n) matrices is 2·m·k·n FLOPs, and attention counts only the pairs a token may see, n(n+1)/2
of a sequence of n, whatever a kernel really computes. Backward is twice the forward: each product
has two gradients, but for those with a weight that LoRA freezes, which have one, and factors have
products of their own. Recomputation is not counted, and only matrix products are. These FLOPs a
second, divided by the vendor's dense peak, are the MFU wherever Longshore shows one.

A decoder with one MLP of width 8, hidden width 4 and vocabulary 10, for 3 tokens: MLP
2·3·(3·4·8) = 576, head 2·3·4·10 = 240, so 816 forward and 2,448 for a step.

Memory: in, a DecoderConfig and how it is trained; out, bytes, and the capacity that is left with
its calculation.

For each token a block saves what its backward reads; with recomputation only the block's input is
saved, and one block at a time has the rest. tiny-llama's block in float32 saves 1,408 values and 10
statistics per token, 5,672 bytes; with recomputation 64 values, 256 bytes.

The model: arch/model_memory.py.

Shared packs: arch/exchanged.py counts what a layer gathers of them.

Pipelines: a rank has the parameters of its stages, and a copy of the embedding for each stage that
needs one. It saves the activations of several rounds: with 1F1B rank p those of pp − p, with
interleaving of 2·(pp − p − 1) + (vpp − 1)·pp + 1 of its stages. The capacity is that of the rank
with the least.

Tensor and expert parallelism: arch/stage_memory.py says what of a layer a rank has.

These are estimates: a tenth is kept free for kernels' buffers and fragmentation.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longshore.arch.decoder import DecoderConfig
from longshore.arch.exchanged import exchanged_by, gathered_rows
from longshore.arch.feed_forward import MoEConfig
from longshore.arch.model_memory import ModelBytes, item_bytes, model_bytes
from longshore.arch.part import Part, Sharing
from longshore.arch.stage_memory import (
    WHOLE,
    ModelSplit,
    block_saved,
    block_working,
    most_in_flight,
    rank_layers,
    sent_width,
    stage_saved,
    whole_model,
)
from longshore.ops.sizes import loss_bytes
from longshore.plan.layout import Layout


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
    parts = [part for layer in (*config.layers, *config.mtp) for part in layer.parts]
    total = sum(times * weight_flops(part, width) for part, times in Counter(parts).items())
    if residuals is not None:
        mixing = sum(each.flops for each in residuals.products(width))
        total += len(parts) * mixing + (1 + depths) * 2 * config.row_width * residuals.count
    return total + depths * 4 * width * width + (1 + depths) * 2 * width * config.vocab_size


def weight_flops(part: Part, width: int) -> int:
    """Forward FLOPs of a token in a part's products with weights; the rest is its core."""
    if isinstance(part, MoEConfig):
        return part.flops(width, 1)
    products = getattr(part, "products", None)
    if products is None:
        return min(part.flops(width, 1), 2 * part.parameters(width))
    return sum(each.flops for each in products(width))


def factor_flops(config: DecoderConfig) -> int:
    """FLOPs of a token in the products of low-rank factors, forward and backward."""
    if config.lora is None:
        return 0
    parts = Counter(part for layer in (*config.layers, *config.mtp) for part in layer.parts)
    known = {part: part.products(config.width) for part in parts if hasattr(part, "products")}
    return 3 * sum(
        parts[part] * sum(each.flops for each in config.lora.factors(products))
        for part, products in known.items()
    )


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


def token_bytes(
    config: DecoderConfig,
    *,
    dtype: str,
    recompute: bool,
    layout: Layout | None = None,
    pp_rank: int = 0,
    split: ModelSplit = WHOLE,
) -> TokenBytes:
    """Bytes of one token of each round; recompute: blocks save only their input.

    layout, pp_rank: the pipeline and which of its ranks; None for the whole model. split: over how
    many ranks its layers are split.
    """
    item, stages = item_bytes(dtype), layout or whole_model(config)
    each = {
        number: stage_saved(config, stages, number, item=item, recompute=recompute, split=split)
        for number in stages.of_rank(pp_rank)
    }
    layers, width = rank_layers(config, stages, pp_rank, split), config.width
    times = 2 if recompute else 1
    blocks = [
        times * block_saved(layer, width, item=item, split=split, lora=config.lora)
        + block_working(layer, width, item=item, split=split)
        for layer in layers
    ]
    working = max(blocks, default=0)
    if stages.pp > 1:
        # A message that is received and one that is sent.
        row = max(sent_width(config, stages, number) for number in each)
        working += -(-2 * row * item // split.tp)
    return TokenBytes(saved=most_in_flight(stages, pp_rank, each), working=working)


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
    config: DecoderConfig,
    *,
    memory_bytes: int,
    lanes: int,
    shard: str,
    dtype: str,
    recompute: bool,
    cp_sizes: Sequence[int],
    sharing: Sharing,
    layout: Layout | None = None,
    split: ModelSplit = WHOLE,
) -> tuple[int, list[str]]:
    """The tokens a lane may hold in a round, a multiple of 256, and the calculation as lines.

    With a pipeline they are those of the rank with the least.
    """
    stages = layout or whole_model(config)
    ranks = [
        RankMemory(
            config=config,
            layout=stages,
            pp_rank=pp_rank,
            memory_bytes=memory_bytes,
            lanes=lanes,
            shard=shard,
            dtype=dtype,
            recompute=recompute,
            cp_sizes=cp_sizes,
            sharing=sharing,
            split=split,
        ).capacity()
        for pp_rank in range(stages.pp)
    ]
    return min(ranks, key=lambda rank: rank[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What a pipeline rank needs; without a pipeline there is one."""

    config: DecoderConfig
    """The whole model."""
    layout: Layout
    """The stages."""
    pp_rank: int
    """Which rank it is."""
    memory_bytes: int
    """What it has."""
    lanes: int
    """That share the model."""
    shard: str
    """How they share it."""
    dtype: str
    """Of the arithmetic."""
    recompute: bool
    """Whether blocks are recomputed."""
    cp_sizes: Sequence[int]
    """Those that a pack may have; a lane may be full of its shard of one."""
    sharing: Sharing
    """How lanes share a pack."""
    split: ModelSplit
    """Over how many ranks its layers are split."""

    def exchanged(self, tokens: int) -> tuple[int, int]:
        """The most bytes, and the CP size that needs them, negative."""
        layers = rank_layers(self.config, self.layout, self.pp_rank, self.split)
        item, sharing = item_bytes(self.dtype), self.sharing
        return max(
            (exchanged_by(layers, size, tokens, sharing=sharing, item=item), -size)
            for size in self.cp_sizes
        )

    def loss(self, tokens: int) -> int:
        numbers = self.layout.of_rank(self.pp_rank)
        has_head = any(self.layout.stages[number].head for number in numbers)
        if not has_head:
            return 0
        return logits_bytes(self.config, tokens, dtype=self.dtype, tp=self.split.tp)

    def capacity(self) -> tuple[int, list[str]]:
        """Tokens, and how they are calculated."""
        model = model_bytes(
            self.config,
            lanes=self.lanes,
            shard=self.shard,
            dtype=self.dtype,
            layout=self.layout,
            pp_rank=self.pp_rank,
            split=self.split,
        )
        token = token_bytes(
            self.config,
            dtype=self.dtype,
            recompute=self.recompute,
            layout=self.layout,
            pp_rank=self.pp_rank,
            split=self.split,
        )
        memory = self.memory_bytes
        free = memory // KEPT_FREE
        room = memory - free - model.total
        fixed = token.saved + token.working

        def fits(steps: int) -> bool:
            tokens = steps * STEP_TOKENS
            return fixed * tokens + self.exchanged(tokens)[0] + self.loss(tokens) <= room

        capacity = STEP_TOKENS * _largest(room // (STEP_TOKENS * fixed), fits)
        tokens = max(capacity, STEP_TOKENS)
        loss, (in_layer, cp_size) = self.loss(tokens), self.exchanged(tokens)
        gathered = -(-in_layer // tokens)
        lines = [
            f"memory {_size(memory)}, {_size(free)} of it kept free",
            *self._lines(model, token, loss=loss, gathered=gathered, cp_size=-cp_size),
            *_shared_pack(capacity, max(self.cp_sizes)),
            f"capacity {_size(max(room - loss, 0))} / {_size(fixed + gathered)} = "
            f"{capacity} tokens",
        ]
        if not capacity:
            raise ValueError(
                _no_room(room - loss, fixed + gathered, ways=self._ways(), lines=lines)
            )
        return capacity, lines

    def _lines(
        self, model: ModelBytes, token: TokenBytes, *, loss: int, gathered: int, cp_size: int
    ) -> list[str]:
        piped = self.layout.pp > 1
        rank = f" of pipeline rank {self.pp_rank} in {self.layout}" if piped else ""
        split = f", tp {self.split.tp}, ep {self.split.ep}" if self.split.any else ""
        return [
            f"model {_size(model.total)}{rank} with {self.shard} over {self.lanes} lanes{split}: "
            f"weights {_size(model.parameters)}, gradients {_size(model.gradients)}, "
            f"optimizer {_size(model.optimizer)}, gathered {_size(model.gathered)}",
            f"loss {_size(loss)}: a chunk of logits, and gradients of the head and its inputs",
            f"a token {_size(token.saved + token.working + gathered)}: {_size(token.saved)} saved"
            f"{' for all rounds in flight' if piped else ''}"
            f"{', blocks recomputed' if self.recompute else ''}, {_size(token.working)} in "
            f"backward, {_size(gathered)} gathered or expanded by a layer at CP size {cp_size}",
        ]

    def _ways(self) -> list[str]:
        return [
            *([] if self.recompute else ["recompute blocks in backward"]),
            *([] if self.shard == "zero3" else ["shard the model as zero3"]),
            *([] if max(self.cp_sizes) == 1 else ["allow only smaller CP sizes"]),
            "use more lanes or a smaller model",
        ]


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, where all below one that fits do; else 0."""
    return bisect_left(range(1, max(most, 0) + 1), True, key=lambda number: not fits(number))


def _shared_pack(capacity: int, cp_size: int) -> list[str]:
    rows = gathered_rows(capacity, cp_size)
    line = f"at CP size {cp_size} a lane's layer reads up to {rows:,} tokens of a full pack"
    return [line] if cp_size > 1 else []


def _no_room(room: int, each: int, *, ways: list[str], lines: list[str]) -> str:
    lacking = STEP_TOKENS * each - room
    return (
        f"not even {STEP_TOKENS} tokens fit into a lane's memory: {_size(lacking)} are missing; "
        f"{', or '.join(ways)}\n" + "\n".join(lines)
    )


def _size(amount: int) -> str:
    """1610612736 as "1.5 GiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if amount >= unit:
            return f"{amount / unit:.1f} {name}"
    return f"{amount} B"
