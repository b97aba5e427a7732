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

The last sequence of the last pack, of length 0, is the run of padding: kernels see every row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

Part = TypeVar("Part")

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
    """Where joined sequences begin and end, on the host and, for kernels, as int32 on the device.

    offsets: one more than there are sequences, from 0. longest: the longest of them.
    """

    offsets: tuple[int, ...]
    cu_seqlens: Tensor
    longest: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def pairs(self) -> list[tuple[int, int]]:
        """(start, stop) of each sequence."""
        return list(zip(self.offsets[:-1], self.offsets[1:], strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Zigzag:
    """What a pack has only where several lanes share it.

    local: the sequences inside the shard. chunks: their early and late chunk by turns, also inside
    the shard. to_natural, to_shards: int32 (cp_size · tokens of the shard). With the shards
    gathered in the order of the lanes, natural = gathered[to_natural] and gathered =
    natural[to_shards]. visible: for each of the chunks all that a causal mixer may see of its
    sequence, from the first token to the chunk's last; visible_rows: int32, where these lie in
    gathered.
    """

    local: Boundaries
    chunks: Boundaries
    to_natural: Tensor
    to_shards: Tensor
    visible: Boundaries
    visible_rows: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackContext:
    """One pack: rows start…stop of the lane's tokens.

    first_sequence: the place of the pack's first sequence among the micro-batch's S. lengths: real
    tokens of each, over all lanes; 0 for the run of padding, which only the last pack has. real,
    padded: the whole pack's boundaries without and with padding, the same on every lane of the
    group. zigzag: None at CP size 1, where the lane holds the whole pack.
    """

    group: CPGroup
    start: int
    stop: int
    first_sequence: int
    lengths: tuple[int, ...]
    real: Boundaries
    padded: Boundaries
    zigzag: Zigzag | None

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def sequences(self) -> slice:
        """Places of the pack's sequences among the micro-batch's; without the run of padding."""
        count = sum(1 for length in self.lengths if length)
        return slice(self.first_sequence, self.first_sequence + count)

    @property
    def local(self) -> Boundaries:
        """The sequences inside this lane's rows of the pack, padding included."""
        return self.padded if self.zigzag is None else self.zigzag.local


@dataclass(frozen=True, slots=True, eq=False)
class SeqContext:
    """The boundaries, positions and CP group of every pack of a micro-batch.

    tokens: T. real_tokens: those of them that are no padding. positions: int64 (T), in the whole
    sequence; padding inside one counts on. sequence_index: int64 (T), S for padding. is_real: bool
    (T). lengths: int64 (S + 1), real, over all lanes; 1 for padding, so that nothing divides by 0;
    lengths[sequence_index] is each token's. sequences: the places in the plan. packs: by falling
    CP size.
    """

    tokens: int
    real_tokens: int
    positions: Tensor
    sequence_index: Tensor
    is_real: Tensor
    lengths: Tensor
    sequences: tuple[int, ...]
    packs: tuple[PackContext, ...]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "SeqContext":
        return _changed(self, lambda _, tensor: tensor.to(device, non_blocking=non_blocking))

    def ahead(self, depth: int) -> "SeqContext":
        """The same, where only tokens that have another one `depth` places on are real.

        What a depth of multi-token prediction counts: sequences are `depth` tokens shorter, and
        their last tokens are padding. `real_tokens` and the packs stay those of the whole
        sequences; a causal mixer looks only back, so it needs no others.
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
    """The context of whole sequences joined on one lane, for a model that runs alone."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths are {list(lengths)}; give at least one, each of 1 or more")
    offsets = tuple(accumulate(lengths, initial=0))
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    bounds = Boundaries(offsets, cu_seqlens, max(lengths))
    pack = PackContext(
        group=CPGroup(first_lane=0, cp_size=1, cp_rank=0),
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
    """What all lanes and rounds of a step hold together: the divisor of each loss term.

    main: labels that count. mtp: the same at each depth. tokens, sequences: real ones. mtp_tokens:
    at depth d the tokens that have another one d places on: 4 of a sequence of 5 at depth 1.
    """

    main: int
    mtp: tuple[int, ...]
    tokens: int
    sequences: int
    mtp_tokens: tuple[int, ...]

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
    """Multi-token prediction at depth d: the token d places on goes in, the one after comes out.

    token_ids: int64 (T), pad_id past the end of the sequence.
    """

    token_ids: Tensor
    targets: Targets


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """A lane's tensors for one round; a pipeline stage holds a part of them, see `for_stage`.

    token_ids: int64 (T), or None. targets: or None. mtp: depths 1…D, or (). token_fields: extra
    fields, (T, …), 0 at padding. sequence_fields: (S + 1, …), the last row 0 for padding. counts:
    of the whole step.
    """

    lane: int
    round: int
    rounds: int
    ctx: SeqContext
    counts: Counts
    token_ids: Tensor | None
    targets: Targets | None
    mtp: tuple[Depth, ...]
    token_fields: dict[str, Tensor]
    sequence_fields: dict[str, Tensor]

    @property
    def is_last(self) -> bool:
        """Whether this is the plan's last round, in which gradients are synchronised."""
        return self.round == self.rounds - 1

    def for_stage(self, *, first: bool, last: bool, mtp: bool) -> "MicroBatch":
        """What a pipeline stage needs: the first token ids, the last targets, MTP's its depths.

        Extra fields serve the loss and go with targets and depths. Every stage has the context.
        """
        loss = last or mtp
        return replace(
            self,
            token_ids=self.token_ids if first else None,
            targets=self.targets if last else None,
            mtp=self.mtp if mtp else (),
            token_fields=self.token_fields if loss else {},
            sequence_fields=self.sequence_fields if loss else {},
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "MicroBatch":
        return _changed(self, lambda _, tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "MicroBatch":
        """In page-locked memory, from which `to(device, non_blocking=True)` does not wait."""
        return _changed(self, lambda _, tensor: tensor.pin_memory())

    def to_tensors(self) -> dict[str, Tensor]:
        """Every tensor by its path, such as `ctx.packs.0.padded.cu_seqlens`, in a fixed order."""
        found: dict[str, Tensor] = {}

        def note(path: str, tensor: Tensor) -> Tensor:
            found[path] = tensor
            return tensor

        _changed(self, note)
        return found

    def skeleton(self) -> "MicroBatch":
        """All but the numbers: tensors on the device `meta`, which keep shape and dtype.

        Small, and it can be pickled; with `to_tensors` it makes the micro-batch again.
        """
        return self.to("meta")

    @staticmethod
    def from_tensors(skeleton: "MicroBatch", tensors: dict[str, Tensor]) -> "MicroBatch":
        """The micro-batch whose `skeleton()` and `to_tensors()` these are."""
        wanted = skeleton.to_tensors()
        if strange := sorted(wanted.keys() ^ tensors.keys()):
            state = "missing" if strange[0] in wanted else "not in the skeleton"
            raise ValueError(f"tensor {strange[0]} is {state}; give those of to_tensors()")
        for path, want in wanted.items():
            got = tensors[path]
            if got.shape != want.shape or got.dtype != want.dtype:
                raise ValueError(
                    f"tensor {path} is {got.dtype} of shape {tuple(got.shape)}; the skeleton says "
                    f"{want.dtype} of shape {tuple(want.shape)}"
                )
        return _changed(skeleton, lambda path, _: tensors[path])


def _changed(value: Part, change: Callable[[str, Tensor], Tensor]) -> Part:
    """A copy with each tensor replaced by change(path, tensor)."""
    made = _walk(value, change, "")
    assert isinstance(made, type(value))
    return made


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
    # Tuples of ints can be long, and hold no tensor.
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return tuple(_walk(item, change, f"{below}{i}") for i, item in enumerate(value))
    return value
