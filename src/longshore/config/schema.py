"""The sections of a run's configuration, each key with its default, its kind and what it means.

In: values of the right kinds (load.py sees to that). Out: frozen data, where 0 and "" mean "not
given", and TOML that reads back as the same. What belongs together is checked in check.py.

    RunConfig(data=DataConfig(path="prepared", batch=64), model=ModelConfig(preset="tiny"))

A Kind takes a value as TOML gives it, and returns it as the dataclass holds it, or None where it is
of another kind (TOML has no None of its own): `whole(1, 64)` takes 8, refuses 8.0, true and 65, and
says "a whole number from 1 to 64". Errors name keys: `in_keys` puts one in front of what a part
below says of a file, as in "data.path: chats.txt: must end in .jsonl, …".
"""

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from longshore.data.inputs import MAX_BYTES
from longshore.data.rejected import MAX_REJECTED
from longshore.files import printable
from longshore.plan.types import DEFAULT_POLICY, policy_names
from longshore.settings import (
    AttentionKind,
    CPSizes,
    DeviceChoice,
    DisplayChoice,
    DTypeChoice,
    Kernels,
    LossName,
    LossOn,
    ModelCode,
    Recompute,
    ScanKind,
    ScheduleName,
    ShardChoice,
    Sync,
    TooLong,
    names_of,
)
from longshore.user_code import FUNCTION_NAME, MODULE_NAME

LARGEST = 2**40
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@contextmanager
def in_keys(key: str) -> Iterator[None]:
    """Errors of the block begin with this key; an OSError becomes a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    except OSError as error:
        raise ValueError(f"{key}: {error.filename}: cannot be read ({error.strerror})") from None


@dataclass(frozen=True, slots=True)
class Kind:
    """What values a key takes."""

    wants: str
    """The values, as text for errors."""
    read: Callable[[object], Any]
    """The value as the dataclass has it; None if it is of another kind."""
    names: tuple[str, ...] = ()
    """All names that it takes, for a choice."""
    is_text: bool = False
    """Whether every value on the command line is a string."""


def key(default: object, kind: Kind, about: str) -> Any:  # noqa: ANN401 - the type of the default
    """A field of a section: its default, its kind and what it means; names it takes are listed."""
    listed = f"{about} ({kind.wants})" if kind.names else about
    return field(default=default, metadata={"kind": kind, "about": listed})


def table(*, about: str) -> Any:  # noqa: ANN401 - as `key`
    """A field that is a table, empty by default."""
    kind = Kind("a table", lambda value: dict(value) if isinstance(value, dict) else None)
    return field(default_factory=dict, metadata={"kind": kind, "about": about})


def whole(least: int = 1, most: int = LARGEST) -> Kind:
    def read(value: object) -> int | None:
        if isinstance(value, bool) or not isinstance(value, int):
            return None
        return value if least <= value <= most else None

    limits = f", {least} or more" if most == LARGEST else f" from {least} to {most}"
    return Kind(f"a whole number{limits}", read)


def number(least: float, most: float = math.inf, *, above: bool = False) -> Kind:
    """A finite number from `least` to `most`, or only above `least`."""

    def read(value: object) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        fits = least <= value <= most and math.isfinite(value) and not (above and value == least)
        return float(value) if fits else None

    low = f"above {least:g}" if above else f"of at least {least:g}"
    return Kind(f"a number {low}" + (f", at most {most:g}" if most < math.inf else ""), read)


def auto_or(kind: Kind, wants: str = "") -> Kind:
    def read(value: object) -> object:
        return value if value == "auto" else kind.read(value)

    return Kind(wants or f"{kind.wants}, or 'auto'", read)


def one_of(literal: Any) -> Kind:  # noqa: ANN401 - Literal types have no type
    """One of a Literal's names; settings.py lists them."""
    names = names_of(literal)
    return Kind(listed(names), lambda value: value if value in names else None, names, True)


def function(*names: str) -> Kind:
    """A name, or a function of the user's as module:function."""
    shown = tuple(name for name in names if name)
    return Kind(listed([*shown, "module:function"]), _named(names, FUNCTION_NAME), shown, True)


def _named(names: Seq[str], pattern: re.Pattern[str]) -> Callable[[object], str | None]:
    def read(value: object) -> str | None:
        if isinstance(value, str) and (value in names or pattern.fullmatch(value)):
            return value
        return None

    return read


def _steps_or_share(value: object) -> object:
    if isinstance(value, float):
        return value if 0 < value < 1 else None
    return whole(0).read(value)


def _texts(value: object) -> tuple[str, ...] | None:
    """A list; a,b is a list of two, and a bare word a list of one."""
    items = split_list(value) if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        return None
    return tuple(items) if all(isinstance(item, str) and item for item in items) else None


def _paths(value: object) -> str | tuple[str, ...] | None:
    """One path, or several as a list or with commas, unless a path with commas is there."""
    if isinstance(value, str) and not (value.startswith("[") and value.endswith("]")):
        if "," not in value:
            return value
        value = [value] if Path(value).exists() else value
    items = _texts(toml_or_text(value) if isinstance(value, str) else value)
    # One path with commas stays a list, so that it is not split where it is read again.
    is_one = items is not None and len(items) == 1 and "," not in items[0]
    return items[0] if items and is_one else items or None


def _numbers(value: object) -> tuple[float, ...] | None:
    """A list; 3,1 is a list of two."""
    value = toml_or_text(f"[{value}]") if isinstance(value, str) else value
    if not isinstance(value, list | tuple):
        return None
    items = [number(0, above=True).read(item) for item in value]
    return None if None in items else tuple(items)


def _two_shares(value: object) -> tuple[float, ...] | None:
    items = [number(0, 1).read(item) for item in value] if isinstance(value, list | tuple) else ()
    return tuple(items) if len(items) == 2 and not {None, 1.0} & {*items} else None


def toml_or_text(text: str) -> object:
    """The value that a text is in TOML; the text itself where it is none."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def split_list(text: str) -> list[str]:
    """The texts between commas; brackets around all and quotes around each may be there or not."""
    bare = text.strip()
    if bare[:1] == "[" and bare[-1:] == "]":
        bare = bare[1:-1].strip()
    items = [item.strip() for item in bare.split(",")] if bare else []
    return [item[1:-1] if re.fullmatch(r"""(["']).*\1""", item) else item for item in items]


FLAG = Kind("true or false", lambda value: value if isinstance(value, bool) else None)
TEXT = Kind("a string", lambda value: value if isinstance(value, str) else None, is_text=True)
TEXTS = Kind('a list of strings, such as ["a", "b"] or a,b', _texts)
PATHS = Kind('a string, or a list of strings such as ["a", "b"] or a,b', _paths, is_text=True)
NUMBERS = Kind("a list of numbers above 0, such as [3, 1] or 3,1", _numbers)
SHARES = Kind("two numbers of at least 0 and below 1, such as [0.9, 0.95]", _two_shares)
MODULE = Kind("module:name, or a module alone", _named(("",), MODULE_NAME), is_text=True)
STEPS = Kind(
    "a whole number of steps, or a share of all steps above 0 and below 1, such as 0.03",
    _steps_or_share,
)


def listed(names: Seq[str], last: str = "or") -> str:
    return f"{', '.join(names[:-1])} {last} {names[-1]}" if len(names) > 1 else names[0]


def by_word(table: Mapping[str, str]) -> dict[str, str]:
    """From each word between spaces in the values to its key."""
    return {word: ours for ours, words in table.items() for word in words.split()}


def write_toml(sections: Mapping[str, Mapping[str, object]], about: Mapping[str, str]) -> str:
    """about: what a key means, by section.key."""
    parts = []
    for section, values in sections.items():
        lines = [f"[{section}]\n"]
        for name, value in values.items():
            meaning = about.get(f"{section}.{name}")
            lines.append(f"{name} = {toml_value(value)}{f'  # {meaning}' if meaning else ''}\n")
        parts.append("".join(lines))
    return "\n".join(parts)


def toml_value(value: object) -> str:
    """One value, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's too; TOML wants one more, for the character 127, and a terminal
        # that shows it some more.
        return printable(json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F"))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        names = {name: name if BARE_KEY.fullmatch(name) else toml_value(name) for name in value}
        pairs = [f"{names[name]} = {toml_value(item)}" for name, item in value.items()]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    raise ValueError(f"{value!r} cannot be written as TOML")


MOST_MOCK = 10_000_000
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where sequences come from, and how many a step takes."""

    prefix: ClassVar[str] = "data."
    """How errors begin the names of the keys path and mock."""
    path: str | tuple[str, ...] = key(
        "",
        PATHS,
        "JSONL, JSON, Parquet or Arrow, or a folder of them, of `datasets` or of `longshore "
        "prepare`; also a glob, or a list of these",
    )
    weights: tuple[float, ...] = key(
        (), NUMBERS, "how often each name in path is drawn; none: each sequence once an epoch"
    )
    stream: bool = key(
        False, FLAG, "tokenize while training, without an index; needs train.steps, max_length"
    )
    mock: Mapping[str, Any] = table(
        about="synthetic sequences instead of path: mode, type, min_seq_len, max_seq_len, …"
    )
    count: int = key(0, whole(0, MOST_MOCK), "how many synthetic sequences an epoch has")
    tokenizer: str = key(
        "", TEXT, "a tokenizer folder, for text; input_ids need none (default: model.from_hf)"
    )
    template: str = key(
        "auto", TEXT, "chat template: auto, own (the tokenizer's), a family's name, or a file"
    )
    loss_on: LossOn = key(
        "assistant", one_of(LossOn), "tokens in the loss: what the assistant says, or all"
    )
    max_length: int = key(
        0, whole(0), "longest sequence in tokens, when text is tokenized; 0: no limit"
    )
    too_long: TooLong = key("reject", one_of(TooLong), "what to do with longer sequences")
    fields: tuple[str, ...] = key(
        (), TEXTS, 'extra columns for your own loss, such as "advantage:per_target:float32"'
    )
    ignore: tuple[str, ...] = key((), TEXTS, "columns to leave out; *: all that are not used")
    max_bytes: int = key(
        MAX_BYTES, whole(), "samples of more bytes are rejected without being parsed"
    )
    max_rejected: float = key(
        MAX_REJECTED, number(0, 1), "a run stops if a larger share of the samples is rejected"
    )
    cache: str = key("runs/prepared", TEXT, "folder where tokenized text is kept for later runs")
    batch: int = key(0, whole(0), "sequences in a step, over all ranks")
    batch_tokens: int = key(0, whole(0), "instead of batch: tokens in a step, over all ranks")
    group: str = key(
        "",
        TEXT,
        "an integer field per sequence; sequences of one value are in one step (default: pair, "
        "if the data have it)",
    )
    shuffle: bool = key(True, FLAG, "a new order for every epoch")
    seed: int = key(0, whole(0, LARGEST_SEED), "seed of the shuffle, and of synthetic sequences")
    prefetch: int = key(2, whole(1, 1024), "steps prepared ahead")
    eval_path: str | tuple[str, ...] = key(
        "", PATHS, "held-out data to evaluate on, in the same formats as path"
    )
    eval_mock: Mapping[str, Any] = table(
        about="synthetic held-out sequences instead of eval_path, as in mock"
    )
    eval_count: int = key(
        0, whole(0, MOST_MOCK), "how many sequences eval_mock has; eval_path is used whole"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutConfig(DataConfig):
    """Held-out data in the place of a run's data; errors name data.eval_path or data.eval_mock."""

    prefix: ClassVar[str] = "data.eval_"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """How each step is packed and split; `longshore plan --help` explains the words."""

    policy: str = key(
        DEFAULT_POLICY,
        function(*policy_names(lambda policy: True)),
        "how packs and CP sizes are chosen",
    )
    capacity: int | Literal["auto"] = key(
        "auto", auto_or(whole()), "most tokens a rank holds in a round (one micro-batch)"
    )
    sync: Sync = key("round", one_of(Sync), "ranks wait for each other every round, or once a step")
    cp_size: int = key(
        0,
        whole(0, 1 << 20),
        f"CP size for {listed(policy_names(lambda policy: policy.one_cp_size), 'and')}",
    )
    min_cp: int = key(1, whole(1, 1 << 20), "smallest CP size (ranks that share a pack)")
    max_cp: int = key(0, whole(0, 1 << 20), "largest CP size; 0: all ranks")
    cp_sizes: CPSizes = key(
        "pow2", one_of(CPSizes), "allowed CP sizes: powers of two, or every size, on up to 64 ranks"
    )
    max_sequences: int = key(0, whole(0), "most sequences of a rank in a round; 0: no limit")
    align: int = key(1, whole(), "a rank's tokens are padded to a multiple of this")
    buckets: int = key(
        0,
        whole(0, 1024),
        "pad a rank's tokens to one of this many sizes, so that torch.compile sees few; 0: off",
    )
    cost: str = key(
        "",
        TEXT,
        "what rounds cost: a machine's name such as h200 or h100, a file of `longshore calibrate`, "
        "or a cost profile in JSON (default: an 8B model on H100s)",
    )
    refine: bool = key(
        False, FLAG, "correct the cost profile while training, by the measured times of rounds"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What is trained: a preset or your own model with new weights, or a checkpoint."""

    preset: str = key("", TEXT, "a model by name, with new weights")
    from_hf: str = key("", TEXT, "instead of preset: a Hugging Face checkpoint folder")
    module: str = key(
        "",
        MODULE,
        "instead of preset: your own decoder, as module:function; with from_hf: the Python "
        "module of its mixers",
    )
    code: ModelCode = key(
        "longshore",
        one_of(ModelCode),
        "whose code runs a model of from_hf: Longshore's own, or transformers' (any causal model)",
    )
    layers: int = key(0, whole(0, 4096), "number of layers of the preset; 0: unchanged")
    vocab_size: int = key(0, whole(0, 1 << 24), "vocabulary size of the preset; 0: unchanged")
    aux_weight: float | Literal["auto"] = key(
        "auto",
        auto_or(number(0)),
        "weight of the experts' balance loss; auto: the model's own, 0 for a Hugging Face folder",
    )
    bias_update: float | Literal["auto"] = key(
        "auto",
        auto_or(number(0)),
        "how much a step changes the experts' routing bias; auto: the model's own, 0 for a "
        "Hugging Face folder",
    )
    lora: Mapping[str, Any] = table(
        about="train low-rank factors alone: rank (0: off), alpha (default: 2·rank), "
        "targets (names of modules; default: all-linear)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the work is split over ranks."""

    ranks: int = key(0, whole(0, 1 << 20), "processes; 0: one for each GPU, or one on a CPU")
    shard: ShardChoice = key(
        "auto", one_of(ShardChoice), "FSDP sharding over ranks; zero2 gathers weights once per step"
    )
    tp: int = key(
        1, whole(1, 1 << 10), "tensor-parallel ranks that heads and MLP widths are split over"
    )
    ep: int = key(
        1,
        whole(1, 1 << 20),
        "expert-parallel ranks that a layer's experts are split over, across lanes and TP ranks",
    )
    pp: int = key(1, whole(1, 1 << 10), "pipeline ranks that the model's layers are split over")
    vpp: int = key(1, whole(1, 1 << 10), "stages of each pipeline rank (interleaved pipeline)")
    layout: str = key(
        "", TEXT, "stages by hand, as Ett|tttL; E embedding, t layer, m MTP depth, L head"
    )
    attention: AttentionKind = key(
        "auto",
        one_of(AttentionKind),
        "how ranks share the attention of a pack: gather keys and values, or split heads",
    )
    scan: ScanKind = key(
        "auto",
        one_of(ScanKind),
        "how ranks share Mamba2 and the delta net: split heads, or pass states on",
    )
    trace: bool = key(
        False, FLAG, "record and compare the ranks' communication in every step (to debug)"
    )
    timeout_min: float = key(
        10.0, number(0, above=True), "minutes a rank waits for the others before the run fails"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Optimizer, precision, loss and evaluation."""

    steps: int = key(0, whole(0), "optimizer steps")
    epochs: int = key(0, whole(0), "instead of steps: passes over the data (default 1)")
    lr: float = key(
        0.0, number(0, above=True), "learning rate (default: preset 3e-4, from_hf 2e-5, lora 2e-4)"
    )
    schedule: ScheduleName = key(
        "cosine", one_of(ScheduleName), "shape of the learning rate after the warmup"
    )
    warmup: float = key(
        0, STEPS, "warmup steps, or a share of all steps, in which the learning rate rises"
    )
    min_lr: float = key(0.0, number(0, 1), "learning rate at the end, as a share of lr")
    weight_decay: float = key(0.1, number(0), "weight decay, of matrices only")
    betas: tuple[float, float] = key((0.9, 0.95), SHARES, "betas of AdamW")
    eps: float = key(1e-8, number(0, above=True), "epsilon of AdamW")
    clip: float = key(1.0, number(0), "clip the gradient to this norm; 0: never")
    dtype: DTypeChoice = key(
        "auto",
        one_of(DTypeChoice),
        "dtype of the computation; auto: bfloat16 on GPUs, float32 on CPUs",
    )
    recompute: Recompute = key(
        "none",
        one_of(Recompute),
        "activation checkpointing: compute activations twice, to save memory",
    )
    kernels: Kernels = key("auto", one_of(Kernels), "kernels on GPUs; plain: none but torch's own")
    compile: bool | Literal["auto"] = key(
        "auto",
        auto_or(FLAG, "true, false or 'auto'"),
        "apply torch.compile to the blocks; auto: on GPUs where our kernels do not serve them",
    )
    loss: str = key(
        "", function("", *names_of(LossName)), "instead of cross entropy: a loss by name, or yours"
    )
    loss_options: Mapping[str, Any] = table(about="options of the loss, such as {beta = 0.1}")
    loss_count: str = key(
        "auto",
        function("auto", "tokens", "sequences"),
        "what a step's loss is divided by; auto: tokens, or sequences if the loss is one of theirs",
    )
    eval_every: int = key(0, whole(0), "evaluate on held-out data every so many steps; 0: never")
    mtp_weight: float = key(0.1, number(0), "weight of the multi-token-prediction losses together")
    seed: int = key(0, whole(0, LARGEST_SEED), "seed of new weights")
    device: DeviceChoice = key(
        "auto", one_of(DeviceChoice), "device to train on; auto: GPUs if there are any"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """CUDA graphs, which replay a layer's kernels without launching each; off by default."""

    layers: tuple[str, ...] = key(
        (), TEXTS, "parts of layers to replay: attention, mamba, delta, mlp, or all; none: off"
    )
    max_sequences: int | Literal["auto"] = key(
        "auto",
        auto_or(whole()),
        "most sequences of a micro-batch whose layers are replayed whole, its padding counted as "
        "one; auto: for `coverage`",
    )
    coverage: float = key(
        0.95,
        number(0, 1, above=True),
        "share of the micro-batches with one unshared pack that max_sequences=auto serves",
    )
    memory_gib: float = key(
        0.0, number(0), "most GPU memory of graphs, in GiB; 0: a tenth of the GPU's"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConfig:
    """What a run leaves behind."""

    folder: str = key(
        "", TEXT, "the run's folder; {n} becomes the next free number (default: runs/RECIPE-{n})"
    )
    display: DisplayChoice = key(
        "auto", one_of(DisplayChoice), "how a step's figures are shown; auto: live on a terminal"
    )
    save_every: int = key(
        500, whole(0), "write a checkpoint every so many steps, and at the end; 0: only at the end"
    )
    keep: int = key(2, whole(0, 1 << 20), "keep this many of the newest checkpoints; 0: write none")
    weights: bool = key(True, FLAG, "write the trained weights into the run's folder at the end")
    export: str = key("", TEXT, "write a Hugging Face checkpoint into this folder at the end")
    trackers: tuple[str, ...] = key((), TEXTS, 'also log to "tensorboard" or "wandb"')


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """All of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    graph: GraphConfig = field(default_factory=GraphConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    def with_ranks(self, ranks: int) -> "RunConfig":
        return replace(self, parallel=replace(self.parallel, ranks=ranks))

    def to_toml(self) -> str:
        """A recipe that reads back as this configuration, each key with what it means."""
        about = {
            f"{name}.{f.name}": f.metadata["about"]
            for name, kind in SECTIONS.items()
            for f in fields(kind)
        }
        return write_toml(asdict(self), about)


SECTIONS: dict[str, Any] = {section.name: section.default_factory for section in fields(RunConfig)}
