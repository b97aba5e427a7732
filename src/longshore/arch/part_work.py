"""What a part of a layer has to do in one micro-batch: products, saved values, FLOPs of its core.

In: the config of a part, the hidden width and the lengths of a micro-batch. Out: Work, amounts that
calibration divides measured seconds by and that the predictor multiplies with them. No torch.

Of 3 tokens, attention with 1 head of 2 dims at width 4 has four products of 3 rows, saves 3·(8 + 8)
values beside statistics (8 of the norm), has 4·2·6 = 48 FLOPs in its core and 1·2 channels of a
sequence.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from longshore.arch.attention import AttentionConfig, MLAConfig
from longshore.arch.decoder import DecoderConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.hyper import HyperConfig
from longshore.arch.lora import LoRAConfig
from longshore.arch.part import Part, Product, Saved
from longshore.arch.scan import DeltaNetConfig, Mamba2Config

NAMES: Mapping[type, str] = {
    AttentionConfig: "attention",
    MLAConfig: "mla",
    Mamba2Config: "mamba",
    DeltaNetConfig: "delta",
    MLPConfig: "mlp",
    MoEConfig: "experts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a part does in a micro-batch, forward."""

    kind: str
    """Of arch/machine.py's KINDS."""
    head_dim: int
    """By which its costs are looked up first."""
    channels: int
    """By which its costs are looked up next."""
    rows: int
    """Of its products: tokens with padding."""
    products: tuple[Product, ...]
    """Of its plain products."""
    values: float
    """Saved for backward, in numbers of the dtype, with those of the norm before it."""
    core: float
    """FLOPs beyond the plain products; of a scan those of whole chunks."""
    sequences: float
    """Sequences times channels."""
    weights: float = 0
    """Weights that are read and whose gradients are written, beside those of plain products."""
    frozen: bool = False
    """Whether its weights have no gradients."""
    factors: tuple[Product, ...] = ()
    """Products of the low-rank factors beside its own."""

    def with_factors(self, lora: LoRAConfig | None) -> "Work":
        """The same where low-rank factors alone are trained."""
        if lora is None:
            return self
        return replace(self, frozen=True, factors=lora.factors(self.products))


def part_kind(part: Part) -> str:
    return NAMES.get(type(part), "other")


def part_works(
    part: Part, width: int, lengths: Sequence[int], *, item: int, scan_chunk: int
) -> tuple[Work, ...]:
    """The works of a part with its norm; a shared expert is an MLP of its own.

    lengths: of all runs of tokens, padding too. item: bytes of a number. scan_chunk: a scan's
    lengths are rounded up to a multiple of this.
    """
    if not isinstance(part, MoEConfig) or not part.shared_width:
        return (part_work(part, width, lengths, item=item, scan_chunk=scan_chunk),)
    routed = replace(part, shared_width=0, shared_gate=False)
    rows, shared = sum(lengths), part.shared
    gate = (Product(width, 1),) * part.shared_gate
    saved = shared.saved(width) + Saved((width + 1) * part.shared_gate)
    beside = Work(
        kind="mlp",
        head_dim=1,
        channels=part.shared_width,
        rows=rows,
        products=(*shared.products(width), *gate),
        values=rows * _values(saved, item),
        core=0,
        sequences=0,
    )
    return part_work(routed, width, lengths, item=item, scan_chunk=scan_chunk), beside


def part_work(
    part: Part, width: int, lengths: Sequence[int], *, item: int, scan_chunk: int = 1
) -> Work:
    """The work of a part with its norm, as one."""
    rows = sum(lengths)
    make = getattr(part, "products", None)
    products: tuple[Product, ...] = () if make is None else make(width)
    plain = sum(each.flops for each in products)
    chunk = scan_chunk if isinstance(part, Mamba2Config | DeltaNetConfig) else 1
    counted = Counter(-(-n // chunk) * chunk for n in lengths).items()
    core = sum(count * (part.flops(width, n) - n * plain) for n, count in counted)
    head_dim, channels = _sizes(part)
    return Work(
        kind=part_kind(part),
        head_dim=head_dim,
        channels=channels,
        rows=rows,
        products=products,
        values=rows * _values(Saved(2 * width, 1) + part.saved(width), item),
        core=core,
        sequences=len(lengths) * channels,
        weights=part.experts * 3 * width * part.width if isinstance(part, MoEConfig) else 0,
    )


def embedding_work(config: DecoderConfig, rows: int) -> Work:
    """The look-up of one stream of rows; its gradient is as large as the table."""
    return Work(
        kind="embedding",
        head_dim=1,
        channels=config.width,
        rows=rows,
        products=(),
        values=rows * config.width,
        core=0,
        sequences=0,
        weights=config.vocab_size * config.width,
    )


def head_work(config: DecoderConfig, rows: int) -> Work:
    """The head with its loss, for one stream of rows. Its values are the logits."""
    return Work(
        kind="head",
        head_dim=1,
        channels=config.width,
        rows=rows,
        products=(Product(config.width, config.vocab_size),),
        values=rows * config.vocab_size,
        core=0,
        sequences=0,
        weights=config.vocab_size * config.width,
    )


def join_work(config: DecoderConfig, rows: int) -> Work:
    """What a depth of multi-token prediction does beside its block, embedding and head."""
    width = config.width
    return Work(
        kind="other",
        head_dim=1,
        channels=width,
        rows=rows,
        products=(Product(2 * width, width),),
        values=rows * 7 * width,
        core=0,
        sequences=0,
    )


def hyper_work(config: DecoderConfig, residuals: HyperConfig, rows: int, *, item: int) -> Work:
    """What hyper-connections do around one part."""
    width = config.width
    products = residuals.products(width)
    saved = Saved(config.row_width) + residuals.saved(width)
    return Work(
        kind="other",
        head_dim=1,
        channels=config.row_width,
        rows=rows,
        products=products,
        values=rows * _values(saved, item),
        core=rows * (residuals.flops(width) - sum(each.flops for each in products)),
        sequences=0,
    )


def collapse_work(config: DecoderConfig, residuals: HyperConfig, rows: int, *, item: int) -> Work:
    """What makes one row of several, at the end and at each depth."""
    width = config.width
    product = Product(config.row_width, residuals.count)
    return Work(
        kind="other",
        head_dim=1,
        channels=config.row_width,
        rows=rows,
        products=(product,),
        values=rows * _values(residuals.collapse_saved(width), item),
        core=rows * (residuals.collapse_flops(width) - product.flops),
        sequences=0,
    )


def block_works(
    config: DecoderConfig, lengths: Sequence[int], *, item: int, scan_chunk: int = 1
) -> Counter[Work]:
    """The works of all layers and depths, each with how often it is done; see part_works."""
    parts = Counter(part for layer in (*config.layers, *config.mtp) for part in layer.parts)
    counted: Counter[Work] = Counter()
    for part, times in parts.items():
        for work in part_works(part, config.width, lengths, item=item, scan_chunk=scan_chunk):
            counted[work] += times
    if config.residuals is not None:
        rows = sum(lengths)
        counted[hyper_work(config, config.residuals, rows, item=item)] += parts.total()
        collapse = collapse_work(config, config.residuals, rows, item=item)
        counted[collapse] += 1 + len(config.mtp)
    if depths := len(config.mtp):
        counted[join_work(config, sum(lengths))] += depths
    return Counter({work.with_factors(config.lora): times for work, times in counted.items()})


def end_works(config: DecoderConfig, rows: int) -> Counter[Work]:
    """Embedding and head, once and once more for each depth."""
    works = (embedding_work(config, rows), head_work(config, rows))
    return Counter({work.with_factors(config.lora): 1 + len(config.mtp) for work in works})


def _values(saved: Saved, item: int) -> float:
    """Statistics are wider than values in half precision."""
    return saved.values + saved.stats * max(item, 4) / item


def _sizes(part: Part) -> tuple[int, int]:
    """A head's width, and channels."""
    match part:
        case AttentionConfig():
            return part.head_dim, part.heads * part.head_dim
        case MLAConfig():
            return part.head_dim, part.heads * part.value_dim
        case Mamba2Config():
            return part.head_dim, part.inner
        case DeltaNetConfig():
            return part.key_dim, part.values
        case MLPConfig():
            return 1, part.width
        case MoEConfig():
            return part.width, part.experts
    return 1, 1
