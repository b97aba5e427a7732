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
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from longshore.arch.decoder import DecoderConfig
from longshore.arch.exchanged import exchanged_by
from longshore.arch.model_memory import ITEM_BYTES
from longshore.arch.part import Sharing
from longshore.arch.rank_model import LayerMemory, rank_model
from longshore.arch.stage_memory import (
    WHOLE,
    ModelSplit,
    Parameters,
    most_in_flight,
    whole_model,
)
from longshore.ops.sizes import loss_bytes
from longshore.plan.layout import Layout

WORKSPACE = 128 << 20
"""Of cuBLAS, and of small tensors that nothing else counts."""
AUTO = Sharing("auto", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetting:
    """How a rank trains."""

    lanes: int = 1
    """That share the model."""
    shard: str = "none"
    """How they share it."""
    dtype: str = "bfloat16"
    """Of the arithmetic."""
    recompute: bool = False
    """Whether blocks are recomputed."""
    split: ModelSplit = WHOLE
    """Over how many ranks layers are split."""
    layout: Layout | None = None
    """The stages; None without a pipeline."""
    pp_rank: int = 0
    """Which pipeline rank it is."""
    cp_size: int = 1
    """The largest of a pack."""
    shared_tokens: int | None = None
    """Most tokens of the lane in such a pack; None: it may be full of it."""
    sharing: Sharing = AUTO
    """How lanes share a pack."""


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
    config: DecoderConfig, *, tokens: int, rounds: int = 2, how: RankSetting | None = None
) -> MemoryBreakdown:
    """At the moment that needs most; tokens: of the fullest round; rounds: of a step."""
    rank = _Rank(config, tokens, rounds, how or RankSetting())
    return max(rank.moments(), key=lambda moment: moment.total)


class _Rank:
    """A rank's static memory, and the moments of its step."""

    def __init__(self, config: DecoderConfig, tokens: int, rounds: int, how: RankSetting) -> None:
        self.config, self.tokens, self.rounds, self.how = config, tokens, rounds, how
        self.item = ITEM_BYTES[how.dtype]
        self.master = max(self.item, 4)
        self.layout = how.layout or whole_model(config)
        self.model = rank_model(config, self.layout, how.pp_rank, how.split, self.item)
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
        if self.how.shard == "none":
            return counts.total
        replicas = max(1, self.how.lanes * self.how.split.tp // self.how.split.ep)
        return -(-counts.common // self.how.lanes) - (-counts.experts // replicas)

    @property
    def copies(self) -> bool:
        """Whether the weights exist once more, in the dtype of the arithmetic or gathered."""
        shared = self.how.shard != "none" and self.how.lanes > 1
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
        if self.how.shard != "zero3":
            return self.item * self.count
        block = max((layer.parameters for layer in self.layers), default=0)
        # The next layer's are gathered in one buffer, and then copied out of it.
        return self.item * min(self.count, self.ends + 3 * block)

    def summed(self) -> int:
        """Gradients that a step's earlier rounds have left; autograd's own in float32 models."""
        if self.rounds == 1:
            return 0
        return self.master * (self.own if self.how.shard == "zero3" else self.trained)

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
        tp = self.how.split.tp
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
        tables = -(-self.config.vocab_size // self.how.split.tp) * self.config.width
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
                if self.how.shard != "zero3":
                    freed += layer.parameters

    def _compared(self) -> set[int]:
        """Of each kind of layer the first two and the last two: in between all grows evenly."""
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
        if not reduces and self.how.shard != "zero3":
            return
        count, own = self._trains(layer), self._own(layer)
        alone = self.how.shard == "none" or self.how.lanes == 1
        # A rank alone divides its buffer by 1 into another one.
        buffers = self.master * (count + own + (count if alone else 0))
        had = self.master * count if self.rounds > 1 and self.how.shard != "zero3" else 0
        gradients = static.gradients - had + max(buffers, had + self.master * count)
        yield replace(
            static,
            gradients=gradients,
            activations=saved + self._last_rows(2),
            moment="reduction of gradients",
        )

    def _exchanged(self, place: int) -> int:
        how, layers = self.how, [self.model.configs[place]]
        shared = self.tokens if how.shared_tokens is None else min(how.shared_tokens, self.tokens)
        return max(
            exchanged_by(layers, cp_size, tokens, sharing=how.sharing, item=self.item)
            for cp_size, tokens in ((1, self.tokens), (how.cp_size, shared))
        )
