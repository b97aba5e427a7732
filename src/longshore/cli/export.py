"""`longshore export`: from a finished run, or from a checkpoint, to a Hugging Face folder.

In: the options of EXPORT_HELP. Out: a folder that transformers loads, or one of our own format for
what transformers does not have, and a line that says so.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longshore.cli.environment import working_folder_last
from longshore.cli.options import add_command, count, one_of, say
from longshore.files import check_new, check_room, reason
from longshore.user_code import load_module

if TYPE_CHECKING:
    from longshore.hf.weights import SavedWeights

EXPORT_HELP = """\
Writes the weights of a finished run, or of a checkpoint, as a folder that transformers, vLLM and
others load: config.json, safetensors, and the tokenizer of the model the run began with.

  RUN                the folder of a run, of its weights, or of one of its checkpoints
  DIR                the folder to make
  --step N           of RUN, the checkpoint after step N instead of the weights at its end
  --dtype D          bfloat16, float32, or keep: as the run has them (default)
  --base DIR         the Hugging Face folder the run began with, if it is no longer where it was
  --max-length N     max_position_embeddings of config.json (default: what the base says; 32768
                     without one)
  --format F         hf: what transformers loads (default); longshore: for models that transformers
                     does not have; longshore train model.from_hf=DIR reads it
  --adapter          of a run with model.lora: the low-rank factors alone, as a folder that PEFT
                     loads onto the base, instead of weights with the factors in them
  --module M         the Python module of your own mixers, for a run with model.module

examples:
  longshore export runs/first my-model --dtype bfloat16
  longshore export runs/first my-model --step 400
  longshore export runs/lora-1 my-adapter --adapter
  longshore export runs/mine-1 my-model --format longshore --module mine"""


def register_export(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = add_command(
        commands,
        "export",
        summary="write a finished run or a checkpoint as a Hugging Face folder",
        usage="longshore export RUN DIR [options]",
        text=EXPORT_HELP,
        options={
            "step max-length": count(1 << 40),
            "dtype": one_of(("bfloat16", "float32", "keep")),
            "base module": str,
            "format": one_of(("hf", "longshore")),
            "adapter": bool,
        },
        run=run_export,
        dtype="keep",
        format="hf",
    )
    parser.add_argument("weights", metavar="RUN", help=argparse.SUPPRESS)
    parser.add_argument("folder", metavar="DIR", help=argparse.SUPPRESS)


def run_export(args: argparse.Namespace) -> None:
    if args.max_length is not None and args.format == "longshore":
        raise ValueError(
            "--max-length works only with --format hf; Longshore's own format has no such key"
        )
    if args.adapter and (args.format == "longshore" or args.max_length or args.dtype != "keep"):
        raise ValueError(
            "--adapter writes PEFT's format, in the dtype of the factors; leave --format, "
            "--max-length and --dtype out"
        )
    try:
        weights = _weights_folder(Path(args.weights), args.step)
        check_new(args.folder)
        if args.module is not None:
            working_folder_last()
            load_module(args.module, "--module")
        _export(args, weights)
    except OSError as error:
        raise ValueError(f"{error.filename or args.folder}: {reason(error)}") from None
    say(f"wrote {args.folder}")


def _weights_folder(run: Path, step: int | None) -> Path:
    """The folder of weights, or of a checkpoint."""
    from longshore.train.checkpoint_files import MARKER, checkpoint_folder, saved_steps

    if not run.is_dir():
        raise ValueError(f"{run} is not a folder; name that of a finished run")
    steps = ", ".join(map(str, saved_steps(run)))
    if step is not None:
        folder = checkpoint_folder(run, step)
        if folder.is_dir():
            return folder
        others = f"; it has those of steps {steps}" if steps else " or any other"
        raise ValueError(f"{run} has no checkpoint of step {step}{others}")
    for file in (run / "weights.json", run / "weights" / "weights.json", run / MARKER):
        if file.is_file():
            return file.parent
    others = f"; name one of its checkpoints with --step: {steps}" if steps else ""
    raise ValueError(
        f"{run} has no weights/weights.json; a run writes it after its last step{others}"
    )


def _open_saved(args: argparse.Namespace, folder: Path) -> tuple["SavedWeights", int]:
    """What the folder holds, and its bytes."""
    from longshore.hf.config_file import read_config
    from longshore.hf.lora import MergedTensors
    from longshore.hf.weights import load_weights
    from longshore.run.weights import open_checkpoint
    from longshore.train.safetensors_stream import CheckpointTensors

    base = None if args.base is None else Path(args.base)
    if (folder / "weights.json").is_file():
        saved = load_weights(folder)
        size = sum(path.stat().st_size for path in folder.iterdir())
    else:
        working_folder_last()  # the run's model may be in a module of the user's
        saved = open_checkpoint(folder, base=base)
        assert isinstance(saved.tensors, CheckpointTensors)
        size = saved.tensors.nbytes
    if base is not None and saved.code == "longshore":
        read_config(base)
    if args.adapter:
        saved.check_base(base)
        return replace(saved, base=base or saved.base), size
    saved = saved.merged(base)
    return saved, saved.tensors.nbytes if isinstance(saved.tensors, MergedTensors) else size


def _export(args: argparse.Namespace, weights: Path) -> None:
    import torch

    from longshore.hf.checkpoint import write_checkpoint, write_own_checkpoint
    from longshore.hf.config_file import choose_architecture
    from longshore.hf.weights import write_adapter

    saved, size = _open_saved(args, weights)
    base, folder = saved.base, args.folder
    dtype = None if args.dtype == "keep" else getattr(torch, args.dtype)
    if base is not None and not base.is_dir():
        raise ValueError(
            f"the run began with {base}, which does not exist; name its folder with --base"
        )
    check_room(Path(folder), size // 2 if dtype == torch.bfloat16 else size)
    if args.adapter:
        for line in write_adapter(folder, saved, base=base):
            say(line)
        return
    if saved.code == "transformers":
        _export_transformers(args, saved, dtype)
        return
    tensors = saved.tensors.items()
    if args.format == "longshore":
        write_own_checkpoint(folder, saved.config, tensors, base=base, dtype=dtype)
        return
    try:
        choose_architecture(saved.config, base)
    except ValueError as error:
        raise ValueError(
            f"{error}; --format longshore writes a folder that longshore train reads"
        ) from None
    most = args.max_length
    write_checkpoint(folder, saved.config, tensors, base=base, dtype=dtype, max_length=most)


def _export_transformers(args: argparse.Namespace, saved: "SavedWeights", dtype: Any) -> None:  # noqa: ANN401
    """A model that ran as transformers' code: a folder like the one it began with."""
    from longshore.hf.transformers_weights import HEAD, write_transformers

    for option in ("max_length", "module"):
        if getattr(args, option) is not None:
            raise ValueError(
                f"--{option.replace('_', '-')} does not work for a run with "
                "model.code=transformers, whose config.json stays as it is; leave it out"
            )
    if args.format != "hf":
        raise ValueError(
            "--format longshore is for Longshore's own models; this run's model.code is "
            "transformers, so leave --format out"
        )
    assert saved.base is not None
    tied = HEAD not in saved.tensors
    write_transformers(args.folder, saved.tensors.items(), base=saved.base, tied=tied, dtype=dtype)
