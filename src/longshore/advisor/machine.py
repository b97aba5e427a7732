"""MachineProfile: what was measured on one machine, and what is arithmetic. No torch.

In: a name such as "h200" (a file in advisor/profiles), one such as "h100" (derived from it by data
sheets), or a JSON file that `longshore calibrate` wrote. Out: frozen data that advisor/step_time.py
predicts steps from. Nothing in it depends on a model: a profile measured once serves every model.

    machine = load_machine("h200")
    machine.peak                                    989.5e12, the vendor's dense FLOP/s
    machine.products.seconds(8192, 4096, 4096)      forward and backward seconds of a product
    machine.part("attention", head_dim=128, channels=2048)      the nearest measured attention

Every entry says whether it was measured, was derived from another machine's, or follows from
arithmetic, as the exchange between GPUs does where only one was there. What the H200 needs for
FLOPs at 72 % of its peak, an A100 of 312 instead of 989.5 TFLOP/s is taken to need 3.17 times as
long for; bytes take 4.8 / 2.039 times as long, and launches the same.

Matrix products were measured on a full grid of rows × k × n. Between its points the logarithms of
seconds are linear in the logarithms of rows, k and n; beyond the largest a product runs at the rate
of the largest; below the smallest it takes as long as the smallest. On a grid of 100 and 400 rows
at k = n = 64 that take 1 and 4 ms, 200 rows take 2 ms, 800 take 8, 50 take 1.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from itertools import product
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from longshore.arch.costs import PEAKS, vendor_peak
from longshore.arch.memory import ITEM_BYTES
from longshore.plan.cost import CostProfile, load_profile, names_machine
from longshore.settings import names_of

Origin = Literal["measured", "derived", "arithmetic"]
"""derived: measured on another machine, and scaled by the ratio of two data sheets."""
Corner = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class ProductTime:
    """One product of (rows, k) and (k, n)."""

    rows: int
    """Rows of the first factor: tokens."""
    k: int
    """Numbers that are summed over."""
    n: int
    """Columns of the result."""
    forward: float
    """Seconds of the product."""
    backward: float
    """Seconds of the gradients of both factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTimes:
    """All measured products; without any, every product runs at one rate."""

    origin: Origin
    """Where the numbers come from."""
    flop: float
    """Seconds of a FLOP in the fastest product."""
    grid: tuple[ProductTime, ...] = ()
    """Every combination of some rows, k and n, once; () for none."""
    _axes: tuple[tuple[int, ...], ...] = field(init=False, compare=False, repr=False)
    """The sizes of rows, k and n in the grid, ascending."""
    _logs: dict[Corner, tuple[float, float]] = field(init=False, compare=False, repr=False)
    """Logarithms of both times of each product."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.flop) and self.flop > 0):
            raise ValueError(f"products: flop is {self.flop}; it must be a number above 0")
        points = [(each.rows, each.k, each.n) for each in self.grid]
        axes = tuple(tuple(sorted(set(sizes))) for sizes in zip(*points, strict=True))
        if len(points) != len(set(points)) or len(points) != math.prod(map(len, axes or [()])):
            raise ValueError(
                f"products: the grid has {len(points)} products; it must have every combination "
                "of its rows, k and n once"
            )
        if bad := [each for each in self.grid if min(each.forward, each.backward) <= 0]:
            raise ValueError(f"products: {bad[0]} takes no time; remove it, or measure again")
        logs = {
            point: (math.log(each.forward), math.log(each.backward))
            for point, each in zip(points, self.grid, strict=True)
        }
        object.__setattr__(self, "_axes", axes)
        object.__setattr__(self, "_logs", logs)

    def seconds(self, rows: float, k: int, n: int) -> tuple[float, float]:
        """Seconds of the forward product, and of both backward products."""
        flops = 2.0 * rows * k * n
        if not self.grid:
            return flops * self.flop, 2 * flops * self.flop
        if not flops:
            return 0.0, 0.0
        ways, scale = [], 1.0
        for size, axis in zip((rows, k, n), self._axes, strict=True):
            scale *= max(1.0, size / axis[-1])
            ways.append(_between(axis, min(max(size, axis[0]), axis[-1])))
        forward = backward = 0.0
        for corner in product(*ways):
            weight = math.prod(share for _, share in corner)
            first, second = self._logs[tuple(at for at, _ in corner)]  # type: ignore[index]
            forward += weight * first
            backward += weight * second
        return math.exp(forward) * scale, math.exp(backward) * scale


def _between(axis: Sequence[int], size: float) -> list[tuple[int, float]]:
    """The neighbours of a size on an axis, each with its share in logarithms."""
    place = bisect_right(axis, size)
    low = axis[place - 1]
    if low == size or place == len(axis):
        return [(low, 1.0)]
    share = math.log(size / low) / math.log(axis[place] / low)
    return [(low, 1 - share), (axis[place], share)]


FORMAT = "longshore machine 1"
"""The value of the key "format", by which a file is told from a CostProfile."""
KINDS = ("attention", "mla", "mamba", "delta", "mlp", "experts", "embedding", "head", "other")
ARITHMETIC_PASSES = 4
"""How often a saved value is read or written where it was not measured: twice in each direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """What a vendor promises of a machine."""

    device: str
    """Its name, as torch has it or beginning like it."""
    peak: float
    """Dense FLOP/s of products in `dtype`."""
    memory_gb: float | None
    """Memory of each; None where it depends on what is built in."""
    bandwidth: float
    """Bytes/s of its memory."""
    link: float
    """Bytes/s to others of a node, both directions together."""
    node: int = 8
    """Machines that are connected fast."""
    dtype: str = "bfloat16"
    """Dtype of the arithmetic."""
    has_host: bool = True
    """Whether a host launches its kernels."""


H200 = DataSheet(  # NVIDIA H200 Tensor Core GPU data sheet (SXM): 1,979 TFLOP/s with sparsity
    device="NVIDIA H200", peak=PEAKS["H200"], memory_gb=141, bandwidth=4.8e12, link=900e9
)
DERIVED = {
    # NVIDIA H100 Tensor Core GPU data sheet (SXM): 1,979 TFLOP/s with sparsity
    "h100": DataSheet(
        device="NVIDIA H100", peak=PEAKS["H100"], memory_gb=80, bandwidth=3.35e12, link=900e9
    ),
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s
    "a100": DataSheet(
        device="NVIDIA A100", peak=PEAKS["A100"], memory_gb=80, bandwidth=2.039e12, link=600e9
    ),
    # NVIDIA DGX B200 data sheet, of each of its 8 GPUs: 4,500 TFLOP/s with sparsity
    "b200": DataSheet(
        device="NVIDIA B200", peak=PEAKS["B200"], memory_gb=180, bandwidth=8e12, link=1800e9
    ),
    # AMD EPYC 7763 data sheet: 64 cores at 2.45 GHz, of which each does 32 FLOPs a cycle with
    # AVX2; 8 channels of DDR4-3200. The link is an assumption: gloo, as calibrate takes it.
    "cpu": DataSheet(
        device="AMD EPYC 7763",
        peak=PEAKS["AMD EPYC 7763"],
        memory_gb=None,
        bandwidth=204.8e9,
        link=12.5e9,
        node=2,
        dtype="float32",
        has_host=False,
    ),
}
"""Machines that nothing was measured on; their profiles are made from the H200's."""
GIB_OF_GB = 139.8 / 141
"""What torch reports of an H200's memory, in GiB, for each GB of its data sheet."""


@dataclass(frozen=True, slots=True)
class Coefficient:
    """One number of a profile, in seconds of something, and where it comes from."""

    seconds: float
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCost:
    """What a kind of part costs beside its matrix products: device seconds of forward + backward.

    The norm before the part and the sum after it are included.
    """

    kind: str
    """One of KINDS."""
    reference: str
    """Which part was measured, in words."""
    origin: Origin
    """Where the numbers come from."""
    head_dim: int
    """Head size of the reference; parts are looked up by it first."""
    channels: int
    """Channels of the reference; parts are looked up by it next."""
    call: float
    """A call, however small."""
    value: float
    """A value saved for backward: memory traffic of norms, gates, rotations."""
    core: float
    """A forward FLOP that is not in the part's plain products."""
    sequence: float
    """A channel of a sequence."""
    weight: float
    """A weight that is read and whose gradient is written, however few the tokens."""
    forward: float
    """The share of all this in forward, from 0 to 1."""
    host: float
    """Host seconds to launch forward and backward; 0 where the host computes."""
    host_forward: float
    """Host seconds to launch forward alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedCosts:
    """What is no part of a layer."""

    byte: Coefficient
    """A byte that is read or written by a copy on the device."""
    block: Coefficient
    """Device seconds of a unit of FSDP, most of them blocks, beside its parts."""
    block_host: Coefficient
    """Host seconds of such a unit: FSDP's hooks."""
    graph_host: Coefficient
    """Host seconds to replay a block's graphs, instead of launching its parts."""
    round: Coefficient
    """Device seconds of a round, whatever is in it."""
    round_host: Coefficient
    """Host seconds of a round, whatever is in it."""
    round_token: Coefficient
    """Device seconds of a token of a round beside the parts: tables, masks, the last norm."""
    round_parameter: Coefficient
    """A parameter in a round: its gradient is added to that of earlier rounds."""
    step_parameter: Coefficient
    """A parameter in a step: FSDP copies and casts weights and gradients."""
    norm: Coefficient
    """A parameter: gradient norm and clipping."""
    optimizer: Coefficient
    """A parameter that is updated."""
    step: Coefficient
    """Device seconds of a step, whatever is in it."""
    step_host: Coefficient
    """Host seconds of a step, whatever is in it."""
    message: Coefficient
    """A byte that a pipeline stage hands to the next."""


@dataclass(frozen=True, slots=True)
class GatherCost:
    """What a byte costs that a lane gathers from the others of its CP group."""

    cp_size: int
    """Lanes of the group."""
    byte: float
    """Seconds."""
    origin: Origin
    """Where the number comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """One machine."""

    device: str
    """Its name, such as NVIDIA H200."""
    dtype: str
    """Dtype of the arithmetic that was measured."""
    torch: str
    """Version of torch; "" where nothing was measured."""
    notes: tuple[str, ...]
    """What is worth knowing: what was skipped, which kernels ran."""
    node: int
    """GPUs that are connected fast."""
    scan_chunk: int
    """Rows of a scan's chunk, to which lengths are rounded up."""
    products: ProductTimes
    """Matrix products."""
    parts: tuple[PartCost, ...]
    """Each kind of part; several references of one kind where they differ."""
    fixed: FixedCosts
    """What is no part of a layer."""
    gather: tuple[GatherCost, ...]
    """By CP size; the largest inside a node, and one across nodes at least."""

    @property
    def peak(self) -> float | None:
        """The vendor's dense FLOP/s, of which the MFU is a share; None if it is not known."""
        return vendor_peak(self.device, self.dtype)

    @property
    def basis(self) -> str:
        """Where its times come from, in words; "" where they were measured."""
        origin = self.products.origin
        if origin == "derived":
            return f"{self.device}: derived from data sheets, not measured"
        return "" if origin == "measured" else f"{self.device}: by arithmetic, not measured"

    def part(self, kind: str, *, head_dim: int, channels: int) -> PartCost | None:
        """The measured part of that kind that is nearest; None if none was measured."""
        own = [part for part in self.parts if part.kind == kind]

        def distance(part: PartCost) -> tuple[float, float]:
            sizes = (part.head_dim, head_dim), (part.channels, channels)
            first, second = (abs(math.log(max(a, 1) / max(b, 1))) for a, b in sizes)
            return first, second

        return min(own, key=distance, default=None)

    def byte_gathered(self, *, across: bool) -> float:
        """Seconds of a byte that a lane gathers: inside a node, or across nodes."""
        sizes = [each for each in self.gather if (each.cp_size > self.node) == across]
        nearest = sizes or list(self.gather)
        return max(nearest, key=lambda each: each.cp_size).byte if nearest else 0.0

    def origins(self) -> dict[str, Origin]:
        """Every entry by name, and where it comes from."""
        named: dict[str, Origin] = {"products": self.products.origin}
        named |= {f"{part.kind}: {part.reference}": part.origin for part in self.parts}
        named |= {each.name: getattr(self.fixed, each.name).origin for each in fields(FixedCosts)}
        return named | {f"gather at CP size {each.cp_size}": each.origin for each in self.gather}

    def as_json(self) -> dict[str, Any]:
        products = asdict(self.products)
        grid = [[p.rows, p.k, p.n, p.forward, p.backward] for p in self.products.grid]
        products = {"origin": products["origin"], "flop": products["flop"], "grid": grid}
        return {"format": FORMAT, **asdict(self), "products": products}


def derived_profile(measured: MachineProfile, was: DataSheet, sheet: DataSheet) -> MachineProfile:
    """What was measured on one machine, scaled by two data sheets to another.

    FLOPs by the peaks, bytes by the memories' bandwidths, exchange inside a node by the links; what
    a kernel or the host takes to begin stays, as does the network between nodes. A host that
    computes launches nothing.
    """
    size = ITEM_BYTES[sheet.dtype] / ITEM_BYTES[was.dtype]
    by_peak, by_memory = was.peak / sheet.peak, was.bandwidth / sheet.bandwidth
    value, host = size * by_memory, float(sheet.has_host)
    scales = {"byte": by_memory} | dict.fromkeys(("block", "round", "step", "message"), 1.0)
    scales |= dict.fromkeys(("block_host", "graph_host", "round_host", "step_host"), host)
    parts = (
        replace(
            part,
            origin="derived",
            value=part.value * value,
            core=part.core * by_peak,
            sequence=part.sequence * value,
            weight=part.weight * value,
            host=part.host * host,
            host_forward=part.host_forward * host,
        )
        for part in measured.parts
    )
    fixed = {
        each.name: _scaled(getattr(measured.fixed, each.name), scales.get(each.name, value))
        for each in fields(FixedCosts)
    }
    inside, across = (measured.byte_gathered(across=beyond) for beyond in (False, True))
    inside *= was.link / sheet.link
    return replace(
        measured,
        device=sheet.device,
        dtype=sheet.dtype,
        torch="",
        notes=(f"every entry is that of {measured.device}, scaled by data sheets",),
        node=sheet.node,
        products=_derived_products(measured.products, was, sheet),
        parts=tuple(parts),
        fixed=FixedCosts(**fixed),
        gather=(
            GatherCost(sheet.node, inside, "arithmetic"),
            GatherCost(2 * sheet.node, max(inside, across), "arithmetic"),
        ),
    )


def _scaled(cost: Coefficient, scale: float) -> Coefficient:
    return Coefficient(
        cost.seconds * scale, "derived" if cost.origin == "measured" else cost.origin
    )


def _derived_products(times: ProductTimes, was: DataSheet, sheet: DataSheet) -> ProductTimes:
    """Beyond what the smallest takes, as the longer of FLOPs and bytes changes."""
    least = min(times.grid, key=lambda each: each.forward)

    def least_seconds(each: ProductTime, of: DataSheet) -> float:
        read = each.rows * each.k + each.k * each.n + each.rows * each.n
        moved = read * ITEM_BYTES[of.dtype] / of.bandwidth
        return max(2 * each.rows * each.k * each.n / of.peak, moved)

    def scaled(each: ProductTime) -> ProductTime:
        scale = least_seconds(each, sheet) / least_seconds(each, was)
        forward, backward = (
            first + max(0.0, own - first) * scale
            for own, first in ((each.forward, least.forward), (each.backward, least.backward))
        )
        return replace(each, forward=forward, backward=backward)

    grid = tuple(map(scaled, times.grid))
    return ProductTimes(origin="derived", flop=times.flop * was.peak / sheet.peak, grid=grid)


def profile_names() -> tuple[str, ...]:
    """The profiles that Longshore ships, and those it derives from them."""
    folder = resources.files("longshore.advisor").joinpath("profiles")
    shipped = (file.name.removesuffix(".json") for file in folder.iterdir() if ".json" in file.name)
    return tuple(sorted({*shipped, *DERIVED}))


def memory_gib(name: str) -> float | None:
    """The memory of each machine of a named profile, as torch reports it; None if not known."""
    sheet = H200 if name == "h200" else DERIVED.get(name)
    return sheet.memory_gb * GIB_OF_GB if sheet and sheet.memory_gb else None


def read_cost(name: str) -> CostProfile | MachineProfile:
    """What plan.cost or --cost names: a cost profile in JSON, or a machine."""
    return load_machine(name) if names_machine(name) else load_profile(name)


def load_machine(name: str | Path) -> MachineProfile:
    """The profile in a JSON file, or the shipped or derived one of that name."""
    is_file = Path(name).is_file()
    if not is_file and str(name) in DERIVED:
        return derived_profile(load_machine("h200"), H200, DERIVED[str(name)])
    path: Any = Path(name)
    if not is_file and str(name) in profile_names():
        path = resources.files("longshore.advisor").joinpath("profiles", f"{name}.json")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"profile {name}: cannot be read ({error.strerror}); known names are "
            f"{', '.join(profile_names())}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"machine profile {name}: is not JSON ({error})") from None
    return parse_machine(data, str(name))


def parse_machine(data: object, name: str) -> MachineProfile:
    """The profile of parsed JSON; name: for errors."""
    where = f"machine profile {name}"
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(
            f'{where}: has no "format": "{FORMAT}"; write one with longshore calibrate --out FILE'
        )
    body = {key: value for key, value in data.items() if key != "format"}
    products = body.get("products")
    if isinstance(products, dict) and isinstance(products.get("grid"), list):
        keys = ("rows", "k", "n", "forward", "backward")
        grid = [_row(row, keys, f"{where}: products.grid") for row in products["grid"]]
        body["products"] = {**products, "grid": grid}
    try:
        profile = _read(MachineProfile, body, where)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(where) else f"{where}: {text}") from None
    assert isinstance(profile, MachineProfile)
    if unknown := [part.kind for part in profile.parts if part.kind not in KINDS]:
        raise ValueError(f"{where}: unknown kind of part {unknown[0]!r}; known are {_kinds()}")
    return profile


def _kinds() -> str:
    return ", ".join(KINDS)


def _row(row: object, keys: tuple[str, ...], where: str) -> Mapping[str, object]:
    if not isinstance(row, list) or len(row) != len(keys):
        raise ValueError(f"{where}: a product must be [{', '.join(keys)}], not {row!r}")
    return dict(zip(keys, row, strict=True))


def _read(kind: Any, data: object, where: str) -> Any:  # noqa: ANN401 - types of fields are any
    """A dataclass, tuple, text or number of this type; a ValueError names the place."""
    if get_origin(kind) is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{where} must be a list, not {data!r}")
        inner = get_args(kind)[0]
        return tuple(_read(inner, item, f"{where}[{i}]") for i, item in enumerate(data))
    if kind is Origin:
        if data not in names_of(Origin):
            raise ValueError(f"{where} is {data!r}; it must be {' or '.join(names_of(Origin))}")
        return data
    if kind is str:
        if not isinstance(data, str):
            raise ValueError(f"{where} must be a text, not {data!r}")
        return data
    if kind in (int, float):
        return _number(kind, data, where)
    assert not isinstance(kind, UnionType), kind
    return _read_fields(kind, data, where)


def _number(kind: type, data: object, where: str) -> float:
    is_number = isinstance(data, int | float) and not isinstance(data, bool)
    if not is_number or (kind is int and data != int(data)):  # type: ignore[call-overload]
        raise ValueError(f"{where} must be a {'whole ' * (kind is int)}number, not {data!r}")
    assert isinstance(data, int | float)
    if not 0 <= data < 1e15:
        raise ValueError(f"{where} is {data}; it must be 0 or more, and less than 1e15")
    return kind(data)  # type: ignore[no-any-return]


def _read_fields(kind: Any, data: object, where: str) -> Any:  # noqa: ANN401
    names = [each.name for each in fields(kind) if each.init]
    if not isinstance(data, dict) or sorted(data) != sorted(names):
        lacking = [name for name in names if not isinstance(data, dict) or name not in data]
        more = [] if lacking or not isinstance(data, dict) else [*({*data} - {*names})]
        wrong = f"{lacking[0]} is missing" if lacking else f"{more[0]!r} is unknown"
        raise ValueError(f"{where}: {wrong}; it must have exactly {', '.join(names)}")
    types = get_type_hints(kind)
    glue = ": " if where.startswith("machine profile") and ":" not in where else "."
    values = {name: _read(types[name], data[name], f"{where}{glue}{name}") for name in names}
    return kind(**values)
