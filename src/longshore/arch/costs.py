"""What a decoder costs: parameters, FLOPs of a step, memory of a rank and the capacity. No torch.

FLOPs: in, a DecoderConfig and the sequences' real lengths; out, exact integers. A product of (m, k)
and (k, n) matrices is 2·m·k·n FLOPs, and attention counts only the pairs a token may see, n(n+1)/2
of a sequence of n, whatever a kernel really computes. Backward is twice the forward: each product
has two gradients. Recomputation is not counted, and only matrix products are.

A decoder with one MLP of width 8, hidden width 4 and vocabulary 10, for 3 tokens: MLP
2·3·(3·4·8) = 576, head 2·3·4·10 = 240, so 816 forward and 2,448 for a step.

Memory: in, a DecoderConfig and how it is trained; out, bytes, and the capacity that is left with
its calculation.

For each token a block saves what its backward reads; with recomputation only the block's input is
saved, and one block at a time has the rest. tiny-llama's block in float32 saves 1,408 values and 10
statistics per token, 5,672 bytes; with recomputation 64 values, 256 bytes.

The model: weights and gradients in float32 (float64 for float64), two moments of the optimizer, and
a copy of the weights in `dtype` where that is smaller. How lanes share it:

    zero3   weights, gradients, moments sharded; two blocks, embedding and head are gathered
    zero2   weights and gradients gathered during a step; float32 weights and moments sharded
    none    every lane holds everything

Shared packs: arch/exchanged.py counts what a layer gathers of them.

These are estimates: a tenth is kept free for kernels' buffers and fragmentation.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from longshore.arch.decoder import DecoderConfig
from longshore.arch.exchanged import exchanged_bytes, gathered_rows
from longshore.arch.part import Saved, Sharing
from longshore.choices import ShardMode, names_of
from longshore.ops.sizes import loss_bytes


def step_flops(config: DecoderConfig, lengths: Sequence[int]) -> int:
    """FLOPs of forward and backward over these sequences, together or in any packs."""
    return 3 * sum(
        count * forward_flops(config, length) for length, count in Counter(lengths).items()
    )


def forward_flops(config: DecoderConfig, length: int) -> int:
    """FLOPs of one sequence's forward, with the logits of every token at every depth."""
    width, depths = config.width, len(config.mtp)
    kinds = Counter((*config.layers, *config.mtp))
    layers = sum(count * layer.flops(width, length) for layer, count in kinds.items())
    joins = depths * 2 * length * 2 * width * width
    return layers + joins + (1 + depths) * 2 * length * width * config.vocab_size


def parameter_count(config: DecoderConfig) -> int:
    """Parameters of the decoder; a tied head has none of its own."""
    width = config.width
    layers = sum(layer.parameters(width) for layer in (*config.layers, *config.mtp))
    joins = len(config.mtp) * (2 * width + 3) * width
    return layers + joins + config.vocab_size * width * (1 if config.tied else 2) + width


SHARD_MODES = names_of(ShardMode)
ITEM_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

KEPT_FREE = 10
"""One part in ten is kept free."""
STEP_TOKENS = 256
"""A capacity is a multiple of this."""
INPUT_BYTES = 48
"""Per token: id, label, position, index and masks, and the loss's copies of label and mask."""


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Bytes of the model on a rank."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    """Blocks that are gathered temporarily, with their gradients."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.gathered


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes per token."""

    saved: int
    """From forward to backward."""
    working: int
    """While its block is in backward."""


def model_bytes(config: DecoderConfig, *, lanes: int, shard: str, dtype: str) -> ModelBytes:
    """Bytes of weights, gradients and optimizer on each of `lanes` that share them as `shard`."""
    item = _item(dtype)
    master = max(item, 4)
    if shard not in SHARD_MODES:
        raise ValueError(f"shard is {shard!r}; known are {', '.join(SHARD_MODES)}")
    if lanes < 1:
        raise ValueError(f"lanes is {lanes}; it must be at least 1")
    count = parameter_count(config)
    part = -(-count // lanes)
    copy = item * count if item < master else 0
    if shard == "none":
        return ModelBytes(master * count + copy, master * count, 2 * master * count, 0)
    if shard == "zero2":
        gathered = copy or master * count
        return ModelBytes(master * part + gathered, master * (part + count), 2 * master * part, 0)
    layers = (*config.layers, *config.mtp)
    block = max(layer.parameters(config.width) for layer in layers)
    ends = count - sum(layer.parameters(config.width) for layer in layers)
    return ModelBytes(
        master * part,
        master * part,
        2 * master * part,
        item * (2 * block + ends) + master * (block + ends),
    )


def token_bytes(config: DecoderConfig, *, dtype: str, recompute: bool) -> TokenBytes:
    """Bytes of one token; recompute: blocks save only their input and recompute in backward."""
    width = config.width
    item = _item(dtype)
    layers = (*config.layers, *config.mtp)
    blocks = [_bytes(layer.saved(width), item) for layer in layers]
    tables = sum(_bytes(Saved(0, rope.rotary_dim or 0), item) for rope in config.ropes)
    ends = INPUT_BYTES + tables + _bytes(Saved(2 * width, 2), item)
    # Of each depth: embedding, two norms' outputs and statistics, the joined input, the head's.
    ends += len(config.mtp) * _bytes(Saved(7 * width, 3), item)
    saved = ends + (len(blocks) * width * item if recompute else sum(blocks))
    return TokenBytes(saved=saved, working=max(blocks) * (2 if recompute else 1))


def logits_bytes(config: DecoderConfig, tokens: int, *, dtype: str) -> int:
    """The loss's chunk of logits, and the gradients of the head: the most of any backend."""
    plain, by_kernels = (
        loss_bytes(
            tokens,
            vocabulary=config.vocab_size,
            width=config.width,
            item=_item(dtype),
            heads=1 + len(config.mtp),
            kernels=kernels,
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
) -> tuple[int, list[str]]:
    """The tokens a lane may hold in a round, a multiple of 256, and the calculation as lines.

    cp_sizes: those that a pack may have; a lane may be full of its shard of one.
    """
    model = model_bytes(config, lanes=lanes, shard=shard, dtype=dtype)
    token = token_bytes(config, dtype=dtype, recompute=recompute)

    def exchanged(tokens: int) -> tuple[int, int]:
        """The most bytes, and the CP size that needs them, negative."""
        return max(
            (exchanged_bytes(config, size, tokens, sharing=sharing, item=_item(dtype)), -size)
            for size in cp_sizes
        )

    def needed(tokens: int) -> int:
        loss = logits_bytes(config, tokens, dtype=dtype)
        return (token.saved + token.working) * tokens + exchanged(tokens)[0] + loss

    free = memory_bytes // KEPT_FREE
    room = memory_bytes - free - model.total
    capacity = STEP_TOKENS * _largest(
        room // (STEP_TOKENS * (token.saved + token.working)),
        lambda steps: needed(steps * STEP_TOKENS) <= room,
    )
    tokens = max(capacity, STEP_TOKENS)
    loss, (in_layer, cp_size) = logits_bytes(config, tokens, dtype=dtype), exchanged(tokens)
    each = token.saved + token.working + -(-in_layer // tokens)
    lines = [
        f"memory {_size(memory_bytes)}, {_size(free)} of it kept free",
        f"model {_size(model.total)} with {shard} over {lanes} lanes: "
        f"weights {_size(model.parameters)}, gradients {_size(model.gradients)}, "
        f"optimizer {_size(model.optimizer)}, gathered {_size(model.gathered)}",
        f"loss {_size(loss)}: a chunk of logits, and gradients of the head and its inputs",
        f"a token {_size(each)}: {_size(token.saved)} saved"
        f"{', blocks recomputed' if recompute else ''}, {_size(token.working)} in backward, "
        f"{_size(-(-in_layer // tokens))} gathered or expanded by a layer at CP size {-cp_size}",
        *_shared_pack(capacity, max(cp_sizes)),
        f"capacity {_size(max(room - loss, 0))} / {_size(each)} = {capacity} tokens",
    ]
    if not capacity:
        ways = [
            *([] if recompute else ["recompute blocks in backward"]),
            *([] if shard == "zero3" else ["shard the model as zero3"]),
            *([] if max(cp_sizes) == 1 else ["allow only smaller CP sizes"]),
            "use more lanes or a smaller model",
        ]
        raise ValueError(_no_room(room - loss, each, ways=ways, lines=lines))
    return capacity, lines


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


def _bytes(saved: Saved, item: int) -> int:
    return saved.values * item + saved.stats * max(item, 4)


def _item(dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype is {dtype!r}; known are {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def _size(amount: int) -> str:
    """1610612736 as "1.5 GiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if amount >= unit:
            return f"{amount / unit:.1f} {name}"
    return f"{amount} B"
