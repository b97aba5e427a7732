"""Measures each kind of part, and fits what it costs beside its matrix products.

In: References. Out: a PartCost for each: its micro-batches are timed whole, what the measured
products predict is subtracted, and the rest is fitted by amounts of work (least squares of the
relative error, no coefficient below 0).

    attention at lengths 128 and 512 with rests of 3 and 6 ms: so much a value, so much a FLOP
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longshore.arch.machine import PartCost
from longshore.arch.nonnegative import fit_nonnegative
from longshore.arch.part_work import Work, embedding_work, head_work, part_works
from longshore.arch.product_times import ProductTimes
from longshore.calibrate.modules import make_module, runnable
from longshore.calibrate.references import Case, Reference, cases_of
from longshore.calibrate.timing import Clock, Timer, free
from longshore.ops.boundaries import chunk_rows

AMOUNTS = {
    "attention": ("call", "value", "core", "sequence"),
    "mla": ("call", "value", "core", "sequence"),
    "mamba": ("call", "value", "core", "sequence"),
    "delta": ("call", "value", "core", "sequence"),
    "mlp": ("call", "value"),
    "experts": ("weight", "core"),
    "embedding": ("weight", "value"),
    "head": ("weight", "value"),
}
"""What the rest of a kind is fitted by. Of amounts that only grow together one is chosen: experts'
FLOPs grow with their values, and a reference has one number of weights."""
TINY = 16
"""Tokens at which the host is measured: the device never keeps it waiting."""


@dataclass(frozen=True, slots=True)
class PartSample:
    """One timed micro-batch."""

    work: Work
    """What was done."""
    forward: float
    """Seconds of forward alone."""
    both: float
    """Seconds of forward and backward."""
    plain_forward: float
    """What the measured products predict of `forward`."""
    plain: float
    """What the measured products predict of `both`."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A part's cost, and how well it fits."""

    cost: PartCost
    samples: tuple[PartSample, ...]
    error: float
    """Median relative error of its own micro-batches."""


def measure_part(
    reference: Reference,
    products: ProductTimes,
    timer: Timer,
    *,
    dtype: torch.dtype,
    clock: Clock,
    quick: bool,
) -> Fitted:
    """Builds, times and fits one part; its memory is free afterwards."""
    clock.tell(reference.name)
    device = timer.device
    module = make_module(reference, device=device, dtype=dtype)
    samples = []
    for lengths in cases_of(reference.kind, device.type, quick=quick):
        run = runnable(reference, module, lengths, device=device, dtype=dtype)
        work = work_of(reference, lengths, item=dtype.itemsize, scan_chunk=chunk_rows(device))
        pairs = [products.seconds(work.rows, each.k, each.n) for each in work.products]
        plain = sum(first for first, _ in pairs)
        both = plain + sum(second for _, second in pairs)
        samples.append(
            PartSample(work, timer.seconds(run.forward), timer.seconds(run.both), plain, both)
        )
    small = runnable(reference, module, (TINY,), device=device, dtype=dtype)
    host, host_forward = (timer.host_seconds(run) for run in (small.both, small.forward))
    del module, run, small
    free(device)
    return fit_part(reference.name, samples, host=host, host_forward=host_forward)


def work_of(reference: Reference, lengths: Case, *, item: int, scan_chunk: int) -> Work:
    """A layer of experts must have no shared one."""
    decoder, tokens = reference.decoder, sum(lengths)
    if reference.part is not None:
        part, width = reference.part, decoder.width
        (work,) = part_works(part, width, lengths, item=item, scan_chunk=scan_chunk)
        return work
    make = embedding_work if reference.kind == "embedding" else head_work
    return make(decoder, tokens)


def fit_part(
    name: str, samples: Sequence[PartSample], *, host: float, host_forward: float
) -> Fitted:
    """The cost of a part from its timed micro-batches."""
    first = samples[0].work
    names = AMOUNTS[first.kind]
    amounts = [[amount_of(sample.work)[name] for name in names] for sample in samples]
    totals = [sample.both for sample in samples]
    rests = [sample.both - sample.plain for sample in samples]
    fitted = dict(zip(names, fit_nonnegative(amounts, rests, totals=totals), strict=True))
    shares = [
        (sample.forward - sample.plain_forward) / rest
        for sample, rest in zip(samples, rests, strict=True)
        if rest > 0
    ]
    forward = min(max(statistics.median(shares), 0.0), 1.0) if shares else 1 / 3
    cost = PartCost(
        kind=first.kind,
        reference=name,
        origin="measured",
        head_dim=first.head_dim,
        channels=first.channels,
        **{key: fitted.get(key, 0.0) for key in ("call", "value", "core", "sequence", "weight")},
        forward=forward,
        host=host,
        host_forward=min(host_forward, host),
    )
    errors = []
    for sample, row in zip(samples, amounts, strict=True):
        rest = sum(fitted[key] * amount for key, amount in zip(names, row, strict=True))
        errors.append(abs((sample.plain + rest) / sample.both - 1))
    return Fitted(cost, tuple(samples), statistics.median(errors))


def amount_of(work: Work) -> dict[str, float]:
    """The amounts of work, by the names of PartCost's coefficients."""
    return {
        "call": 1.0,
        "value": work.values,
        "core": work.core,
        "sequence": work.sequences,
        "weight": work.weights,
    }
