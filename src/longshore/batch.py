"""MicroBatch: a lane's tensors for one round, and SeqContext: where its sequences begin and end.

Made by data/pack.py from a plan, read by the model. Every number a kernel wants on the host is a
Python int here, so nothing has to be read back from a device.

T tokens of a lane, padding included; S sequences; D depths of multi-token prediction. Lane 0 of two
holds its shard of a sequence of 7 tokens at CP size 2 (padded to 8) and a whole one of 3, and its
total of 7 is rounded up to 8:

    token_ids       a0 a1 a6  – | b0 b1 b2 |  –        T = 8, S = 2
    positions        0  1  6  7 |  0  1  2 |  0        the position in the sequence
    sequence_index   0  0  0  2 |  1  1  1 |  2        S for all padding
    labels          a1 a2  –  – | b1 b2  – |  –        – is −100
    packs           (0, 4) at CP size 2, lengths (7,)  |  (4, 8) at CP size 1, lengths (3, 0)

The last sequence of the last pack, of length 0, is the padding span: kernels see every row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

IGNORE = -100
"""The label of a token that has none: the last of its sequence, and padding."""


@dataclass(frozen=True, slots=True)
class CPGroup:
    """The lanes that share a pack, and this lane's rank among them."""

    first_lane: int
    cp_size: int
    cp_rank: int

    @property
    def lanes(self) -> range:
        return range(self.first_lane, self.first_lane + self.cp_size)


@dataclass(frozen=True, slots=True, eq=False)
class Boundaries:
    """Where joined sequences begin and end, on the host and, for kernels, on the device.

    Sequences of 3 and 5 tokens have the offsets 0, 3, 8.
    """

    offsets: tuple[int, ...]
    """On the host: 0, then the end of each sequence."""
    cu_seqlens: Tensor
    """The same as int32 on the device."""
    longest: int
    """Tokens of the longest sequence."""
    fixed: bool = False
    """Whether sizes of tables follow from rows and sequences alone, as CUDA graphs want them."""
    tables: dict[str, Any] = field(default_factory=dict, repr=False)
    """What ops derive from these boundaries, by name: see ops/boundaries.py; moves with them."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def map_tensors(self, change: Callable[[str, Tensor], Tensor]) -> "Boundaries":
        """A copy with each tensor, those of tables too, replaced by change(path, tensor)."""
        return _map_tensors(self, change)


@dataclass(frozen=True, slots=True, eq=False)
class Zigzag:
    """How a pack that several lanes share is sharded; `gathered` is its shards in lane order."""

    local: Boundaries
    """The sequences inside this lane's shard."""
    chunks: Boundaries
    """The early and the late chunk of each sequence, alternating, inside this lane's shard."""
    to_natural: Tensor
    """int32 (cp_size · tokens of the shard): natural order = gathered[to_natural]."""
    to_shards: Tensor
    """int32, the inverse: gathered = natural[to_shards]."""
    visible: Boundaries
    """For each chunk the tokens visible to it: from its sequence's first to the chunk's last."""
    visible_rows: Tensor
    """int32: the rows of `gathered` that hold these visible tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class PackContext:
    """One pack of a micro-batch, as one lane of its CP group holds it."""

    group: CPGroup
    """The lanes that share the pack."""
    start: int
    """The pack's first row among the lane's T tokens."""
    stop: int
    """One past its last row."""
    first_sequence: int
    """The index of its first sequence among the micro-batch's S."""
    lengths: tuple[int, ...]
    """Real tokens of each sequence over all lanes; 0 for the padding span of the last pack."""
    real: Boundaries
    """Boundaries of the full pack without padding, the same on every lane of the group."""
    padded: Boundaries
    """Boundaries of the full pack with padding, the same on every lane of the group."""
    zigzag: Zigzag | None
    """How the pack is sharded; None at CP size 1, where the lane holds all of it."""

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def sequences(self) -> slice:
        """Indices of the pack's sequences among the micro-batch's; without the padding span."""
        count = sum(1 for length in self.lengths if length)
        return slice(self.first_sequence, self.first_sequence + count)

    @property
    def local(self) -> Boundaries:
        """The sequences inside this lane's rows of the pack, padding included."""
        return self.padded if self.zigzag is None else self.zigzag.local


TableMaker = Callable[[PackContext], None]
"""Makes tables of a pack's boundaries on the host, before the pack goes to the device."""


@dataclass(frozen=True, slots=True, eq=False)
class SeqContext:
    """The boundaries, positions and CP group of every pack of a micro-batch."""

    tokens: int
    """T: tokens of this lane, padding included."""
    real_tokens: int
    """Those of them that are not padding."""
    positions: Tensor
    """int64 (T): position in the full sequence; padding inside a sequence continues the count."""
    sequence_index: Tensor
    """int64 (T): which of the S sequences a token belongs to; S for padding."""
    is_real: Tensor
    """bool (T): False for padding."""
    lengths: Tensor
    """int64 (S + 1): real tokens of each sequence over all lanes; the last, for padding, is 1, so
    that nothing divides by 0. lengths[sequence_index] is the length of each token's sequence."""
    sequences: tuple[int, ...]
    """The index in the plan of each of the S sequences."""
    packs: tuple[PackContext, ...]
    """In descending order of CP size."""
    token_ids: Tensor | None = None
    """int64 (T): set by a decoder with layers that choose experts by them."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "SeqContext":
        return _map_tensors(self, lambda _, tensor: tensor.to(device, non_blocking=non_blocking))

    def share(self, part: int, parts: int) -> "SeqContext":
        """The context of the `part`-th of equal parts of the rows, for what takes single tokens.

        The packs stay those of all rows.
        """
        tokens = self.tokens // parts
        rows = slice(part * tokens, (part + 1) * tokens)
        return replace(
            self,
            tokens=tokens,
            positions=self.positions[rows],
            sequence_index=self.sequence_index[rows],
            is_real=self.is_real[rows],
            token_ids=None if self.token_ids is None else self.token_ids[rows],
        )

    def ahead(self, depth: int) -> "SeqContext":
        """The same context in which only tokens with a successor `depth` positions later are real.

        This is what a depth of multi-token prediction counts: each sequence is `depth` tokens
        shorter, its last tokens are padding. `real_tokens` and the packs stay those of the full
        sequences, which is enough for a causal mixer.
        """
        padding = len(self.lengths) - 1
        is_real = self.is_real & (self.positions + depth < self.lengths[self.sequence_index])
        return replace(
            self,
            sequence_index=torch.where(is_real, self.sequence_index, padding),
            is_real=is_real,
            lengths=(self.lengths - depth).clamp(min=1),
        )


def whole_context(lengths: Sequence[int], *, device: torch.device | str = "cpu") -> SeqContext:
    """The context of full sequences joined on one lane, for a model without parallelism."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths are {list(lengths)}; give at least one, each of 1 or more")
    offsets = tuple(accumulate(lengths, initial=0))
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    bounds = Boundaries(offsets, cu_seqlens, max(lengths))
    pack = PackContext(
        group=CPGroup(0, cp_size=1, cp_rank=0),
        start=0,
        stop=offsets[-1],
        first_sequence=0,
        lengths=tuple(lengths),
        real=bounds,
        padded=bounds,
        zigzag=None,
    )
    numbers = [index for index, length in enumerate(lengths) for _ in range(length)]
    return SeqContext(
        tokens=offsets[-1],
        real_tokens=offsets[-1],
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        sequence_index=torch.tensor(numbers, device=device),
        is_real=torch.ones(offsets[-1], dtype=torch.bool, device=device),
        lengths=torch.tensor([*lengths, 1], device=device),
        sequences=tuple(range(len(lengths))),
        packs=(pack,),
    )


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals over all lanes and rounds of a step: the divisor of each loss term."""

    main: int
    """Labels that count in the main loss."""
    mtp: tuple[int, ...]
    """Labels that count at each depth of multi-token prediction."""
    tokens: int
    """Real tokens."""
    sequences: int
    """Real sequences."""
    mtp_tokens: tuple[int, ...]
    """Tokens that each depth sees, those with a successor d positions later: of a sequence of 5
    tokens, 4 at depth 1."""

    @staticmethod
    def of(labels: Sequence[int], lengths: Sequence[int]) -> "Counts":
        """labels: of the main loss, then of each depth. lengths: of all sequences of the step."""
        main, *mtp = labels
        depths = range(1, len(mtp) + 1)
        ahead = tuple(sum(max(length - d, 0) for length in lengths) for d in depths)
        return Counts(main, tuple(mtp), sum(lengths), len(lengths), ahead)

    def tokens_at(self, depth: int) -> int:
        """The tokens that a depth sees; all of them at depth 0, which is the decoder itself."""
        return self.mtp_tokens[depth - 1] if depth else self.tokens


@dataclass(frozen=True, slots=True, eq=False)
class Targets:
    """labels: int64 (T), the next token, −100 for none. loss_mask: bool (T), where it counts."""

    labels: Tensor
    loss_mask: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Depth:
    """Multi-token prediction at depth d: token t + d is the input, token t + d + 1 the label."""

    token_ids: Tensor | None
    """int64 (T): pad_id past the end of the sequence; None on stages without the depths."""
    targets: Targets | None
    """None on stages without the head."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """A lane's tensors for one round; a pipeline rank holds only what its stages read."""

    lane: int
    """The lane, from 0."""
    round: int
    """The round, from 0."""
    rounds: int
    """Rounds of the plan."""
    ctx: SeqContext
    """Boundaries, positions and CP groups; every pipeline stage has it."""
    counts: Counts
    """Totals of the step over all lanes and rounds."""
    token_ids: Tensor | None
    """int64 (T); None on stages that do not read them."""
    targets: Targets | None
    """Labels and loss mask; None on stages without the head."""
    mtp: tuple[Depth, ...]
    """Depths 1…D; () on stages that need neither their ids nor their targets."""
    token_fields: dict[str, Tensor]
    """Extra fields of each token, (T, …), 0 at padding."""
    sequence_fields: dict[str, Tensor]
    """Extra fields of each sequence, (S + 1, …), the last row 0 for padding."""

    @property
    def is_last(self) -> bool:
        """Whether this is the plan's last round, in which gradients are synchronised."""
        return self.round == self.rounds - 1

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "MicroBatch":
        return _map_tensors(self, lambda _, tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "MicroBatch":
        """In page-locked memory, from which `to(device, non_blocking=True)` does not wait."""
        return _map_tensors(self, lambda _, tensor: tensor.pin_memory())

    def to_tensors(self) -> dict[str, Tensor]:
        """Every tensor by its path, such as `ctx.packs.0.padded.cu_seqlens`, in a fixed order."""
        tensors: dict[str, Tensor] = {}

        def collect(path: str, tensor: Tensor) -> Tensor:
            tensors[path] = tensor
            return tensor

        _map_tensors(self, collect)
        return tensors

    def skeleton(self) -> "MicroBatch":
        """The micro-batch with its tensors on the device `meta`: shapes and dtypes, no values.

        Small and picklable; `from_tensors` restores the micro-batch from it and `to_tensors()`.
        """
        return self.to("meta")

    @staticmethod
    def from_tensors(skeleton: "MicroBatch", tensors: dict[str, Tensor]) -> "MicroBatch":
        """The micro-batch whose `skeleton()` and `to_tensors()` these are."""
        expected = skeleton.to_tensors()
        if unmatched := sorted(expected.keys() ^ tensors.keys()):
            state = "missing" if unmatched[0] in expected else "not in the skeleton"
            raise ValueError(f"tensor {unmatched[0]} is {state}; give those of to_tensors()")
        for path, like in expected.items():
            tensor = tensors[path]
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                raise ValueError(
                    f"tensor {path} is {tensor.dtype} of shape {tuple(tensor.shape)}; the skeleton "
                    f"says {like.dtype} of shape {tuple(like.shape)}"
                )
        return _map_tensors(skeleton, lambda path, _: tensors[path])


def _map_tensors(value: T, change: Callable[[str, Tensor], Tensor]) -> T:
    """A copy with each tensor replaced by change(path, tensor)."""
    copy = _walk(value, change, "")
    assert isinstance(copy, type(value))
    return copy


def _walk(value: Any, change: Callable[[str, Tensor], Tensor], path: str) -> Any:  # noqa: ANN401
    if isinstance(value, Tensor):
        return change(path, value)
    below = f"{path}." if path else ""
    if is_dataclass(value) and not isinstance(value, type):
        parts = {
            f.name: _walk(getattr(value, f.name), change, below + f.name) for f in fields(value)
        }
        return replace(value, **parts)
    if isinstance(value, dict):
        return {key: _walk(item, change, below + key) for key, item in value.items()}
    if isinstance(value, tuple) and not _is_numbers(value):
        items = [_walk(item, change, f"{below}{i}") for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _is_numbers(value: tuple[object, ...]) -> bool:
    """Looks at the ends alone: a tuple of numbers, such as offsets, may be long."""
    return not value or (isinstance(value[0], int) and isinstance(value[-1], int))
