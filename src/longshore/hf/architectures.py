"""The architectures of transformers that we read and write: their keys and their tensors' names.

In: a config.json as a dict. Out: a DecoderConfig, and back; and for each of our tensors the place
where it lies in a Hugging Face folder. No torch, so that a bad folder is refused fast.

    find_architecture({"architectures": ["LlamaForCausalLM"], …}).name  "LlamaForCausalLM"
    source("layers.3.mlp.up_proj.weight", DENSE_NAMES).theirs  "model.layers.3.mlp.up_proj.weight"

A new architecture is an entry of ARCHITECTURES: two functions for the keys, a table of names. Where
a tensor of ours is several of theirs, or turned, a class beside `Source` with its methods says so.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from longshore.hf.dense_keys import llama_keys, qwen3_keys, read_llama, read_qwen3
from longshore.hf.keys import Raw
from longshore.model.config import DecoderConfig

if TYPE_CHECKING:
    from torch import Tensor

DENSE_NAMES = (
    ("embed.weight", "model.embed_tokens.weight"),
    ("layers.{i}.mixer_norm.weight", "model.layers.{i}.input_layernorm.weight"),
    ("layers.{i}.mixer.{part}", "model.layers.{i}.self_attn.{part}"),
    ("layers.{i}.mlp_norm.weight", "model.layers.{i}.post_attention_layernorm.weight"),
    ("layers.{i}.mlp.{part}", "model.layers.{i}.mlp.{part}"),
    ("norm.weight", "model.norm.weight"),
    ("head.weight", "lm_head.weight"),
)
"""(ours, theirs); {i} is a layer's number, {part} the rest of the name, the same on both sides."""

OLD_BUFFERS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""What old folders hold beside the weights, and nobody reads."""

Shape = tuple[int, ...]


class Rows(Protocol):
    """Files whose tensors are read by rows."""

    def rows(self, name: str, start: int, stop: int) -> "Tensor": ...


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor of ours lies: it is one of theirs, as it stands."""

    theirs: str

    def shapes(self, shape: Shape) -> dict[str, Shape]:
        """The shape of each of their tensors, for this shape of ours."""
        return {self.theirs: shape}

    def read(self, files: Rows, start: int, stop: int) -> "Tensor":
        """Rows start…stop of ours."""
        return files.rows(self.theirs, start, stop)

    def write(self, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
        """Their tensors."""
        yield self.theirs, tensor


@dataclass(frozen=True, slots=True)
class Architecture:
    """name: as in `architectures`. model_type: as in config.json, unique here too.

    read: keys → config. keys: config → the keys that say it, without name and model_type; it
    refuses what the architecture cannot be. names: ours and theirs. ignored: a pattern of their
    tensors that are left out.
    """

    name: str
    model_type: str
    read: Callable[[Raw], DecoderConfig]
    keys: Callable[[DecoderConfig], dict[str, Any]]
    names: Sequence[tuple[str, str]]
    ignored: str


ARCHITECTURES: Mapping[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            name="Qwen3ForCausalLM",
            model_type="qwen3",
            read=read_qwen3,
            keys=qwen3_keys,
            names=DENSE_NAMES,
            ignored=OLD_BUFFERS,
        ),
        Architecture(
            name="LlamaForCausalLM",
            model_type="llama",
            read=read_llama,
            keys=llama_keys,
            names=DENSE_NAMES,
            ignored=OLD_BUFFERS,
        ),
    )
}


def find_architecture(raw: Raw) -> Architecture:
    """The architecture a config.json names, by model_type where it names none."""
    named = raw.get("architectures") or []
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    for architecture in ARCHITECTURES.values():
        if architecture.name in names or (
            not names and raw.get("model_type") == architecture.model_type
        ):
            return architecture
    what = " ".join(names) or f"of model_type {raw.get('model_type')!r}"
    raise ValueError(
        f"architecture {what} is not supported; supported are {', '.join(ARCHITECTURES)}"
    )


def architecture_for(config: DecoderConfig) -> Architecture:
    """The first architecture that can be this decoder."""
    reasons = []
    for architecture in ARCHITECTURES.values():
        try:
            architecture.keys(config)
        except ValueError as error:
            reasons.append(f"{architecture.name}: {error}")
        else:
            return architecture
    raise ValueError(f"no architecture of transformers fits this decoder ({'; '.join(reasons)})")


def source(name: str, names: Sequence[tuple[str, str]]) -> Source:
    """Where our tensor lies, by the first pair of the table that fits."""
    for ours, theirs in names:
        pattern = (
            re.escape(ours).replace(r"\{i\}", r"(?P<i>\d+)").replace(r"\{part\}", "(?P<part>.+)")
        )
        if found := re.fullmatch(pattern, name):
            return Source(theirs.format(**found.groupdict()))
    raise ValueError(f"tensor {name} has no name in transformers; a pair is missing in the table")
