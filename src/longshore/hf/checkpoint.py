"""Hugging Face folders: weights in and out, under our names.

In: a folder with config.json and safetensors. Out: its tensors by our names, read when asked for,
whole or in blocks; or a new folder that transformers loads. Reading one and writing it again
changes no byte of a tensor or of config.json:

    weights = open_weights("Qwen3-8B")
    weights.block("embed.weight", (slice(0, 1024),))      what one rank of a sharded model needs
    write_checkpoint("copy", read_config("Qwen3-8B"), weights.items(), base="Qwen3-8B")

write_own_checkpoint writes a decoder that transformers has no architecture for.
"""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from longshore.arch.decoder import DecoderConfig
from longshore.files import new_folder
from longshore.hf.config_file import (
    CONFIG,
    choose_architecture,
    config_text,
    describe,
    own_config_text,
    transformers_base,
)
from longshore.hf.tensor_files import FLOATS, INTEGERS, TensorFiles, write_files
from longshore.hf.tensor_map import Shape, Source, StorageLayout, read_tensor_names
from longshore.model.decoder import Decoder

SHARD_BYTES = 5 * 10**9
COMPANIONS = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "*.tiktoken"),
    *("chat_template*", "additional_chat_templates/*"),
)
"""What a model needs beside its weights, and training does not change."""

TABLE = re.compile(r".*\.router\.table")
"""Tensors of integers: the experts of each token id."""
KEPT = re.compile(
    rf".*\.router\.bias|{TABLE.pattern}|.*_hyper\.\w+|(.*\.)?collapse\.\w+|.*\.biases\.\w+"
)
"""Tensors that are never cast: small steps move a router's bias, which bfloat16 would lose; weights
of hyper-connections, and sinks and biases of sparse attention, are float32 in training, too."""
MOST_LISTED = 20
"""Names in an error."""


class Weights(Mapping[str, Tensor]):
    """Tensors by our names; each is read when it is asked for, and not kept."""

    def __init__(
        self, files: TensorFiles, sources: Mapping[str, Source], shapes: Mapping[str, Shape]
    ) -> None:
        self.files = files
        self.sources = sources
        self.shapes = shapes

    def __getitem__(self, name: str) -> Tensor:
        return self.block(name, (slice(0, self.shapes[name][0]),))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def block(self, name: str, index: Sequence[slice]) -> Tensor:
        """A range of each dim of a tensor, or of the first dims alone; little more is read.

        Those of a tied head are the embedding's: a pipeline stage without embedding asks for them.
        """
        if name == "head.weight" and name not in self.shapes:
            name = "embed.weight"
        shape = self.shapes[name]
        for dim, (part, size) in enumerate(zip(index, shape, strict=False)):
            if not 0 <= part.start <= part.stop <= size:
                raise ValueError(
                    f"{part.start} to {part.stop} of dim {dim} of {name} are out of range; it has "
                    f"the shape {shape}"
                )
        return self.sources[name].read(self.files, index)


def open_weights(folder: str | Path) -> Weights:
    """The tensors of a Hugging Face folder, after checking that all are there and fit."""
    raw, architecture, config = describe(folder)
    files, shapes = TensorFiles(folder), tensor_shapes(config)
    layout = StorageLayout(config, raw, frozenset(files.names))
    sources = {name: architecture.source(name, layout) for name in shapes}
    ignored = architecture.ignored
    if config.tied:
        head = architecture.source("head.weight", layout).stored
        embedding = sources["embed.weight"].stored
        check_copy(files, head, embedding, why="tie_word_embeddings is true")
        ignored = f"{ignored}|{re.escape(head)}"
    tables = frozenset(source.stored for name, source in sources.items() if TABLE.fullmatch(name))
    check_tensors(files, stored_shapes(sources, shapes), ignored=ignored, tables=tables)
    for source in sources.values():
        for copy in source.copies:
            check_copy(files, copy, source.stored, why="all depths share embedding and head")
    return Weights(files, sources, shapes)


def stored_shapes(sources: Mapping[str, Source], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The names and shapes of the tensors in a folder. shapes: of ours, by name."""
    return {
        stored: shape
        for name, source in sources.items()
        for stored, shape in source.shapes(shapes[name]).items()
    }


def tensor_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """The names and shapes of all tensors of a decoder, in the order in which runs write them."""
    with torch.device("meta"):
        model = Decoder(config)
    tensors = chain(model.named_parameters(), model.named_buffers())
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def check_tensors(
    files: TensorFiles,
    shapes: Mapping[str, Shape],
    *,
    ignored: str = "",
    tables: frozenset[str] = frozenset(),
) -> None:
    """Refuses files whose tensors are not these; names that fit `ignored` may be there too.

    tables: names of tensors of integers.
    """
    names = {name for name in files.names if name in shapes or not re.fullmatch(ignored, name)}
    misshapen = []
    for name in sorted(names & shapes.keys()):
        dtype, is_table = files.dtype(name), name in tables
        if is_table and dtype not in INTEGERS:
            raise ValueError(
                f"{files.folder}: the tensor {name} is {dtype}; a table of experts is one of "
                f"{', '.join(INTEGERS)}"
            )
        if not is_table and dtype not in FLOATS:
            raise ValueError(
                f"{files.folder}: the tensor {name} is {dtype}; only {', '.join(FLOATS)} can be "
                "trained, so convert quantized weights to bfloat16 first"
            )
        if files.shape(name) != shapes[name]:
            misshapen.append(f"{name} (is {files.shape(name)}, must be {shapes[name]})")
    wrong = {
        "missing": sorted(shapes.keys() - names),
        "unknown": sorted(names - shapes.keys()),
        "of wrong shape": misshapen,
    }
    problems = [f"{state} {_some(tensors)}" for state, tensors in wrong.items() if tensors]
    if problems:
        raise ValueError(
            f"the weights in {files.folder} do not fit its config: {'; '.join(problems)}"
        )


def write_checkpoint(
    folder: str | Path,
    config: DecoderConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    base: str | Path | None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    max_length: int | None = None,
) -> None:
    """Writes a folder that transformers loads, from a stream of our (name, tensor) pairs.

    base: the Hugging Face folder the model came from, whose tokenizer, generation settings and
    keys of config.json are kept; None for a model that came from none. dtype: what the tensors
    are cast to, None for their own; a router's bias is never cast. max_length: see config_text.
    """
    base = None if base is None else Path(base)
    config_base = transformers_base(base)
    find_source = choose_architecture(config, base).source
    layout = storage_layout(config, config_base)
    shapes = tensor_shapes(config)

    def stored() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in check_stream(tensors, shapes, dtype=dtype):
            yield from find_source(name, layout).write(tensor)
            del tensor  # before the next one is made

    write_folder(
        folder,
        stored(),
        stored_shapes({name: find_source(name, layout) for name in shapes}, shapes),
        lambda kind: config_text(config, base=config_base, dtype=kind, max_length=max_length),
        base=base,
        shard_bytes=shard_bytes,
    )


def write_own_checkpoint(
    folder: str | Path,
    config: DecoderConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    base: str | Path | None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a folder in our own format, which model.from_hf reads: any decoder fits.

    base: a folder whose tokenizer and generation settings are kept. dtype: see write_checkpoint.
    """
    shapes = tensor_shapes(config)
    write_folder(
        folder,
        check_stream(tensors, shapes, dtype=dtype),
        shapes,
        lambda kind: own_config_text(config, dtype=kind),
        base=None if base is None else Path(base),
        shard_bytes=shard_bytes,
    )


def write_folder(
    folder: str | Path,
    tensors: Iterator[tuple[str, Tensor]],
    names: Iterable[str],
    text: Callable[[str], str],
    *,
    base: Path | None,
    shard_bytes: int,
) -> None:
    """Writes tensors, config.json and the base's companions into a new folder.

    names: of all tensors to come. text: makes that of config.json from the dtype written.
    """
    with new_folder(folder) as partial:
        dtype, _ = write_files(partial, tensors, shard_bytes=shard_bytes, names=names)
        kind = str(dtype).removeprefix("torch.")
        (partial / CONFIG).write_text(text(kind), encoding="utf-8")
        if base is not None:
            _copy_companions(base, partial)


def _copy_companions(base: Path, folder: Path) -> None:
    for pattern in COMPANIONS:
        for path in sorted(base.glob(pattern)):
            if path.is_file():
                copy = folder / path.relative_to(base)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)


def check_stream(
    tensors: Iterable[tuple[str, Tensor]], shapes: Mapping[str, Shape], *, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """The stream, cast; it must have every tensor of `shapes` exactly once, in its shape."""
    left = dict(shapes)
    for name, tensor in tensors:
        if name not in left:
            state = "was given twice" if name in shapes else "is not part of this decoder"
            raise ValueError(f"tensor {name} {state}")
        if tuple(tensor.shape) != left.pop(name):
            raise ValueError(f"tensor {name} is {tuple(tensor.shape)}; it must be {shapes[name]}")
        yield name, tensor if dtype is None or KEPT.fullmatch(name) else tensor.to(dtype)
        del tensor  # before the next one is made
    if left:
        raise ValueError(f"missing among the tensors to write: {_some(sorted(left))}")


def storage_layout(config: DecoderConfig, base: Path | None) -> StorageLayout:
    """How to lay tensors out: as in the base, where there is one."""
    if base is None:
        return StorageLayout(config, {})
    return StorageLayout(config, describe(base)[0], read_tensor_names(base) or frozenset())


def check_copy(files: TensorFiles, copy: str, of: str, *, why: str) -> None:
    """A copy must equal its original; the first rows are compared."""
    if not {copy, of} <= set(files.names) or files.shape(copy) != files.shape(of):
        return
    rows = (slice(0, min(64, files.shape(of)[0])),)
    if not torch.equal(files.block(copy, rows), files.block(of, rows)):
        raise ValueError(f"{files.folder}: {why}, but {copy} differs from {of}; remove {copy}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more
