"""Tensor parallelism as data: a TP rank's part of each layer, and of which tensors it has what.

In: the config of a part, the number of TP ranks, a rank. Out: the config of what one rank has
(`on_tp_rank`), and for each of its split parameters a TensorCut, which says where the rank's tensor
lies in the whole one. Parameters without one are whole on every rank.

Attention of 4 heads and 2 KV heads of 16 dims on 2 ranks: a rank has 2 heads and 1 KV head. Rank 1:

    q_proj.weight   TensorCut(dim 0 of 64, (Span(32, 64),))        its heads' rows
    k_proj.weight   TensorCut(dim 0 of 32, (Span(16, 32),))
    o_proj.weight   TensorCut(dim 1 of 64, (Span(32, 64),))        its heads' columns

Mamba2's in_proj has rows of z, x, B, C and dt, one after the other; a rank has its heads' or
groups' rows of each, so its cut has five spans. Where there are fewer KV heads or groups than ranks
several ranks have the same ones: a Span says which copy it is, of how many. A bias that follows a
sum over the ranks is on the first alone; the others' cut has no span.

Expert parallelism as data: which experts of a layer a rank has. Pure Python.

In: a decoder's config, the number of EP ranks, a rank. Out: a TensorCut of the experts' parameters,
whose first dim counts the experts, or an error that says which sizes work.

8 experts on 4 EP ranks, rank 2: dim 0 of 8, (Span(4, 6),), axis "ep", so experts 4 and 5.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal, cast

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.part import Part
from longshore.arch.scan import DeltaNetConfig, Mamba2Config

Axis = Literal["tp", "ep"]
MOST_TP = 64
"""The largest number of ranks that an error suggests."""


@dataclass(frozen=True, slots=True)
class Span:
    """Indices start … stop of a dim. `copies` ranks have them; this rank is number `copy`."""

    start: int
    stop: int
    copy: int = 0
    copies: int = 1


@dataclass(frozen=True, slots=True)
class TensorCut:
    """A rank's part of a tensor: some spans of one dim, one after the other."""

    dim: int
    """The dim that is cut."""
    size: int
    """Of that dim in the whole tensor."""
    spans: tuple[Span, ...]
    """In the order of the rank's tensor; () if the rank does not have the tensor at all."""
    axis: Axis = "tp"
    """Over which ranks: those of tensor or of expert parallelism."""

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole tensor, from that of a rank's."""
        return (*local[: self.dim], self.size, *local[self.dim + 1 :])


@dataclass(frozen=True, slots=True)
class TPRank:
    """One of `tp` ranks: which part of a dim of equal units it has."""

    tp: int
    rank: int

    def span(self, units: int, width: int = 1) -> Span:
        """Of `units` heads, groups or channels, each of `width` indices; ranks may share one."""
        if units % self.tp == 0:
            each = units // self.tp * width
            return Span(self.rank * each, (self.rank + 1) * each)
        copies = self.tp // units
        unit = self.rank // copies
        return Span(unit * width, (unit + 1) * width, self.rank % copies, copies)

    def joined(self, parts: Sequence[tuple[int, int]], *, dim: int = 0) -> TensorCut:
        """Parts of (units, width) one after the other along `dim`."""
        spans, start = list[Span](), 0
        for units, width in parts:
            span = self.span(units, width)
            spans.append(replace(span, start=start + span.start, stop=start + span.stop))
            start += units * width
        return TensorCut(dim, start, tuple(spans))

    def of(self, units: int, width: int = 1, *, dim: int = 0) -> TensorCut:
        return self.joined([(units, width)], dim=dim)

    def first_only(self, size: int) -> TensorCut:
        """A vector that the first rank alone has."""
        return TensorCut(0, size, () if self.rank else (Span(0, size),))

    def vocabulary(self, rows: int) -> TensorCut:
        """Of the embedding or the head: as even as can be."""
        start, stop = (rows * rank // self.tp for rank in (self.rank, self.rank + 1))
        return TensorCut(0, rows, (Span(start, stop),))


def on_tp_rank(part: Part, tp: int) -> Part:
    """The config of what each of `tp` ranks has; the same config if ranks do not split it."""
    _check_splits((part,), tp)
    return _split(part, tp)


def tp_refusals(config: DecoderConfig, tp: int) -> Iterator[str]:
    """What is wrong with the first part that `tp` ranks cannot split, and the sizes that work."""
    parts = (part for layer in (*config.layers, *config.mtp) for part in layer.parts)
    yield from _refusals(dict.fromkeys(parts), tp)


def decoder_on_tp_rank(config: DecoderConfig, tp: int) -> DecoderConfig:
    """All layers as one of `tp` ranks has them; embedding and head stay as they are."""
    if tp == 1:
        return config
    parts = (part for layer in (*config.layers, *config.mtp) for part in layer.parts)
    _check_splits(dict.fromkeys(parts), tp)

    def local(layer: LayerConfig) -> LayerConfig:
        mixer, mlp = (part and _split(part, tp) for part in (layer.mixer, layer.mlp))
        return LayerConfig(mixer, mlp)

    layers, mtp = (tuple(map(local, group)) for group in (config.layers, config.mtp))
    return replace(config, layers=layers, mtp=mtp)


def is_tp_split(part: Part) -> bool:
    """Whether TP ranks split this kind of part; else each has all of it."""
    return type(part) in SPLITS


def cuts_of(part: Part, width: int, *, tp: int, rank: int) -> dict[str, TensorCut]:
    """By names of parameters below the part; width: of the hidden states."""
    cuts = CUTS.get(type(part))
    named: dict[str, TensorCut] = {} if cuts is None else cuts(part, width, TPRank(tp, rank))
    return named


def _split(part: Part, tp: int) -> Part:
    split = SPLITS.get(type(part))
    return part if split is None or tp == 1 else cast(Part, split(part, tp))


def _check_splits(parts: Collection[Part], tp: int) -> None:
    if why := next(_refusals(parts, tp), ""):
        raise ValueError(why)


def _refusals(parts: Collection[Part], tp: int) -> Iterator[str]:
    if wrong := next(filter(None, (_refusal(part, tp) for part in parts)), ""):
        works = [n for n in range(1, MOST_TP + 1) if not any(_refusal(part, n) for part in parts)]
        yield f"{wrong}; use one of {', '.join(map(str, works))}"


def _refusal(part: Part, tp: int) -> str:
    try:
        _split(part, tp)
    except ValueError as error:
        return str(error)
    return ""


def _divided(name: str, units: int, tp: int) -> int:
    if units % tp:
        raise ValueError(f"parallel.tp is {tp}, which does not divide the {units} {name}")
    return units // tp


def _shared(name: str, units: int, tp: int) -> int:
    """Units of a rank: a share of them, or one that several ranks have."""
    return 1 if tp % units == 0 else _divided(name, units, tp)


def _attention(part: AttentionConfig, tp: int) -> AttentionConfig:
    heads = _divided("attention heads", part.heads, tp)
    return replace(part, heads=heads, kv_heads=_shared("KV heads", part.kv_heads, tp))


def _mla(part: MLAConfig, tp: int) -> MLAConfig:
    return replace(part, heads=_divided("attention heads", part.heads, tp))


def _mamba2(part: Mamba2Config, tp: int) -> Mamba2Config:
    norm_groups = part.norm_groups or part.groups
    return replace(
        part,
        heads=_divided("heads of Mamba2", part.heads, tp),
        groups=_shared("groups of Mamba2", part.groups, tp),
        norm_groups=_shared("norm groups of Mamba2", norm_groups, tp),
    )


def _delta_net(part: DeltaNetConfig, tp: int) -> DeltaNetConfig:
    keys = _divided("key heads of the delta net", part.key_heads, tp)
    return replace(part, key_heads=keys, value_heads=part.value_heads // tp)


def _mlp(part: MLPConfig, tp: int) -> MLPConfig:
    return replace(part, width=_divided("channels of a feed-forward part", part.width, tp))


SPLITS: dict[type, Callable[[Any, int], Any]] = {
    AttentionConfig: _attention,
    MLAConfig: _mla,
    Mamba2Config: _mamba2,
    DeltaNetConfig: _delta_net,
    MLPConfig: _mlp,
}
"""For each kind of part that TP ranks split, the config of what one has."""


def norm_ranks(part: Mamba2Config, tp: int) -> int:
    """How many ranks hold one group of channels that is normed together."""
    return max(1, tp // (part.norm_groups or part.groups))


def _attention_cuts(part: AttentionConfig, width: int, at: TPRank) -> dict[str, TensorCut]:
    query = part.head_dim * (2 if part.gate else 1)
    named = {
        "q_proj.weight": at.of(part.heads, query),
        "k_proj.weight": at.of(part.kv_heads, part.head_dim),
        "v_proj.weight": at.of(part.kv_heads, part.head_dim),
        "o_proj.weight": at.of(part.heads, part.head_dim, dim=1),
    }
    if part.bias:
        named |= {f"{name}_proj.bias": named[f"{name}_proj.weight"] for name in "qkv"}
    return named | ({"o_proj.bias": at.first_only(width)} if part.output_bias else {})


def _mla_cuts(part: MLAConfig, width: int, at: TPRank) -> dict[str, TensorCut]:
    queries = "q_proj.weight" if part.q_rank is None else "q_up.weight"
    named = {
        queries: at.of(part.heads, part.head_dim),
        "kv_up.weight": at.of(part.heads, part.nope_dim + part.value_dim),
        "o_proj.weight": at.of(part.heads, part.value_dim, dim=1),
    }
    return named | ({"o_proj.bias": at.first_only(width)} if part.bias else {})


def _mamba2_cuts(part: Mamba2Config, width: int, at: TPRank) -> dict[str, TensorCut]:
    x, group = (part.heads, part.head_dim), (part.groups, part.state_dim)
    named = {
        "in_proj.weight": at.joined([x, x, group, group, (part.heads, 1)]),
        "conv1d.weight": at.joined([x, group, group]),
        "norm.weight": at.of(*x),
        "out_proj.weight": at.of(*x, dim=1),
        **{f"per_head.{name}": at.of(part.heads) for name in ("A_log", "dt_bias", "D")},
    }
    if part.bias:
        biases = {"in_proj.bias": named["in_proj.weight"], "out_proj.bias": at.first_only(width)}
        named |= biases
    return named | ({"conv1d.bias": named["conv1d.weight"]} if part.conv_bias else {})


def _delta_net_cuts(part: DeltaNetConfig, width: int, at: TPRank) -> dict[str, TensorCut]:
    served = part.value_heads // part.key_heads
    key, value = (part.key_heads, part.key_dim), (part.value_heads, part.value_dim)
    return {
        "in_proj_qkvz.weight": at.of(part.key_heads, 2 * part.key_dim + 2 * served * value[1]),
        "in_proj_ba.weight": at.of(part.key_heads, 2 * served),
        "conv1d.weight": at.joined([key, key, value]),
        "out_proj.weight": at.of(*value, dim=1),
        **{f"per_head.{name}": at.of(part.value_heads) for name in ("A_log", "dt_bias")},
    }


def _mlp_cuts(part: MLPConfig, width: int, at: TPRank) -> dict[str, TensorCut]:
    inner = ("gate_proj.weight", "up_proj.weight") if part.gated else ("up_proj.weight",)
    named = {name: at.of(part.width) for name in inner}
    return named | {"down_proj.weight": at.of(part.width, dim=1)}


CUTS: dict[type, Callable[[Any, int, TPRank], dict[str, TensorCut]]] = {
    AttentionConfig: _attention_cuts,
    MLAConfig: _mla_cuts,
    Mamba2Config: _mamba2_cuts,
    DeltaNetConfig: _delta_net_cuts,
    MLPConfig: _mlp_cuts,
}
"""The same kinds; the names are those of the modules in model/."""


def ep_refusals(config: DecoderConfig, ep: int) -> Iterator[str]:
    """Why this decoder's experts cannot be divided evenly over `ep` ranks, and what works."""
    layers = (*config.layers, *config.mtp)
    sizes = [layer.mlp.experts for layer in layers if isinstance(layer.mlp, MoEConfig)]
    if ep == 1:
        return
    if not sizes:
        yield f"parallel.ep is {ep}, but the model has no experts; use parallel.ep=1"
    for odd in (size for size in sizes if size % ep):
        most = gcd(*sizes)
        works = ", ".join(str(size) for size in range(1, most + 1) if most % size == 0)
        yield (
            f"parallel.ep is {ep}, which does not divide the {odd} experts of a layer; use one of "
            f"{works}"
        )


def check_ep(config: DecoderConfig, ep: int) -> None:
    """Raises if this decoder's experts cannot be divided evenly over `ep` ranks."""
    if why := next(ep_refusals(config, ep), ""):
        raise ValueError(why)


def expert_cut(experts: int, *, ep: int, ep_rank: int) -> TensorCut:
    """An EP rank's experts, of a parameter (experts, …)."""
    assert experts % ep == 0, "check_ep comes first"
    each = experts // ep
    return TensorCut(0, experts, (Span(ep_rank * each, (ep_rank + 1) * each),), "ep")
