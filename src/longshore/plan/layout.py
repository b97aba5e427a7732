"""Which parts of a model each stage of a pipeline has, and the order of its work, as data.

In: text as Megatron-LM writes it, or what each part costs. Out: a Layout, from which planner,
loader, model and checkpoints know what a stage holds, reads and sends on.

A model is a list of parts: E the embedding, t a layer, m a depth of multi-token prediction, L the
head with the losses. A stage is a piece of that list, `|` stands between stages, and stage s
belongs to pipeline rank s % pp. Six layers and one depth on 2 ranks of 2 stages each:

    Ett|tt|ttm|L        rank 0: Ett and ttm, rank 1: tt and L

The decoder's last norm belongs to the first of m and L. A stage with a depth has a copy of the
embedding, for the tokens ahead, and sends one more stream of rows on: from ttm to L go the rows of
the decoder and those of the depth. `t*3` stands for ttt, and `(tt|)*2` for tt|tt|.
"""

import math
import re
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal

LONGEST_TEXT = 1 << 16


@dataclass(frozen=True, slots=True)
class StageInputs:
    """Which tensors of a micro-batch the stages of a rank read; all of them have the context."""

    token_ids: bool = True
    """For the embedding, and for layers that choose experts by them."""
    targets: bool = True
    """Labels and loss mask of the main loss."""
    depth_ids: bool = True
    """Token ids of multi-token prediction."""
    depth_targets: bool = True
    """Its labels and loss masks."""
    token_fields: bool = True
    """Extra fields of each token."""
    sequence_fields: bool = True
    """Extra fields of each sequence."""

    def __or__(self, other: "StageInputs") -> "StageInputs":
        return StageInputs(
            *(getattr(self, name) or getattr(other, name) for name in StageInputs.__slots__)
        )


NO_INPUTS = StageInputs(*[False] * len(StageInputs.__slots__))
"""The context alone, which follows from the plan."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A piece of a decoder."""

    embed: bool
    """Whether it begins with token ids."""
    layers: range
    """Its layers of the decoder."""
    norm: bool
    """Whether the decoder's last norm is here."""
    depths: range
    """Its depths of multi-token prediction, from 0."""
    head: bool
    """Whether the head and the losses are here."""

    @property
    def has_embedding(self) -> bool:
        return self.embed or bool(self.depths)

    def inputs(self, *, depths: int) -> StageInputs:
        """The tensors it reads. depths: of the whole model. The loss reads the extra fields."""
        return StageInputs(
            token_ids=self.embed,
            targets=self.head,
            depth_ids=bool(self.depths),
            depth_targets=self.head and depths > 0,
            token_fields=self.head,
            sequence_fields=self.head,
        )

    def __str__(self) -> str:
        parts = "t" * len(self.layers) + "m" * len(self.depths)
        return f"{'E' if self.embed else ''}{parts}{'L' if self.head else ''}"


@dataclass(frozen=True, slots=True)
class Layout:
    """The stages of a pipeline of pp ranks."""

    stages: tuple[Stage, ...]
    pp: int
    id_layers: tuple[int, ...] = ()
    """The numbers of layers that read token ids, as the embedding does."""

    def __post_init__(self) -> None:
        if self.pp < 1 or not self.stages or len(self.stages) % self.pp:
            raise ValueError(
                f"parallel.layout has {len(self.stages)} stages, which cannot be shared evenly by "
                f"{self.pp} pipeline ranks; give a multiple of {self.pp}"
            )

    @property
    def vpp(self) -> int:
        """Stages of each rank."""
        return len(self.stages) // self.pp

    @property
    def layers(self) -> int:
        return self.stages[-1].layers.stop

    @property
    def depths(self) -> int:
        return self.stages[-1].depths.stop

    def of_rank(self, pp_rank: int) -> range:
        """The numbers of a rank's stages."""
        return range(pp_rank, len(self.stages), self.pp)

    def rank_of(self, stage: int) -> int:
        return stage % self.pp

    def inputs(self, pp_rank: int) -> StageInputs:
        """What the stages of a rank read."""
        result = NO_INPUTS
        for number in self.of_rank(pp_rank):
            stage = self.stages[number]
            result |= stage.inputs(depths=self.depths)
            if any(layer in stage.layers for layer in self.id_layers):
                result = replace(result, token_ids=True)
        return result

    def is_normed(self, stage: int) -> bool:
        """Whether the rows that a stage sends have passed the decoder's last norm."""
        return any(each.norm for each in self.stages[: stage + 1])

    def streams(self, stage: int) -> int:
        """How many times T rows a stage sends to the next: one, and one for each depth so far."""
        return 1 + self.stages[stage].depths.stop

    def __str__(self) -> str:
        return "|".join(map(str, self.stages))


def one_stage(*, layers: int, depths: int = 0) -> Layout:
    """The layout without a pipeline."""
    return Layout((Stage(True, range(layers), True, range(depths), True),), 1)


def parse_layout(text: str, *, pp: int, layers: int, depths: int = 0) -> Layout:
    """The layout that a text describes, for a model with these numbers of layers and depths."""
    letters = _unrolled(text)
    wanted = f"E{'t' * layers}{'m' * depths}L"
    if letters.replace("|", "") != wanted:
        raise ValueError(
            f"parallel.layout is {text!r}, which is not this model's list of parts: E, then "
            f"{layers} t{f', {depths} m' if depths else ''} and L, with | between stages"
        )
    pieces = letters.split("|")
    if empty := [number for number, piece in enumerate(pieces) if not piece]:
        raise ValueError(f"parallel.layout is {text!r}, whose stage {empty[0]} has nothing to do")
    return _from_pieces(pieces, pp)


def layout_stages(text: str) -> int:
    """How many stages a text describes."""
    return _unrolled(text).count("|") + 1


def stage_refusals(layers: int, depths: int, *, pp: int, vpp: int) -> Iterator[str]:
    """Why a model of so many layers and depths cannot have so many stages."""
    parts, stages = layers + depths + 1, pp * vpp
    if parts < stages:
        yield (
            f"{layers} layers{f', {depths} depths' if depths else ''} and the head make {parts} "
            f"parts, too few for parallel.pp {pp} × parallel.vpp {vpp} = {stages} stages; use fewer"
        )


def balanced_layout(
    costs: Seq[int], *, pp: int, vpp: int, depths: int = 0, embed: int = 0
) -> Layout:
    """The layout whose most expensive stage is cheapest, and of these the most even.

    costs: of each layer, of each depth, then of the head, as whole numbers. embed: of the
    embedding, which stays with the first layer.
    """
    stages, parts = pp * vpp, [*costs]
    layers = len(parts) - depths - 1
    if why := next(stage_refusals(layers, depths, pp=pp, vpp=vpp), ""):
        raise ValueError(why)
    parts[0] += embed
    ends = _even_ends(parts, stages)
    letters = "t" * layers + "m" * depths + "L"
    pieces = [letters[start:stop] for start, stop in zip((0, *ends), ends, strict=False)]
    return _from_pieces(["E" + pieces[0], *pieces[1:]], pp)


def _even_ends(parts: Seq[int], stages: int) -> list[int]:
    """Where each of the stages ends: least (highest cost, sum of squares).

    In two passes: for the first stages alone, the least highest cost may have larger squares, for
    nothing if a later stage costs more anyway.
    """
    ends = _best_ends(parts, stages, max)
    highest = max(sum(parts[start:stop]) for start, stop in zip((0, *ends), ends, strict=False))
    return _best_ends(
        parts,
        stages,
        lambda squares, cost: squares + cost * cost if cost <= highest else math.inf,
    )


def _best_ends(parts: Seq[int], stages: int, join: Callable[[float, int], float]) -> list[int]:
    """Where stages end so that their costs, joined one after another, are least.

    Among equals the one whose last stage begins first is taken, and so on to the front.
    """
    before = [0, *accumulate(parts)]
    count = len(parts)
    # Integers, which stay exact.
    best: list[float] = [0, *[math.inf] * count]
    chosen: list[list[int]] = []
    for number in range(1, stages + 1):
        row: list[float] = [math.inf] * (count + 1)
        origin = [0] * (count + 1)
        for stop in range(number, count - (stages - number) + 1):
            for start in range(number - 1, stop):
                value = join(best[start], before[stop] - before[start])
                if value < row[stop]:
                    row[stop], origin[stop] = value, start
        best = row
        chosen.append(origin)
    ends = [count]
    for origin in reversed(chosen[1:]):
        ends.append(origin[ends[-1]])
    return ends[::-1]


def _from_pieces(pieces: Seq[str], pp: int) -> Layout:
    stages = []
    layer = depth = 0
    normed = False
    for piece in pieces:
        layers = range(layer, layer + piece.count("t"))
        depths = range(depth, depth + piece.count("m"))
        norm = not normed and ("m" in piece or "L" in piece)
        stages.append(Stage("E" in piece, layers, norm, depths, "L" in piece))
        layer, depth, normed = layers.stop, depths.stop, normed or norm
    return Layout(tuple(stages), pp)


def _unrolled(text: str) -> str:
    """The text with its repetitions written out."""
    letters = re.sub(r"\s", "", text)
    group = re.compile(r"\(([EtmL|]*)\)\*([0-9]{1,6})|([EtmL|])\*([0-9]{1,6})")
    while match := group.search(letters):
        inner = match[1] if match[1] is not None else match[3]
        times = int(match[2] or match[4])
        if len(inner) * times > LONGEST_TEXT:
            raise ValueError(f"parallel.layout is {text!r}, which is too long")
        letters = letters[: match.start()] + inner * times + letters[match.end() :]
    if unknown := re.search(r"[^EtmL|]", letters):
        raise ValueError(
            f"parallel.layout is {text!r}, in which {unknown[0]!r} means nothing; E is the "
            "embedding, t a layer, m a depth of multi-token prediction, L the head, | the end of a "
            "stage"
        )
    return letters


Kind = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's forward or backward of one round."""

    kind: Kind
    stage: int
    round: int


Order = tuple[tuple[Action, ...], ...]
"""The actions of each pipeline rank, one after another; executor and simulator walk the same."""


@lru_cache(maxsize=8)
def make_order(rounds: int, *, pp: int, vpp: int) -> Order:
    """1F1B for one stage per rank, interleaved 1F1B for several.

    Two ranks, one stage each, three rounds (F0 is the forward of round 0):

        rank 0, stage 0:  F0 F1 B0 F2 B1 B2
        rank 1, stage 1:  F0 B0 F1 B1 F2 B2

    With two stages each and two rounds, rank 0 runs stage 0 on both rounds, then stage 2, and goes
    back the same way: F0@0 F1@0 F0@2 F1@2 B0@2 B1@2 B0@0 B1@0.
    """
    for name, value in (("rounds", rounds), ("pp", pp), ("vpp", vpp)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if vpp == 1:
        return one_forward_one_backward(rounds, pp=pp)
    return interleaved(rounds, pp=pp, vpp=vpp)


def one_forward_one_backward(rounds: int, *, pp: int) -> Order:
    """1F1B: rank p holds the activations of at most pp − p rounds."""
    order = []
    for rank in range(pp):
        forwards = [Action("forward", rank, round_) for round_ in range(rounds)]
        backwards = [Action("backward", rank, round_) for round_ in range(rounds)]
        order.append(_alternate(forwards, backwards, warmup=pp - rank - 1))
    return tuple(order)


def interleaved(rounds: int, *, pp: int, vpp: int) -> Order:
    """Interleaved 1F1B: a rank takes pp rounds through its first stage, then through its next.

    Rank p holds at most 2·(pp − p − 1) + (vpp − 1)·pp + 1 stage activations.
    """
    if rounds % pp:
        raise ValueError(
            f"{rounds} rounds cannot be interleaved over {pp} pipeline ranks; "
            f"add {-rounds % pp} empty rounds, or use one stage per rank"
        )
    stage_rounds = [
        (stage, round_)
        for first in range(0, rounds, pp)
        for stage in range(vpp)
        for round_ in range(first, first + pp)
    ]
    order = []
    for rank in range(pp):
        forwards = [Action("forward", s * pp + rank, r) for s, r in stage_rounds]
        backwards = [Action("backward", (vpp - 1 - s) * pp + rank, r) for s, r in stage_rounds]
        warmup = 2 * (pp - rank - 1) + (vpp - 1) * pp
        order.append(_alternate(forwards, backwards, warmup=warmup))
    return tuple(order)


def _alternate(
    forwards: list[Action], backwards: list[Action], *, warmup: int
) -> tuple[Action, ...]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards left over."""
    warmup = min(warmup, len(forwards))
    actions = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        actions += (forward, backward)
    return (*actions, *backwards[len(forwards) - warmup :])
