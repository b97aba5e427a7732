"""Options of the command line: their types, and answers to unknown ones.

In: what a user typed. Out: a value, or a ValueError of one line. FOREIGN_OPTIONS goes from an
option of Megatron, TRL, torchtitan or verl, or a value of one, to ours, or to ": …", which says why
there is none: `--max-length 4096`, which TRL knows, is answered with "for --max-length use
--capacity". Keys of a recipe are in config/other_systems.py.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Any, NoReturn

from longshore.config.schema import by_word
from longshore.files import printable

OPTIONS_BY_ANSWER = {
    "static": "dp_balanced",
    "dynamic": "default_dynamic_cp",
    "--batch": "--batch-size --global-batch-size --train-batch-size",
    "--batch, over all devices": "--per-device-train-batch-size",
    "--capacity": "--max-length --max-seq-len --max-seq-length --max-seqlen-per-dp-cp-rank "
    "--max-token-len-per-gpu --max-tokens --ppo-max-token-len-per-gpu --seq-len --seq-length "
    "--sequence-len",
    ": --capacity decides how many sequences a micro-batch holds": "--local-batch-size "
    "--micro-batch-size",
    ": the plan decides the number of rounds": "--gradient-accumulation-steps --num-microbatches",
    ": sequences are always packed": "--packing --padding-free --sample-packing",
    "--policy": "--packing-strategy",
    "--policy dynamic": "--dynamic-context-parallel --hybrid-context-parallel",
    "--policy (dp_balanced: static, default_dynamic_cp: dynamic)": "--sequence-packing-scheduler",
    "--align": "--pad-to-multiple-of",
    "--cp-size": "--context-parallel-degree --context-parallel-size "
    "--ulysses-sequence-parallel-size",
    "--max-cp": "--max-context-parallel-size",
    "--min-cp": "--min-dynamic-context-parallel-size",
    "--lanes, the ranks of DP and CP together": "--dp-size",
    "--gpus": "--num-gpus --world-size",
    "--gpus, over all machines": "--n-gpus-per-node --nproc-per-node",
    "--tp": "--tensor-model-parallel-size --tensor-parallel-degree --tensor-parallel-size",
    "--ep": "--expert-model-parallel-size --expert-parallel-degree --expert-parallel-size",
    "--pp": "--pipeline-model-parallel-size --pipeline-parallel-degree --pipeline-parallel-size",
    "--vpp": "--virtual-pipeline-model-parallel-size",
    "--vpp, the stages of a rank": "--num-layers-per-virtual-pipeline-stage",
}
FOREIGN_OPTIONS = by_word(OPTIONS_BY_ANSWER)


ACTIONS: dict[Any, dict[str, Any]] = {bool: {"action": "store_true"}, list: {"action": "append"}}


def say(text: str, *, to_stderr: bool = False) -> None:
    """Prints for people. What a terminal would obey is escaped: data and names may be anyone's."""
    print(printable(text), file=sys.stderr if to_stderr else sys.stdout, flush=True)


class Parser(argparse.ArgumentParser):
    """Raises a ValueError where argparse would print its usage and exit."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - argparse's own
        super().__init__(*args, **{**kwargs, "exit_on_error": False})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: ANN401
        try:
            return super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            option = f"{error.argument_name}: " if error.argument_name else ""
            raise ValueError(f"{option}{error.message}") from None

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def add_command(
    commands: "argparse._SubParsersAction[Any]",
    name: str,
    *,
    summary: str,
    usage: str,
    text: str,
    options: Mapping[str, Any] | None = None,
    required: Seq[str] = (),
    **defaults: object,
) -> argparse.ArgumentParser:
    """A command whose options are described in a text of its own.

    options: from names between spaces to their type, which is bool where they take no value, and
    list where they may be repeated.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        usage=usage,
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("--help", "-h", action="help", help=argparse.SUPPRESS)
    for names, kind in (options or {}).items():
        for option in names.split():
            how = ACTIONS.get(kind) or {"type": kind, "required": option in required}
            parser.add_argument(f"--{option}", help=argparse.SUPPRESS, **how)
    parser.set_defaults(**defaults)
    return parser


def count(most: int) -> Callable[[str], int]:
    """The type of an option that counts something."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
        if not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{int(text)} is not between 1 and {most}")
        return int(text)

    return parse


def number(fits: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    """The type of an option that is a number; wanted: for errors."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if fits(value := float(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return parse


def one_of(names: Seq[str]) -> Callable[[str], str]:
    """The type of an option that names one of several."""

    def parse(text: str) -> str:
        if text in FOREIGN_OPTIONS:
            raise argparse.ArgumentTypeError(f"for {text} use {FOREIGN_OPTIONS[text]}")
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return parse


def answer(unknown: Seq[str], *, options: Seq[str]) -> str:
    """The answer to unknown words: to the first option among them, if there is one."""
    word = next((word for word in unknown if word.startswith("-")), unknown[0])
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; see --help"
    typed = word.split("=")[0]
    name = typed.lower().replace("_", "-")
    if ours := FOREIGN_OPTIONS.get(name):
        return f"there is no {typed}{ours}" if ours[0] == ":" else f"for {typed} use {ours}"
    known = ["--" + dest.replace("_", "-") for dest in options if dest not in ("run", "lengths")]
    near = difflib.get_close_matches(name, known, n=1)
    return f"there is no {typed}; " + (f"did you mean {near[0]}?" if near else "see --help")


def check_output(path: str, *inputs: str) -> None:
    """Refuses before the work what could not be written after it, or is one of the inputs."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ValueError(f"{path}: cannot be written, there is no folder {folder}")
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ValueError(f"{path}: cannot be written, it is a folder, or write-protected")
    if os.path.realpath(path) in map(os.path.realpath, inputs):
        raise ValueError(f"{path}: cannot be written, another argument names the same file")
