"""`longshore advise`: from lengths, a model and a number of GPUs to a recipe, with its reasons.

In: the options of ADVISE_HELP. Out: text or JSON on stdout, and a page. Without --batch a step has
as many sequences as have about 32,768 tokens for each GPU: with 1,024 tokens on average, 8 GPUs get
256 sequences.
"""

import argparse
import json
import os
import re
from typing import Any, Literal, cast

import numpy as np

from longshore.advisor.advise import advise, answer
from longshore.advisor.advise_page import advise_summary, write_advise_page
from longshore.advisor.candidates import AdviceTask
from longshore.advisor.machine import load_machine, memory_gib, profile_names
from longshore.arch.presets import PRESETS
from longshore.cli.options import add_command, check_output, count, number, one_of, say
from longshore.config.check import code_refusals, decoder_config, lora_refusals, refuse
from longshore.config.load import load_config
from longshore.config.schema import ModelConfig
from longshore.data.store import Store
from longshore.plan.lengths_file import read_lengths

ADVISE_HELP = """\
Recommends how to train a model on your sequences before you rent the GPUs: capacity, CP limit,
tensor, pipeline and expert parallelism, sharding, recomputation and CUDA graphs, as a part of a
recipe that `longshore train` accepts, with the reason for each. Counts the memory of the GPU that
needs most, and predicts tokens/s, MFU (the share of the vendor's dense peak; what is recomputed
does not count) and the days of the run. Needs no GPU.

what to train:
  LENGTHS.csv        one length in tokens per line, as for `longshore plan`; or a folder made by
                     `longshore prepare`
  --model MODEL      a preset, such as qwen3-8b, a Hugging Face folder, or your own decoder as
                     module:function
  --layers N         change the number of layers of the preset
  --batch B          sequences in a step (default: about 32,768 tokens for each GPU)
  --dtype TYPE       bfloat16 or float32 (default: that of the machine's profile)
  model.key=value    any key of a recipe's [model]: model.lora.rank=16 for low-rank factors,
                     model.code=transformers for a folder that transformers' code runs

the machine:
  --gpus N           number of GPUs
  --gpu NAME         a machine that Longshore has a profile of (MACHINES; default h200,
                     the others are derived from data sheets), or a file that `longshore
                     calibrate` wrote on yours
  --memory GIB       memory of each GPU (default: that of NAME)

how long:
  --tokens TOTAL     tokens of the whole run, such as 15B or 2e9
  --epochs E         instead of --tokens: passes over the data (default 1)

what to write:
  --json             print everything as JSON instead of text
  --page OUT.html    a page to look at in a browser

example: longshore advise lengths.csv --gpus 8 --model qwen3-8b --tokens 15B --page advice.html"""

GIB = 1 << 30
STEP_TOKENS = 32_768
SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
MOST = 1 << 20
DTYPES = ("bfloat16", "float32")


def register_advise(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = add_command(
        commands,
        "advise",
        summary="recommend how to train a model on some GPUs, and predict its speed",
        usage="longshore advise LENGTHS --gpus N --model MODEL [options] [model.key=value …]",
        text=ADVISE_HELP.replace("MACHINES", ", ".join(profile_names())),
        options={
            "model gpu page": str,
            "json": bool,
            "layers": count(4096),
            "batch": count(1 << 40),
            "gpus epochs": count(MOST),
            "memory": number(lambda x: 1 <= x <= MOST, "a size in GiB, such as 80"),
            "tokens": _tokens,
            "dtype": one_of(DTYPES),
        },
        run=run_advise,
        gpu="h200",
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)


def run_advise(args: argparse.Namespace) -> None:
    files = [word for word in args.words if "=" not in word]
    if len(files) > 1:
        raise ValueError(f"advise takes one file of lengths, but got {' '.join(files)}")
    if not files:
        raise ValueError("give a file with one length a line, or a folder of longshore prepare")
    task = _task(args, files[0])
    if args.page:
        check_output(args.page, files[0])
    total = args.tokens or int(task.lengths.sum()) * (args.epochs or 1)
    data = answer(advise(task), total_tokens=total)
    if args.page:
        try:
            write_advise_page(args.page, data)
        except OSError as error:
            raise ValueError(f"{args.page}: cannot be written ({error.strerror})") from None
    if args.json:
        print(json.dumps(data, allow_nan=False))
        return
    say("\n".join(advise_summary(data)))
    if args.page:
        say(f"page: {args.page} (open it in a browser)")


def _task(args: argparse.Namespace, file: str) -> AdviceTask:
    if args.gpus is None or args.model is None:
        name = "--gpus, the number of GPUs" if args.gpus is None else "--model, what to train"
        raise ValueError(f"give {name}; see longshore advise --help")
    if args.tokens and args.epochs:
        raise ValueError("--tokens and --epochs are both given; leave one out")
    model = _model(args.model, args.layers, [word for word in args.words if "=" in word])
    machine = load_machine(args.gpu)
    given = Store(file).lengths if os.path.isdir(file) else read_lengths(file).lengths
    lengths = np.asarray(given, dtype=np.int64)
    if args.batch and args.batch > len(lengths):
        raise ValueError(
            f"--batch is {args.batch}, but there are only {len(lengths)} sequences; lower it"
        )
    usual = max(1, round(args.gpus * STEP_TOKENS / float(lengths.mean())))
    gib = args.memory or memory_gib(args.gpu)
    if gib is None:
        raise ValueError(
            f"the memory of {machine.device} is not known; give it as --memory, in GiB"
        )
    # A profile in another dtype is refused for the default as for any other that differs.
    own = machine.dtype if machine.dtype in DTYPES else DTYPES[0]
    return AdviceTask(
        model=model,
        decoder=decoder_config(model),
        gpus=args.gpus,
        memory=int(gib * GIB),
        machine=machine,
        machine_name=args.gpu,
        lengths=lengths,
        batch=args.batch or min(usual, len(lengths)),
        dtype=cast(Literal["bfloat16", "float32"], args.dtype or own),
    )


def _model(name: str, layers: int | None, words: list[str]) -> ModelConfig:
    """words: other keys of [model]."""
    for word in words:
        if not word.startswith("model.") or word.startswith(("model.preset=", "model.from_hf=")):
            raise ValueError(
                f"{word!r}: advise takes keys of [model] such as model.lora.rank=16, and the model "
                "itself as --model; the other keys are what it recommends, so leave it out"
            )
    config = load_config(None, [*_named(name, layers), *words])
    refuse(code_refusals(config))
    refuse(lora_refusals(config, decoder_config(config.model)))
    return config.model


def _named(name: str, layers: int | None) -> list[str]:
    """A preset, a folder or a function of the user's own, as keys of [model]."""
    if name in PRESETS:
        return [f"model.preset={name}", *([f"model.layers={layers}"] if layers else [])]
    is_folder = os.path.isdir(name)
    if not is_folder and ":" not in name:
        raise ValueError(
            f"--model is {name!r}, which is no preset and no folder; presets are "
            f"{', '.join(PRESETS)}; for another model name a Hugging Face folder, or your own "
            "decoder as module:function"
        )
    if layers:
        raise ValueError("--layers only changes a preset; a Hugging Face folder defines its own")
    return [f"model.from_hf={name}" if is_folder else f"model.module={name}"]


def _tokens(text: str) -> int:
    match = re.fullmatch(r"([0-9][0-9_]*\.?[0-9]*(?:[eE][0-9]+)?)([KMBT]?)", text.upper())
    number = float(match[1]) * SUFFIXES[match[2]] if match else 0.0
    if not 1 <= number < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 15B or 2e9")
    return int(number)
