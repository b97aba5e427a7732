"""What each part of a layer keeps and needs on a GPU with Longshore's kernels, per token. No torch.

In: the config of a part, as a TP rank has it, and the hidden width. Out: the values that are kept
from forward to backward, and the most that exist beside them while the part is in backward, with
the gradients of its weights. `Part.saved` is an upper bound for every backend, plain torch too;
this is what ops/kernels really keep.

SwiGLU of width 3072 keeps gate and up, 6,144 values a token; plain torch would keep 12,288. In
backward three rows of 3072 exist beside them: the gradients of the product, the gate and up.

A part that is not known here, such as a mixer of your own, counts as `Part.saved` says, and as much
again in backward.
"""

from dataclasses import dataclass
from functools import singledispatch

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.part import Part, Saved
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.ops.sizes import CHUNK_ROWS


@dataclass(frozen=True, slots=True)
class BackwardMoment:
    """One moment of a part's backward."""

    rows: Saved
    """Of each token, beside what the part has saved."""
    gradients: int
    """Parameters whose gradients exist by then."""


@dataclass(frozen=True, slots=True)
class PartMemory:
    """A part on a GPU."""

    saved: Saved
    """Of each token from forward to backward, without the part's input and its norm's."""
    backward: tuple[BackwardMoment, ...]
    """The moments that may need most."""


@singledispatch
def part_memory(part: Part, width: int) -> PartMemory:
    """Of a part that is not known: what it says itself."""
    saved, count = part.saved(width), part.parameters(width)
    return PartMemory(saved, (BackwardMoment(saved + Saved(2 * width), count),))


@part_memory.register
def _attention(part: AttentionConfig, width: int) -> PartMemory:
    """Flash attention's backward adds up dq in float32, and with shared KV heads dk and dv."""
    queries, keys = part.heads * part.head_dim, part.kv_heads * part.head_dim
    saved = Saved(2 * queries + 2 * keys, part.heads)
    if part.qk_norm or (part.rope is None and part.gate):
        saved += Saved(queries * (2 if part.gate else 1) + keys * part.qk_norm)
    elif part.gate:
        saved += Saved(2 * queries)
    if part.gate:
        saved += Saved(queries)
    shared = 2 * keys if part.heads > part.kv_heads else 0
    core = Saved(2 * queries + 2 * keys + 2 * width, queries + shared + 2 * part.heads)
    output = width * queries
    return PartMemory(saved, (BackwardMoment(core, output),))


@part_memory.register
def _mla(part: MLAConfig, width: int) -> PartMemory:
    """Besides what arch/exchanged.py counts: keys and values made from latents, head by head."""
    queries, values = part.heads * part.head_dim, part.heads * part.value_dim
    core = Saved(queries + values + 2 * width, queries)
    return PartMemory(part.saved(width), (BackwardMoment(core, values * width),))


@part_memory.register
def _mlp(part: MLPConfig, width: int) -> PartMemory:
    kept = (2 if part.gated else 1) * part.width
    inner = BackwardMoment(Saved(kept + part.width + width), 0)
    weights = BackwardMoment(Saved(kept + 2 * width), part.parameters(width))
    # Clipped by plain torch, which keeps gate and up as they were.
    return PartMemory(Saved((2 if part.limit else 1) * kept), (inner, weights))


@part_memory.register
def _experts(part: MoEConfig, width: int) -> PartMemory:
    """Experts keep gate and up of each row; the router its float32 input and the scores."""
    if part.limit:  # which the kernels do not know
        saved, count = part.saved(width), part.parameters(width)
        return PartMemory(saved, (BackwardMoment(saved + Saved(2 * width), count),))
    inner, top_k = part.width, part.top_k
    scores = (3 if part.aux_weight else 1) * part.experts
    saved = Saved(2 * top_k * inner, width + scores + 8 * top_k)
    saved += Saved(2 * part.shared_width + (width + 1) * part.shared_gate)
    one = part.experts * width * inner
    rows = width + 4 * inner, width + 3 * inner, width + 2 * inner
    moments = (
        BackwardMoment(Saved(top_k * row + 2 * width), count)
        for row, count in zip(rows, (0, one, 3 * one), strict=True)
    )
    return PartMemory(saved, tuple(moments))


@part_memory.register
def _mamba2(part: Mamba2Config, width: int) -> PartMemory:
    """The states that enter and leave each chunk exist in backward alone."""
    inner, conv = part.inner, part.conv_dim
    saved = Saved(part.projected + conv + 2 * inner, 3 * part.heads + part.groups)
    states = 2 * inner * part.state_dim // CHUNK_ROWS
    scan = Saved(3 * inner + conv + states + part.groups * CHUNK_ROWS + 2 * width, 4 * part.heads)
    taps = Saved(2 * inner + 2 * conv + 2 * width, conv)
    return PartMemory(saved, (BackwardMoment(scan, inner * width), BackwardMoment(taps, 0)))


@part_memory.register
def _delta_net(part: DeltaNetConfig, width: int) -> PartMemory:
    """flash-linear-attention keeps normed q and k and a chunk's matrix; states in backward."""
    heads, values, conv = part.value_heads, part.values, part.conv_dim
    kept = 2 * conv + 3 * values + 2 * part.keys + heads * CHUNK_ROWS
    saved = Saved(kept, 6 * heads + 2 * part.key_heads)
    keys = heads * part.key_dim
    states = 2 * values * part.key_dim // CHUNK_ROWS
    scan = Saved(3 * keys + 5 * values + states + 2 * width, 2 * keys + 4 * heads)
    return PartMemory(saved, (BackwardMoment(scan, values * width),))
