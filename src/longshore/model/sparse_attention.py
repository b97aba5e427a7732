"""DeepSeek-V4's attention as a mixer: project, rotate, pool entries, choose some, attend, project.

In: hidden states (T, C), the context, the rotary tables. Out: (T, C), and where an index chooses
the entries also the sum of its loss over the real tokens. A token has one row of keys, which are
its values, for all heads; so what a query sums up has the rotations of the tokens it saw, and the
rotation at the query's own position is taken back after it. How entries are made and who sees them
is in plan/shapes.py.

The index reads detached rows: its loss trains the index alone, and no other loss reaches it. Its
loss is the divergence of its scores, as a softmax over the chosen entries, from how much attention
these got from all heads.

A lane that shares a pack has two chunks of each sequence. It fetches the rows before each (a halo),
pools the groups that end in its chunks, and gets the entries of all lanes.

T tokens, E entries; H heads of width D; X = D channels that are pooled, or 2·D where groups
overlap; J heads of the index of width I; K chosen entries. DeepSeek-V4-Flash with H 64, D 512 at a
length of 65,536: a token sees 128 tokens and of its up to 16,384 entries the best 512, or at ratio
128 all of up to 512. Dims are rotated in another order than Hugging Face's: see MLA.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from longshore.arch.part import Norm
from longshore.arch.sparse_attention import SparseAttentionConfig
from longshore.batch import PackContext, SeqContext
from longshore.model.fill import NORM, RESIDUAL, ZEROS, Fill
from longshore.model.interface import (
    Exchange,
    HostTableMaker,
    Mixed,
    Rows,
    TableSetting,
    ThreeStepMixer,
    joined,
)
from longshore.model.norm_rope import Float32Parameters, RMSNorm, Tables, rope_at
from longshore.model.recurrent import copied
from longshore.ops.boundaries import table, to_device
from longshore.ops.indexer import choose, index_loss, pooled
from longshore.ops.linear import projected, whole_weight
from longshore.ops.pointwise import rotate
from longshore.ops.sparse_attention import RowRanges, row_ranges, sparse_attention
from longshore.plan.shapes import (
    Spans,
    chunk_spans,
    gathered_entries,
    halo_rows,
    near_rows,
    owned_entries,
    pooled_rows,
    rows_after_halos,
    visible_entries,
    whole_spans,
)


@dataclass(frozen=True, slots=True)
class EntryKind:
    """What the tables of a layer depend on besides the pack; called, it is their HostTableMaker."""

    window: int
    """Tokens that a token sees."""
    ratio: int
    """Tokens of a group; 0 for no entries."""
    overlap: bool
    """Whether an entry pools the group before its own, too."""

    @staticmethod
    def of(config: SparseAttentionConfig) -> "EntryKind":
        return EntryKind(config.window, config.ratio, config.index is not None)

    def __call__(self, pack: PackContext, *, setting: TableSetting) -> None:
        """Makes the tables on the host."""
        entry_tables(pack, self, torch.device("cpu"))

    def __str__(self) -> str:
        overlap = ", overlapping" if self.overlap else ""
        return f"entries of {self.ratio}{overlap}, window {self.window}"


@dataclass(frozen=True, slots=True, eq=False)
class EntryTables:
    """Who sees what in a pack, and what an entry pools, on the device.

    A pack of sequences of 3 and 5 tokens, window 2, ratio 4 with overlapping groups: one entry at
    position 0, made of rows −1 −1 −1 −1 3 4 5 6, which the last two rows see.
    """

    ranges: RowRanges
    """What each row sees, of the lane's rows after halos and of all entries."""
    rows: Tensor
    """int32 (E, G): the rows that each entry of the lane's pools, −1 for none."""
    positions: Tensor
    """int32 (E): position of the first token of each entry's own group."""
    shared: "SharedEntries | None" = None
    """Where lanes share the pack."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedEntries:
    """How a lane reaches rows and entries of others."""

    halo: int
    """Rows that are fetched before each chunk."""
    after_halos: Tensor
    """int32: indices into all halos and then the lane's rows, each chunk after its halo."""
    order: Tensor
    """int32: where each entry of the pack is among those that all lanes sent."""
    most: int
    """Each lane's entries are padded to this many."""


def entry_tables(pack: PackContext, kind: EntryKind, device: torch.device) -> EntryTables:
    """The tables of all layers of this kind, made at their first use unless the loader did."""
    return table(pack.padded, str(kind), lambda: _entry_tables(pack, kind, device))


def _entry_tables(pack: PackContext, kind: EntryKind, device: torch.device) -> EntryTables:
    if pack.zigzag is None:
        offsets, shared = pack.padded.offsets, None
        spans = whole_spans(offsets, pack.lengths, kind.ratio)
    else:
        offsets = pack.zigzag.chunks.offsets
        spans, shared = _shared(pack, kind, device)
    near, entries = near_rows(spans, kind.window), visible_entries(spans, kind.ratio)
    numbers, _ = owned_entries(spans, kind.ratio)
    return EntryTables(
        ranges=row_ranges(*near, *entries, offsets=offsets, device=device),
        rows=to_device(pooled_rows(spans, kind.ratio, overlap=kind.overlap), device),
        positions=to_device((numbers * kind.ratio).astype("int32"), device),
        shared=shared,
    )


def _shared(
    pack: PackContext, kind: EntryKind, device: torch.device
) -> tuple[Spans, SharedEntries]:
    joints = np.asarray(pack.padded.offsets, dtype=np.int64)
    padded = joints[1:] - joints[:-1]
    halo, size = halo_rows(kind.window, kind.ratio, overlap=kind.overlap), pack.group.cp_size
    lanes = [
        chunk_spans(padded, kind.ratio, cp_rank=rank, cp_size=size, halo=halo)
        for rank in range(size)
    ]
    own = lanes[pack.group.cp_rank]
    order, most = gathered_entries(lanes, kind.ratio)
    after = rows_after_halos(own, halo)
    return own, SharedEntries(
        halo=halo,
        after_halos=to_device(after.astype(np.int32), device),
        order=to_device(order.astype(np.int32), device),
        most=most,
    )


class SinksAndBiases(Float32Parameters):
    """What is added to scores and to gates.

    sinks: a logit of each head, which takes attention from all it sees. entries, index: what is
    added to the gates of each token of a group, by its index there.
    """

    def __init__(self, config: SparseAttentionConfig) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(config.heads))
        self.entries = self.index = None
        if config.ratio:
            self.entries = nn.Parameter(torch.zeros(config.ratio, config.entry_channels))
        if config.index is not None:
            self.index = nn.Parameter(torch.zeros(config.ratio, 2 * config.index.head_dim))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """x: not read; FSDP wants an argument on GPUs, where a block is recomputed."""
        given = (self.sinks, self.entries, self.index)
        return tuple(copied(parameter) for parameter in given if parameter is not None)


class EntryProjections(nn.Module):
    """What is pooled into entries of width `head_dim`, its gates, and the norm of an entry."""

    def __init__(self, width: int, channels: int, head_dim: int, *, norm: Norm) -> None:
        super().__init__()
        self.kv_proj = nn.Linear(width, channels, bias=False)
        self.gate_proj = nn.Linear(width, channels, bias=False)
        self.norm = RMSNorm(head_dim, norm)


class EntryIndex(nn.Module):
    """The queries that score entries by keys of the index's own, and the weights of its heads."""

    def __init__(self, config: SparseAttentionConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        index = config.index
        assert index is not None
        self.config = index
        self.start = index.head_dim - config.rope_dim
        self.q_up = nn.Linear(config.q_rank, index.heads * index.head_dim, bias=False)
        self.weights_proj = nn.Linear(width, index.heads, bias=False)
        self.keys = EntryProjections(width, 2 * index.head_dim, index.head_dim, norm=norm)

    def before(self, x_TC: Tensor, latent_TQ: Tensor, table: tuple[Tensor, Tensor]) -> Rows:
        """From detached rows: queries, weights of heads, and what its keys pool, with gates."""
        linears = (self.weights_proj, self.keys.kv_proj, self.keys.gate_proj)
        weights_TJ, keys_TX, gates_TX = projected(x_TC, linears)
        q_TJI = self.q_up(latent_TQ).unflatten(-1, (-1, self.config.head_dim))
        scale = (self.config.heads * self.config.head_dim) ** -0.5
        return rotate(q_TJI, *table, start=self.start), weights_TJ * scale, keys_TX, gates_TX


class SparseAttention(ThreeStepMixer):
    """Compressed sparse attention: near tokens, and pooled entries of those further back."""

    FILLS: ClassVar[Mapping[str, Fill]] = {
        "o_up.weight": RESIDUAL,
        "q_norm.weight": NORM,
        "kv_norm.weight": NORM,
        "entries.norm.weight": NORM,
        "index.keys.norm.weight": NORM,
        "biases.sinks": ZEROS,
        "biases.entries": ZEROS,
        "biases.index": ZEROS,
    }

    @staticmethod
    def table_makers(config: SparseAttentionConfig) -> tuple[HostTableMaker, ...]:
        return (EntryKind.of(config),)

    def __init__(self, config: SparseAttentionConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config, self.eps = config, norm.eps
        self.rope = config.ropes[0]
        self.start = config.head_dim - config.rope_dim
        self.kind = EntryKind.of(config)
        queries, groups = config.heads * config.head_dim, config.o_groups
        self.q_down = nn.Linear(width, config.q_rank, bias=False)
        self.q_norm = RMSNorm(config.q_rank, norm)
        self.q_up = nn.Linear(config.q_rank, queries, bias=False)
        self.kv_proj = nn.Linear(width, config.head_dim, bias=False)
        self.kv_norm = RMSNorm(config.head_dim, norm)
        self.biases = SinksAndBiases(config)
        self.entries = self.index = None
        if config.ratio:
            channels = config.entry_channels
            self.entries = EntryProjections(width, channels, config.head_dim, norm=norm)
        if config.index is not None:
            self.index = EntryIndex(config, width, norm=norm)
        # Holds one matrix for each group of heads, one above the other; never called.
        self.o_down = nn.Linear(queries // groups, groups * config.o_rank, bias=False)
        self.o_up = nn.Linear(groups * config.o_rank, width, bias=False)

    def before(self, x_TC: Tensor, tables: Tables) -> tuple[Rows, Rows]:
        table, entries = tables[self.rope], self.entries
        linears = [self.q_down, self.kv_proj]
        if entries is not None:
            linears += [entries.kv_proj, entries.gate_proj]
        down_TQ, kv_TD, *pooled_TX = projected(x_TC, tuple(linears))
        latent_TQ = self.q_norm(down_TQ)
        q_THD = self.q_up(latent_TQ).unflatten(-1, (-1, self.config.head_dim))
        q_THD = functional.rms_norm(q_THD, q_THD.shape[-1:], eps=self.eps)
        near_T1D = rotate(self.kv_norm(kv_TD).unsqueeze(1), *table, start=self.start)
        rows = (rotate(q_THD, *table, start=self.start), near_T1D.squeeze(1), *pooled_TX)
        if self.index is not None:
            rows += self.index.before(x_TC.detach(), latent_TQ.detach(), table)
        return rows, table

    def apart(self, x: Tensor) -> Rows:
        biases: Rows = self.biases(x)
        return biases

    def core(self, ctx: SeqContext, apart: Rows, *rows: Tensor) -> Mixed:
        mixed, losses = list[Tensor](), list[Tensor]()
        for exchange in self.exchanges.each(ctx):
            is_real_T, *own = (row[exchange.pack.rows] for row in (ctx.is_real, *rows))
            attend = self._attend_all if self.index is None else self._attend_chosen
            attended_THD, *loss = attend(exchange, is_real_T, apart, *own)
            mixed.append(attended_THD)
            losses += loss
        if self.config.index is None:
            return joined(mixed)
        return joined(mixed), torch.stack(losses).sum() * self.config.index.loss_weight

    def after(self, mixed: Tensor, *kept: Tensor) -> Tensor:
        cos_TR, sin_TR = kept
        groups = self.config.o_groups
        back_THD = rotate(mixed, cos_TR, -sin_TR, start=self.start)
        grouped = back_THD.flatten(1).unflatten(1, (groups, -1))
        weight = whole_weight(self.o_down).unflatten(0, (groups, -1))
        down = torch.einsum("tgi,gri->tgr", grouped, weight)
        output_TC: Tensor = self.o_up(down.flatten(1))
        return output_TC

    def _attend_all(
        self, exchange: Exchange, is_real_T: Tensor, apart: Rows, q_THD: Tensor, *rows: Tensor
    ) -> Rows:
        """Attends to the window, and to all entries where there are any."""
        sinks_H, *bias = apart
        tables = entry_tables(exchange.pack, self.kind, q_THD.device)
        near_RD, *pooled_RX = _with_halos(exchange, tables, rows)
        entries_ED = near_RD.new_zeros(0, near_RD.shape[1])
        if self.entries is not None:
            own_ED = self._pooled(exchange.pack, self.entries, *pooled_RX, *bias)
            (entries_ED,) = _of_all_lanes(exchange, tables, (own_ED,))
        scale = self.config.head_dim**-0.5
        keys = (q_THD, near_RD, entries_ED, sinks_H)
        return sparse_attention(*keys, ranges=tables.ranges, scale=scale)[:1]

    def _attend_chosen(
        self, exchange: Exchange, is_real_T: Tensor, apart: Rows, *rows: Tensor
    ) -> Rows:
        """Attends to the window and the chosen entries; also the index's loss over real tokens."""
        q_THD, near_TD, kv_TX, gates_TX, index_q_TJI, weights_TJ, keys_TX, key_gates_TX = rows
        sinks_H, bias_GX, index_bias_GX = apart
        assert self.entries is not None
        assert self.index is not None
        pack = exchange.pack
        tables = entry_tables(pack, self.kind, q_THD.device)
        near_RD, kv_RX, gates_RX, keys_RX, key_gates_RX = _with_halos(
            exchange, tables, (near_TD, kv_TX, gates_TX, keys_TX, key_gates_TX)
        )
        own_ED = self._pooled(pack, self.entries, kv_RX, gates_RX, bias_GX)
        own_EI = self._pooled(pack, self.index.keys, keys_RX, key_gates_RX, index_bias_GX)
        entries_ED, keys_EI = _of_all_lanes(exchange, tables, (own_ED, own_EI))
        top_k, ranges = self.index.config.top_k, tables.ranges
        chosen_TK = choose(index_q_TJI, weights_TJ, keys_EI, ranges=ranges, top_k=top_k)
        mixed_THD, mass_TK = sparse_attention(
            q_THD,
            near_RD,
            entries_ED,
            sinks_H,
            ranges=ranges,
            scale=self.config.head_dim**-0.5,
            chosen_TK=chosen_TK,
            needs_mass=True,
        )
        assert mass_TK is not None
        loss = index_loss(index_q_TJI, weights_TJ, keys_EI, chosen_TK, mass_TK, is_real_T)
        return mixed_THD, loss

    def _pooled(
        self,
        pack: PackContext,
        projections: EntryProjections,
        kv_RX: Tensor,
        gates_RX: Tensor,
        bias_GX: Tensor,
    ) -> Tensor:
        """The lane's entries of the pack, normed and rotated: (E, width of the norm)."""
        kind, rope = self.kind, self.rope
        tables = entry_tables(pack, kind, kv_RX.device)
        values_ED = pooled(kv_RX, gates_RX, bias_GX, tables.rows, overlap=kind.overlap)
        entries_ED = projections.norm(values_ED)
        wide = torch.promote_types(kv_RX.dtype, torch.float32)
        name = f"{kind}, rotated by {rope} in {wide}"
        cos_sin = table(pack.padded, name, lambda: rope_at(rope, tables.positions, wide))
        start = entries_ED.shape[1] - self.config.rope_dim
        return rotate(entries_ED.unsqueeze(1), *cos_sin, start=start).squeeze(1)


def _with_halos(exchange: Exchange, tables: EntryTables, rows: Rows) -> Rows:
    """The lane's rows, each chunk after the rows before it; all in one exchange."""
    shared = tables.shared
    if shared is None or not shared.halo:
        return rows
    together = torch.cat(rows, dim=1)
    before = exchange.rows_before(together, shared.halo)
    assert before is not None
    all_rows = torch.cat([before.flatten(0, 1), together]).index_select(0, shared.after_halos)
    return tuple(all_rows.split([part.shape[1] for part in rows], dim=1))


def _of_all_lanes(exchange: Exchange, tables: EntryTables, entries: Rows) -> Rows:
    """All entries of the pack, in order."""
    shared = tables.shared
    if shared is None:
        return entries
    together = torch.cat(entries, dim=1)
    gathered = exchange.gather_uneven(together, most=shared.most, order=shared.order)
    return tuple(gathered.split([part.shape[1] for part in entries], dim=1))
