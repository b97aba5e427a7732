"""Mixers that carry a state along a sequence: Mamba2 and the gated delta net.

In: hidden states (T, C) and the context. Out: (T, C). Such a mixer is

    project → convolution with SiLU, then scan, inside each sequence → gated norm → project

How a pack that lanes share is served is chosen for each pack:

- CP size 1: the scan alone; nothing travels.
- `heads`: an all-to-all gives each lane all tokens of its share of the heads, with their channels
  of the convolution, and a second one brings the outputs back. `over_heads` says when it is legal.
- `states`: tokens stay, and lanes pass states. The convolution of a chunk reads the kernel − 1 rows
  before it, brought by one exchange. Every chunk is scanned from a state of 0, which gives its
  final state and its transition, and one gather brings those of all chunks and sequences to all
  lanes. A lane composes the states that enter its own chunks, and adds what they contribute: the
  products within chunks are not made again. A lane receives 2·(c − 1) states of each sequence at CP
  size c, however long it is, so a pack of many short sequences is expensive.

T tokens, C channels of the convolution and K its taps, H heads, V width of a head's output; S
sequences.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from longshore.arch.part import Norm
from longshore.arch.scan import DeltaNetConfig, Mamba2Config
from longshore.batch import Boundaries, PackContext, SeqContext
from longshore.model.fill import CONV, DECAY_RATES, ONES, RESIDUAL, STEP_BIASES, Fill
from longshore.model.interface import (
    Exchange,
    HostTableMaker,
    Rows,
    TableSetting,
    ThreeStepMixer,
    over_packs,
)
from longshore.model.norm_rope import Float32Parameters, NormAfterGate, NormBeforeGate, Tables
from longshore.ops.boundaries import (
    Bounds,
    PreparedScan,
    chunk_rows,
    chunk_table,
    chunks,
    conv_spans,
    filled_spans,
)
from longshore.ops.conv import causal_conv
from longshore.ops.delta_rule import prepare_heads
from longshore.ops.ssd import prepare_ssd
from longshore.settings import ScanKind

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class ScanInputs:
    """What a scan reads: rows of tokens, and what belongs to channels and heads.

    Mamba2 with 4 heads of 8, 2 groups and a state of 16 convolves x, B, C: parts (4, 8), (2, 16),
    (2, 16).
    """

    mixed: Tensor
    """(T, C), what is convolved."""
    parts: tuple[tuple[int, int], ...]
    """Heads and width of each part of its channels."""
    gates: tuple[Tensor, ...]
    """(T, H) each."""
    taps: Tensor
    """(C, K), of the convolution."""
    bias: Tensor | None
    """(C), of the convolution."""
    per_head: tuple[Tensor, ...]
    """(H) each."""

    def of_lane(self, exchange: Exchange) -> "ScanInputs":
        """All rows of the pack with the lane's share of the heads."""
        rank, size = exchange.rank, exchange.size
        parts = self._spread(self.mixed, size, dim=1)
        gates = [gate.unsqueeze(2) for gate in self.gates]
        received = exchange.to_heads((*parts, *gates))
        mixed, own_gates = received[: len(parts)], received[len(parts) :]

        def share(channels: Tensor) -> Tensor:
            spread = self._spread(channels, size, dim=0)
            return torch.cat([part.chunk(size)[rank].flatten(0, 1) for part in spread])

        return replace(
            self,
            mixed=torch.cat([part.flatten(1) for part in mixed], dim=1),
            parts=tuple((part.shape[1], part.shape[2]) for part in mixed),
            gates=tuple(gate.squeeze(2) for gate in own_gates),
            taps=share(self.taps),
            bias=None if self.bias is None else share(self.bias),
            per_head=tuple(number.chunk(size)[rank] for number in self.per_head),
        )

    def _spread(self, channels: Tensor, size: int, *, dim: int) -> list[Tensor]:
        """The parts with at least one head for each of `size` lanes, by repeating each."""
        parts = split_heads(channels, self.parts, dim=dim)
        return [
            part if heads % size == 0 else part.repeat_interleave(size // heads, dim=dim)
            for part, (heads, _) in zip(parts, self.parts, strict=True)
        ]


def over_heads(inputs: ScanInputs, cp_size: int, *, kind: ScanKind) -> bool:
    """Whether lanes share out the heads of a pack of this CP size; else they pass states.

    The CP size must divide the heads, and for each part of the channels either divide its heads or
    be a multiple of them: then a head of the part (a group of Mamba2, a key head of the delta rule)
    goes to all lanes that need it. `auto` takes heads where that is legal. With 4 heads in 2 groups
    CP sizes 2 and 4 go by heads, at 4 with each group on two lanes; CP size 3 goes by states.
    """
    if kind == "states":
        return False
    heads = inputs.gates[0].shape[1]
    parts = [count for count, _ in inputs.parts]
    if heads % cp_size == 0 and all(n % cp_size == 0 or cp_size % n == 0 for n in parts):
        return True
    if kind == "auto":
        return False
    raise ValueError(
        f"parallel.scan='heads': CP size {cp_size} cannot split {heads} heads with parts of "
        f"{', '.join(map(str, parts))} heads; plan with other CP sizes, or use "
        "parallel.scan='states'"
    )


def entering_states(
    transition: Tensor, final: Tensor, exchange: Exchange, *, compose: Callable[..., Tensor]
) -> Tensor:
    """(2·S, …): the state that enters each chunk of this lane, alternately early and late.

    With transition ½ and final states 4, 6, 8 of chunks 0, 1, 2, chunk 3 begins with
    8 + ½·(6 + ½·4) = 12.
    """
    rank, size = exchange.rank, exchange.size
    ends = exchange.gather_chunks(torch.cat([transition.flatten(1), final.flatten(1)], dim=1))
    widths = [transition[0].numel(), final[0].numel()]
    transitions, finals = ends.split(widths, dim=2)
    state = final.new_zeros(len(final) // 2, *final.shape[1:])
    early = state
    steps = zip(transitions.unbind(), finals.unbind(), strict=True)
    for chunk, (change, added) in enumerate(steps):
        if chunk == rank:
            early = state
        if chunk == 2 * size - 1 - rank:
            break
        kept = compose(change.unflatten(1, transition.shape[1:]), state)
        state = kept + added.unflatten(1, final.shape[1:])
    return torch.stack([early, state], dim=1).flatten(0, 1)


def split_heads(
    joined: Tensor, parts: tuple[tuple[int, int], ...], *, dim: int
) -> tuple[Tensor, ...]:
    """Channels along `dim` as parts, each with dims for its heads and their width."""
    pieces = joined.split([heads * width for heads, width in parts], dim=dim)
    return tuple(piece.unflatten(dim, shape) for piece, shape in zip(pieces, parts, strict=True))


def ssd_tables(pack: PackContext, *, setting: TableSetting) -> None:
    """The chunks of Mamba2's scan: those of its kernels, or those of plain torch.

    A pack of sequences of 100 and 70 tokens gets "ssd chunks of 64", or "chunks of 64".
    """
    for bounds in scanned(pack, setting.scan):
        if setting.has("triton"):
            chunk_table(bounds, bounds.offsets[-1], HOST)
            conv_spans(bounds, HOST)
        elif not bounds.fixed:
            _plain_chunks(bounds, setting)


def delta_tables(pack: PackContext, *, setting: TableSetting) -> None:
    """The spans of flash-linear-attention, which may refuse, and the chunks of plain torch.

    A lane's own chunks of a shared pack need transitions, which only plain torch computes.
    """
    for bounds in scanned(pack, setting.scan):
        if not bounds.fixed:
            _plain_chunks(bounds, setting)
        if setting.has("triton"):
            conv_spans(bounds, HOST)
        if bounds is pack.padded and setting.has("fla"):
            filled_spans(bounds, bounds.offsets[-1], HOST)


def _plain_chunks(bounds: Boundaries, setting: TableSetting) -> None:
    """As large as they are on the device; their number is read on the host, so not for graphs."""
    chunks(bounds, bounds.offsets[-1], chunk_rows(setting.device), HOST)


def scanned(pack: PackContext, scan: ScanKind) -> list[Boundaries]:
    """The boundaries that a lane scans: of whole sequences, and of its chunks of a shared pack.

    With `auto` either may be: which one depends on the layer's heads.
    """
    if pack.zigzag is None or scan == "heads":
        return [pack.padded]
    return [pack.zigzag.chunks] if scan == "states" else [pack.padded, pack.zigzag.chunks]


class Decay(Float32Parameters):
    """How each head forgets: its rate, −exp(A_log), and the bias of its step, dt_bias.

    D: the share of x that reaches a head's output directly; None without `skip`.
    """

    def __init__(self, heads: int, *, skip: bool) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.D = nn.Parameter(torch.ones(heads)) if skip else None

    def forward(self, x: Tensor) -> Rows:
        """x: not read; FSDP wants an argument on GPUs, where a block is recomputed."""
        rates = -copied(self.A_log).exp(), copied(self.dt_bias)
        return rates if self.D is None else (*rates, copied(self.D))


def copied(parameter: Tensor) -> Tensor:
    """A copy, in float32 at least, that outlives the gathered parameter."""
    return parameter.to(torch.promote_types(parameter.dtype, torch.float32), copy=True)


class RecurrentMixer(ThreeStepMixer):
    """What both mixers share: convolution and scan of each pack, by whichever way it is served.

    The recurrence is one whose state is affine in the state it began with.
    """

    FILLS: ClassVar[Mapping[str, Fill]] = {
        "conv1d.weight": CONV,
        "per_head.A_log": DECAY_RATES,
        "per_head.dt_bias": STEP_BIASES,
        "per_head.D": ONES,
        "norm.weight": ONES,
        "out_proj.weight": RESIDUAL,
    }

    parts: tuple[tuple[int, int], ...]
    """Heads and width of each part of the convolution's channels."""
    conv1d: nn.Conv1d
    """Holds the taps (C, 1, K) of the convolution under their usual names; never called."""
    per_head: Decay
    """How the heads forget."""

    def prepare(
        self, parts: Rows, gates: Rows, per_head: Rows, bounds: Bounds | None
    ) -> PreparedScan:
        """The scan of convolved parts over these spans; shapes come from the tensors."""
        raise NotImplementedError

    def compose(self, transition: Tensor, state: Tensor) -> Tensor:
        """What the transition of a span leaves of a state."""
        raise NotImplementedError

    def apart(self, x: Tensor) -> Rows:
        per_head: Rows = self.per_head(x)
        return per_head

    def core(self, ctx: SeqContext, apart: Rows, *rows: Tensor) -> Tensor:
        """(T, H, V). rows: what is convolved, then the gates."""
        taps_CK, bias_C = self.conv1d.weight[:, 0], self.conv1d.bias

        def scan_pack(exchange: Exchange, mixed: Tensor, *gates: Tensor) -> Tensor:
            inputs = ScanInputs(mixed, self.parts, gates, taps_CK, bias_C, apart)
            if exchange.size == 1:
                return self._prepared(inputs, exchange.bounds).run()[0]
            if over_heads(inputs, exchange.size, kind=self.exchanges.scan):
                lane_inputs = inputs.of_lane(exchange)
                return exchange.from_heads(
                    self._prepared(lane_inputs, exchange.pack.padded).run()[0]
                )
            before = exchange.rows_before(mixed, taps_CK.shape[1] - 1)
            prepared = self._prepared(inputs, exchange.bounds, before=before)
            initial = entering_states(*prepared.ends(), exchange, compose=self.compose)
            return prepared.run(initial)[0]

        return over_packs(scan_pack, ctx, self.exchanges, *rows)

    def _prepared(
        self, inputs: ScanInputs, bounds: Bounds | None, *, before: Tensor | None = None
    ) -> PreparedScan:
        """The scan over these spans, convolved; before: the rows before each span."""
        convolved_TC = causal_conv(
            inputs.mixed, inputs.taps, inputs.bias, bounds=bounds, before=before, activation=True
        )
        parts = split_heads(convolved_TC, inputs.parts, dim=1)
        return self.prepare(parts, inputs.gates, inputs.per_head, bounds)


class Mamba2(RecurrentMixer):
    """Parameters are named and laid out as in Hugging Face's Mamba2 and Nemotron-H.

    Only per_head.{A_log, dt_bias, D} are directly in the mixer there. in_proj gives the gate z,
    then x, B and C, which are convolved, then a step dt of each head; steps are
    softplus(dt + dt_bias) within the config's limits.

    H heads of width P, G groups, N width of the state. With 4 heads of 8, 2 groups and a state of
    16, in_proj gives 32 + (32 + 32 + 32) + 4 = 132 channels.
    """

    @staticmethod
    def table_makers(config: Mamba2Config) -> tuple[HostTableMaker, ...]:
        return (ssd_tables,)

    def __init__(self, config: Mamba2Config, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
        group = (config.groups, config.state_dim)
        self.parts = ((config.heads, config.head_dim), group, group)
        self.in_proj = nn.Linear(width, config.projected, bias=config.bias)
        conv = config.conv_dim
        self.conv1d = nn.Conv1d(conv, conv, config.kernel, groups=conv, bias=config.conv_bias)
        self.per_head = Decay(config.heads, skip=True)
        self.norm = NormAfterGate(config.inner, config.norm_groups or config.groups, norm.eps)
        self.out_proj = nn.Linear(config.inner, width, bias=config.bias)

    def before(self, x_TC: Tensor, tables: Tables) -> tuple[Rows, Rows]:
        config = self.config
        sizes = [config.inner, config.conv_dim, config.heads]
        z_TX, mixed_TX, dt_TH = self.in_proj(x_TC).split(sizes, dim=-1)
        return (mixed_TX, dt_TH), (z_TX,)

    def prepare(
        self, parts: Rows, gates: Rows, per_head: Rows, bounds: Bounds | None
    ) -> PreparedScan:
        x_THP, B_TGN, C_TGN = parts
        (dt_TH,) = gates
        A_H, dt_bias_H, D_H = per_head
        config = self.config
        step_TH = softplus(dt_TH + dt_bias_H).clamp(config.dt_min, config.dt_max)
        return prepare_ssd(x_THP, step_TH, A_H, B_TGN, C_TGN, D_H=D_H, bounds=bounds)

    def compose(self, transition: Tensor, state: Tensor) -> Tensor:
        return transition[..., None, None] * state

    def after(self, mixed: Tensor, *kept: Tensor) -> Tensor:
        (z_TX,) = kept
        output_TC: Tensor = self.out_proj(self.norm(mixed.flatten(-2), z_TX))
        return output_TC


class DeltaNet(RecurrentMixer):
    """Gated delta net. Parameters are named and laid out as in Hugging Face's Qwen3-Next.

    Only per_head.{A_log, dt_bias} are directly in the mixer there. A key head's rows of
    in_proj_qkvz are its q and k, then v and z of the value heads it serves; those of in_proj_ba
    their b and a. Queries and keys have length 1; a head forgets by
    exp(−exp(A_log)·softplus(a + dt_bias)) and learns by sigmoid(b).

    R key heads of width K, H value heads of width V. With 2 key heads of 8 and 4 value heads of 6,
    in_proj_qkvz gives 2·(8 + 8 + 12 + 12) = 80 channels.
    """

    @staticmethod
    def table_makers(config: DeltaNetConfig) -> tuple[HostTableMaker, ...]:
        return (delta_tables,)

    def __init__(self, config: DeltaNetConfig, width: int, *, norm: Norm) -> None:
        super().__init__()
        self.config = config
        key = (config.key_heads, config.key_dim)
        self.parts = (key, key, (config.value_heads, config.value_dim))
        self.in_proj_qkvz = nn.Linear(width, config.conv_dim + config.values, bias=False)
        self.in_proj_ba = nn.Linear(width, 2 * config.value_heads, bias=False)
        conv = config.conv_dim
        self.conv1d = nn.Conv1d(conv, conv, config.kernel, groups=conv, bias=False)
        self.per_head = Decay(config.value_heads, skip=False)
        self.norm = NormBeforeGate(config.value_dim, norm.eps)
        self.out_proj = nn.Linear(config.values, width, bias=False)

    def before(self, x_TC: Tensor, tables: Tables) -> tuple[Rows, Rows]:
        config = self.config
        served = config.value_heads // config.key_heads
        keys, values = config.key_dim, served * config.value_dim
        qkvz_TRX = self.in_proj_qkvz(x_TC).unflatten(-1, (config.key_heads, -1))
        *qkv, z_TRX = qkvz_TRX.split([keys, keys, values, values], dim=-1)
        ba_TRX = self.in_proj_ba(x_TC).unflatten(-1, (config.key_heads, -1))
        b_TH, a_TH = (part.flatten(-2) for part in ba_TRX.chunk(2, dim=-1))
        mixed_TX = torch.cat([part.flatten(-2) for part in qkv], dim=-1)
        return (mixed_TX, b_TH, a_TH), (z_TRX,)

    def prepare(
        self, parts: Rows, gates: Rows, per_head: Rows, bounds: Bounds | None
    ) -> PreparedScan:
        q_TRK, k_TRK, v_THV = parts
        b_TH, a_TH = gates
        A_H, dt_bias_H = per_head
        g_TH = A_H * softplus(a_TH + dt_bias_H)
        beta_TH = b_TH.to(g_TH.dtype).sigmoid()
        return prepare_heads(q_TRK, k_TRK, v_THV, g_TH, beta_TH, bounds=bounds)

    def compose(self, transition: Tensor, state: Tensor) -> Tensor:
        return transition @ state

    def after(self, mixed: Tensor, *kept: Tensor) -> Tensor:
        (z_TRX,) = kept
        normed_THV = self.norm(mixed, z_TRX.reshape(mixed.shape))
        output_TC: Tensor = self.out_proj(normed_THV.flatten(-2))
        return output_TC
