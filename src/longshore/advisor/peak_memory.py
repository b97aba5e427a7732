"""The most memory that a rank's tensors take during a step on a GPU, part by part. No torch.

In: a decoder, the tokens of the fullest round and how the rank trains. Out: a MemoryBreakdown, the
bytes that exist together at the moment that needs most. torch.cuda.max_memory_allocated measures
the same. arch/costs.py has upper bounds, from which a run takes its own capacity; this is what to
expect. bench/advised.py compares it with runs.

FSDP2 keeps, for each parameter, 4 bytes of float32 weight, 8 of AdamW's moments, and where the
arithmetic is bfloat16 a copy of 2. From its second round on a step has summed gradients of 4. So
Qwen3-0.6B, 596 million parameters on one lane, begins a round with 18 bytes each, 10.0 GiB. 27,762
tokens save 38,976 bytes in each of 28 layers, 28.2 GiB. The loss adds a chunk of logits with its
gradient, 1.7 GiB, and the head's gradient in float32, 0.6 GiB. An H200 measured 40.8 GiB.

The moments that are compared:

    loss        all layers' activations, a chunk of logits, the gradients of head and hidden states
    layer       in backward, from the last one down: what is still saved, and what the part needs
    reduction   in the last round, after a layer: its gradients, copied to be sent, and as received
    optimizer   weights, gradients and moments alone

With a pipeline all rounds in flight count as saved at every moment.

What each part keeps and needs is what ops/kernels really keep, as the part says
(`Part.kernel_memory`); `Part.saved` is an upper bound for every backend, plain torch too. SwiGLU of
width 3072 keeps gate and up, 6,144 values a token; plain torch would keep 12,288. In backward three
rows of 3072 exist beside them: the gradients of the product, the gate and up.

Communicators of process groups take memory of their own: rank 0 joins most groups, a CP group of
every size, and its stage holds a copy of the embedding. Lanes 2, tp 2 and pp 2 give 16 groups, 8 of
them on the GPU; 2,048 times as many lanes add 11 CP groups.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache

from longshore.arch.costs import exchanged_by
from longshore.arch.decoder import DecoderConfig, LayerConfig, LoRAConfig, decoder_on_tp_rank
from longshore.arch.memory import (
    INPUT_BYTES,
    ITEM_BYTES,
    Parameters,
    RankSetting,
    block_working,
    factor_saved,
    layer_parameters,
    most_in_flight,
    saved_bytes,
    stage_layers,
    stage_parameters,
)
from longshore.arch.part import Saved
from longshore.ops.sizes import loss_bytes
from longshore.plan.layout import Layout
from longshore.plan.shapes import legal_cp_sizes
from longshore.plan.types import Axes


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """A layer of one rank."""

    parameters: int
    """On the rank, gathered."""
    saved: int
    """Bytes of a token from forward to backward."""
    parts: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """In the order of backward: what the part saved, and the moments' (bytes of a token, gradients
    that exist)."""
    input: int
    """Bytes of a token that recomputation keeps."""
    factors: int = 0
    """Parameters of low-rank factors, which alone are trained where there are some."""


@dataclass(frozen=True, slots=True)
class RankModel:
    """What a rank has of the model, whatever it is trained with."""

    layers: tuple[LayerMemory, ...]
    """Parameters of all its stages."""
    configs: tuple[LayerConfig, ...]
    """The same as data."""
    counts: Parameters
    """Parameters of its stages."""
    stages: Mapping[int, tuple[tuple[LayerMemory, ...], int]]
    """By number: the stage's layers, and bytes of a token that are saved beside them."""
    has_head: bool
    """Whether a stage computes the loss."""


@lru_cache(maxsize=1024)
def rank_model(
    config: DecoderConfig, layout: Layout, pp_rank: int, axes: Axes, item: int
) -> RankModel:
    local, numbers = decoder_on_tp_rank(config, axes.tp), layout.of_rank(pp_rank)
    tables = sum(rope.rotary_dim or 0 for rope in config.ropes) * max(item, 4)
    stages: dict[int, tuple[tuple[LayerMemory, ...], int]] = {}
    configs: list[LayerConfig] = []
    for number in numbers:
        stage = layout.stages[number]
        own = stage_layers(local, stage)
        layers = tuple(
            _layer_memory(layer, config.width, item, axes, config.float32_residual, config.lora)
            for layer in own
        )
        # Of each depth: embedding, norms' outputs, the joined input, the head's.
        passing = layout.streams(number - 1) - 1 if number else 0
        rows = (7 * len(stage.depths) + passing) * config.width * item // axes.tp
        if config.residuals is not None:
            collapse = saved_bytes(config.residuals.collapse_saved(config.width), item)
            rows += (stage.norm + len(stage.depths)) * collapse // axes.tp
        stages[number] = layers, INPUT_BYTES + tables + rows
        configs += own
    each = (stage_parameters(config, layout.stages[number], axes) for number in numbers)
    return RankModel(
        layers=tuple(layer for layers, _ in stages.values() for layer in layers),
        configs=tuple(configs),
        counts=sum(each, start=Parameters(0)),
        stages=stages,
        has_head=any(layout.stages[number].head for number in numbers),
    )


@cache
def _layer_memory(
    layer: LayerConfig,
    width: int,
    item: int,
    axes: Axes,
    wide: bool,
    lora: LoRAConfig | None,
) -> LayerMemory:
    """layer: as a TP rank has it; wide: the residual stream is float32 at least."""
    row = layer.row(width)
    stream = Saved(0, row) if wide else Saved(row)
    # The collapsed row, which the norm reads, and what the mixing saves.
    mixing = Saved(width) + layer.residuals.saved(width) if layer.residuals else Saved(0)
    parts = []
    total = saved_bytes(factor_saved(layer, width, lora), item)
    working = block_working(layer, width, item=item, axes=axes)
    for part in reversed(layer.parts):
        memory = part.kernel_memory(width)
        own, gathered, tp, ep = stream + mixing, Saved(width) + memory.saved, 1, 1
        if part.routed_experts:  # which work on a rank's own rows
            own, gathered, tp, ep = own + gathered, Saved(0), axes.tp, axes.ep
        kept = -(-saved_bytes(own, item) // axes.tp) + saved_bytes(gathered, item)
        moments = tuple(
            (-(-saved_bytes(moment.rows, item) // tp) + working, moment.gradients // ep)
            for moment in memory.backward
        )
        parts.append((kept, moments))
        total += kept
    counts = layer_parameters(layer, width, axes, lora)
    own_row = -(-saved_bytes(stream, item) // axes.tp)
    return LayerMemory(counts.total, total, tuple(parts), own_row, counts.factors)


WORKSPACE = 128 << 20
"""Bytes of cuBLAS, and of small tensors that nothing else counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Bytes that exist together."""

    parameters: int = 0
    """Weights in float32, and their copy in the dtype of the arithmetic."""
    gradients: int = 0
    """Summed over rounds, of the layer in backward, and on their way to other lanes."""
    optimizer: int = 0
    """The moments of AdamW."""
    activations: int = 0
    """Saved for backward, of all rounds in flight."""
    working: int = 0
    """Of the layer in backward."""
    exchanged: int = 0
    """Keys and values gathered from other lanes, or made from latents."""
    loss: int = 0
    """A chunk of logits, and the gradients of head and hidden states."""
    other: int = 0
    """Workspaces of libraries."""
    moment: str = ""
    """When it is."""

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "moment"}


def expected_peak(
    config: DecoderConfig,
    how: RankSetting,
    *,
    tokens: int,
    rounds: int = 2,
    cp_size: int = 1,
    shared_tokens: int | None = None,
) -> MemoryBreakdown:
    """At the moment that needs most; tokens: of the fullest round; rounds: of a step.

    cp_size: the largest of a pack. shared_tokens: most tokens of the lane in such a pack; None: it
    may be full of it.
    """
    shared = tokens if shared_tokens is None else min(shared_tokens, tokens)
    rank = _Rank(config, tokens, rounds, how, (cp_size, shared))
    return max(rank.moments(), key=lambda moment: moment.total)


class _Rank:
    """A rank's static memory, and the moments of its step."""

    def __init__(
        self,
        config: DecoderConfig,
        tokens: int,
        rounds: int,
        how: RankSetting,
        shared: tuple[int, int],
    ) -> None:
        """shared: the largest CP size of a pack, and the lane's tokens in it."""
        self.config, self.tokens, self.rounds, self.how = config, tokens, rounds, how
        self.axes, self.shared = how.axes, shared
        self.item = ITEM_BYTES[how.dtype]
        self.master = max(self.item, 4)
        self.layout, axes = how.stages(config), how.axes
        # Only what splits layers, so that ways to run that share it find it computed.
        split = Axes(lanes=axes.ep, tp=axes.tp, ep=axes.ep)
        self.model = rank_model(config, self.layout, how.pp_rank, split, self.item)
        self.layers, self.has_head = self.model.layers, self.model.has_head
        self.count = self.model.counts.total
        self.ends = self.count - sum(layer.parameters for layer in self.layers)
        self.part = self._shard(self.model.counts)
        self.trained, self.own = self.count, self.part
        self.freezes = config.lora is not None
        if self.freezes:
            self.trained = self.model.counts.factors
            self.own = self._shard(Parameters(self.trained))

    def _shard(self, counts: Parameters) -> int:
        """Parameters of which the rank keeps weights and moments."""
        if self.axes.shard == "none":
            return counts.total
        experts = -(-counts.experts // self.axes.expert_replicas)
        return -(-counts.common // self.axes.lanes) + experts

    @property
    def copies(self) -> bool:
        """Whether the weights exist once more, in the dtype of the arithmetic or gathered."""
        shared = self.axes.shard != "none" and self.axes.lanes > 1
        return (self.item < self.master and not self.freezes) or shared

    @property
    def weights(self) -> int:
        """Bytes that the rank keeps; what is frozen in the dtype of the arithmetic."""
        frozen = self.item * self.part if self.freezes else 0
        return frozen + self.master * self.own

    def _trains(self, layer: LayerMemory) -> int:
        return layer.factors if self.freezes else layer.parameters

    def moments(self) -> Iterator[MemoryBreakdown]:
        saved = self.saved()
        at_loss = self._static(self.summed(), moment="loss")
        if self.has_head:
            yield replace(at_loss, activations=saved + self._last_rows(3), loss=self.loss())
        # The only round is also the last.
        for reduces in (True,) if self.rounds == 1 else (False, True):
            yield from self._backward(saved, reduces=reduces)
        yield MemoryBreakdown(
            parameters=self.weights,
            gradients=self.master * self.own,
            optimizer=2 * self.master * self.own,
            other=WORKSPACE,
            moment="optimizer",
        )

    def _static(self, gradients: int, *, moment: str, freed: int = 0) -> MemoryBreakdown:
        """freed: parameters whose copies are gone."""
        return MemoryBreakdown(
            parameters=self.weights + max(0, self._gathered() - self.item * freed),
            gradients=gradients,
            optimizer=2 * self.master * self.own,
            other=WORKSPACE,
            moment=moment,
        )

    def _gathered(self) -> int:
        """Weights in the dtype of the arithmetic; with zero3 those of a layer and of the next."""
        if not self.copies:
            return 0
        if self.axes.shard != "zero3":
            return self.item * self.count
        block = max((layer.parameters for layer in self.layers), default=0)
        # The next layer's are gathered in one buffer, and then copied out of it.
        return self.item * min(self.count, self.ends + 3 * block)

    def summed(self) -> int:
        """Gradients that a step's earlier rounds have left; autograd's own in float32 models."""
        if self.rounds == 1:
            return 0
        return self.master * (self.own if self.axes.shard == "zero3" else self.trained)

    def saved(self) -> int:
        """Activations at the end of forward, of all rounds in flight."""
        again = self.how.recompute
        each = {
            number: more + sum(layer.input if again else layer.saved for layer in layers)
            for number, (layers, more) in self.model.stages.items()
        }
        if self.layout.pp == 1:
            return self.tokens * sum(each.values())
        return self.tokens * most_in_flight(self.layout, self.how.pp_rank, each)

    def _last_rows(self, rows: int) -> int:
        """The last layer's output, its norm's, and the gradient that comes back."""
        width = self.config.row_width * self.item
        return self.tokens * rows * width if self.has_head else 0

    def loss(self) -> int:
        """While its chunks run; gradients of the hidden states are among the last rows."""
        tp = self.axes.tp
        heads, width = 1 + len(self.config.mtp), self.config.width
        total = loss_bytes(
            self.tokens,
            vocabulary=-(-self.config.vocab_size // tp),
            width=width,
            item=self.item,
            heads=heads,
            kernels=tp == 1 and self.how.dtype != "float64",
            trains=not self.freezes,
        )
        counted = heads * width * self.tokens * self.item
        return total - counted if tp == 1 and self.how.dtype != "float64" else total

    def _head_gradient(self) -> int:
        """Waits until the whole backward is over."""
        tables = -(-self.config.vocab_size // self.axes.tp) * self.config.width
        return self.item * tables if self.has_head and not self.freezes else 0

    def _backward(self, saved: int, *, reduces: bool) -> Iterator[MemoryBreakdown]:
        """Layer after layer, from the last; reduces: the round in which lanes sum gradients."""
        gradients = self.summed() + self._head_gradient()
        freed, sent, shown = 0, 0, self._compared()
        several = self.layout.pp > 1
        for place in reversed(range(len(self.layers))):
            layer = self.layers[place]
            if place in shown:
                static = self._static(gradients + sent, freed=freed, moment=f"layer {place}")
                yield from self._parts(static, place, saved)
            if not several:
                saved -= self.tokens * (layer.input if self.how.recompute else layer.saved)
            if place in shown:
                yield from self._reduced(static, layer, saved, reduces=reduces)
            if reduces and not several:
                sent = self.master * self._trains(layer)
                if self.rounds == 1:
                    gradients += self.master * self._own(layer)
                if self.axes.shard != "zero3":
                    freed += layer.parameters

    def _compared(self) -> set[int]:
        """The first two and the last two of each kind of layer: in between all grows evenly."""
        kinds: dict[LayerMemory, list[int]] = {}
        for place, layer in enumerate(self.layers):
            kinds.setdefault(layer, []).append(place)
        return {place for same in kinds.values() for place in (*same[:2], *same[-2:])}

    def _parts(self, static: MemoryBreakdown, place: int, saved: int) -> Iterator[MemoryBreakdown]:
        """The moments of a layer's backward, part by part; saved: by all layers up to it."""
        layer, tokens, done = self.layers[place], self.tokens, 0
        left = saved + self._last_rows(2) + (tokens * layer.saved if self.how.recompute else 0)
        for number, (kept, moments) in enumerate(layer.parts):
            exchanged = self._exchanged(place) if number == len(layer.parts) - 1 else 0
            for each, parameters in moments:
                fresh = layer.factors if self.freezes else done + parameters
                yield replace(
                    static,
                    gradients=static.gradients + self.item * fresh,
                    activations=left,
                    working=tokens * each,
                    exchanged=exchanged,
                    moment=f"backward of {static.moment}",
                )
            left -= tokens * kept
            done += max(parameters for _, parameters in moments)

    def _own(self, layer: LayerMemory) -> int:
        """The rank's part of what is trained in a layer."""
        return self._trains(layer) * self.own // max(1, self.trained)

    def _reduced(
        self, static: MemoryBreakdown, layer: LayerMemory, saved: int, *, reduces: bool
    ) -> Iterator[MemoryBreakdown]:
        """After a layer: its gradients in float32, in a buffer to be sent, and what comes back."""
        if not reduces and self.axes.shard != "zero3":
            return
        count, own = self._trains(layer), self._own(layer)
        alone = self.axes.shard == "none" or self.axes.lanes == 1
        # A rank alone divides its buffer by 1 into another one.
        buffers = self.master * (count + own + (count if alone else 0))
        had = self.master * count if self.rounds > 1 and self.axes.shard != "zero3" else 0
        gradients = static.gradients - had + max(buffers, had + self.master * count)
        yield replace(
            static,
            gradients=gradients,
            activations=saved + self._last_rows(2),
            moment="reduction of gradients",
        )

    def _exchanged(self, place: int) -> int:
        layers, sharing = [self.model.configs[place]], self.how.sharing
        return max(
            exchanged_by(layers, cp_size, tokens, sharing=sharing, item=self.item)
            for cp_size, tokens in ((1, self.tokens), self.shared)
        )


MIB = 1 << 20
PAIR_BYTES, LARGER_BYTES = 544 * MIB, 688 * MIB
"""An assumption, not measured here: GPU memory of an NCCL communicator of two ranks, and of more.

As reported for 4 A100s with NVLink after one all-reduce in each group (github.com/NVIDIA/nccl/
issues/964). It is linear in the number of channels, and beyond two nodes the number of ranks does
not matter (the maintainers in issue 864), because a ring has two neighbours and a tree three. An
all-to-all connects a rank with every other and may take several times as much (issue 1685).
"""

HOST_USERS = ("checkpoint", "loader")
"""Each has groups of its own on the host, because their threads run collectives of their own."""


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """One process group of a rank."""

    name: str
    """What it is for."""
    ranks: int
    """In the group."""
    blocks: int
    """Such groups in the whole job, of which a rank joins one."""
    on_gpu: bool
    """By NCCL; otherwise by gloo, on the host."""


def joined_groups(
    axes: Axes,
    *,
    cp_sizes: tuple[int, ...] | None = None,
    copies: int = 1,
    replicated_stages: int = 0,
) -> tuple[JoinedGroup, ...]:
    """All groups of rank 0, in the order they are created.

    cp_sizes: the legal ones; default: powers of two, and all lanes. copies: pipeline ranks that
    hold the embedding, more than one where it is tied or there are extra depths. replicated_stages:
    a rank's stages where lanes do not shard the model (`none`); each has a mesh of its own.
    """
    lanes, tp, pp, world = axes.lanes, axes.tp, axes.pp, axes.world_size
    sizes = legal_cp_sizes(lanes) if cp_sizes is None else cp_sizes
    named = {"pp": pp, "lanes": lanes, "tp": tp}
    groups = [*_axes("", world, named, on_gpu=True)]
    groups += [
        JoinedGroup(f"CP {size}", size, lanes // size * tp * pp, on_gpu=True) for size in sizes
    ]
    for stage_number in range(replicated_stages):
        mesh = {"pp": pp, "replicas": lanes, "shard": 1, "tp": tp}
        groups += [*_axes(f"stage {stage_number}: ", world, mesh, on_gpu=True)][1:]
    if copies > 1:
        groups.append(JoinedGroup("embedding copies", copies, lanes * tp, on_gpu=True))
    if axes.splits_layers:
        shared = {"experts": axes.ep, "expert replicas": axes.expert_replicas}
        # A rank alone needs no group of its own where an axis has such a group.
        groups += [
            JoinedGroup(name, ranks, world // ranks, on_gpu=True)
            for name, ranks in shared.items()
            if ranks > 1 or 1 not in named.values()
        ]
    for user in HOST_USERS:
        groups += _axes(f"{user}: ", world, named, on_gpu=False)
    return tuple(groups)


def _axes(prefix: str, world: int, axes: dict[str, int], *, on_gpu: bool) -> Iterator[JoinedGroup]:
    """An axis that spans all ranks has no group of its own."""
    yield JoinedGroup(f"{prefix}world", world, 1, on_gpu)
    for name, ranks in axes.items():
        if ranks != world:
            yield JoinedGroup(f"{prefix}{name}", ranks, world // ranks, on_gpu)


def communicator_bytes(
    groups: tuple[JoinedGroup, ...], *, pair: int = PAIR_BYTES, larger: int = LARGER_BYTES
) -> int:
    """GPU memory of a rank's communicators once each has been used; alone a rank sends nothing."""
    ranks = [group.ranks for group in groups if group.on_gpu]
    return pair * ranks.count(2) + larger * sum(number > 2 for number in ranks)
