"""Options of the command line: their types, and answers to unknown ones.

In: what a user typed. Out: a value, or a ValueError of one line. `--max-length 4096`, which TRL
knows, is answered with "for --max-length use --capacity".

Options of Megatron, TRL, torchtitan and verl that are no options here.

In: nothing. Out: FOREIGN_OPTIONS, from such an option, or a value of one, to ours, or to ": …",
which says why there is none. `--seq-len`, which torchtitan knows, is answered with "for --seq-len
use --capacity". Keys of a recipe are in config/other_systems.py.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NoReturn

from longshore.files import printable

FOREIGN_OPTIONS = {
    "dp_balanced": "static",
    "default_dynamic_cp": "dynamic",
    "--batch-size": "--batch",
    "--context-parallel-degree": "--cp-size",
    "--context-parallel-size": "--cp-size",
    "--dynamic-context-parallel": "--policy dynamic",
    "--dp-size": "--lanes, the ranks of DP and CP together",
    "--expert-model-parallel-size": "--ep",
    "--expert-parallel-degree": "--ep",
    "--expert-parallel-size": "--ep",
    "--global-batch-size": "--batch",
    "--gradient-accumulation-steps": ": the plan decides the number of rounds",
    "--hybrid-context-parallel": "--policy dynamic",
    "--local-batch-size": ": --capacity decides how many sequences a micro-batch holds",
    "--max-context-parallel-size": "--max-cp",
    "--max-length": "--capacity",
    "--max-seq-len": "--capacity",
    "--max-seq-length": "--capacity",
    "--max-seqlen-per-dp-cp-rank": "--capacity",
    "--max-token-len-per-gpu": "--capacity",
    "--max-tokens": "--capacity",
    "--micro-batch-size": ": --capacity decides how many sequences a micro-batch holds",
    "--min-dynamic-context-parallel-size": "--min-cp",
    "--n-gpus-per-node": "--gpus, over all machines",
    "--nproc-per-node": "--gpus, over all machines",
    "--num-gpus": "--gpus",
    "--num-layers-per-virtual-pipeline-stage": "--vpp, the stages of a rank",
    "--num-microbatches": ": the plan decides the number of rounds",
    "--packing": ": sequences are always packed",
    "--packing-strategy": "--policy",
    "--pad-to-multiple-of": "--align",
    "--padding-free": ": sequences are always packed",
    "--per-device-train-batch-size": "--batch, over all devices",
    "--pipeline-model-parallel-size": "--pp",
    "--pipeline-parallel-degree": "--pp",
    "--pipeline-parallel-size": "--pp",
    "--ppo-max-token-len-per-gpu": "--capacity",
    "--sample-packing": ": sequences are always packed",
    "--seq-len": "--capacity",
    "--seq-length": "--capacity",
    "--sequence-packing-scheduler": "--policy (dp_balanced: static, default_dynamic_cp: dynamic)",
    "--sequence-len": "--capacity",
    "--tensor-model-parallel-size": "--tp",
    "--tensor-parallel-degree": "--tp",
    "--tensor-parallel-size": "--tp",
    "--train-batch-size": "--batch",
    "--ulysses-sequence-parallel-size": "--cp-size",
    "--virtual-pipeline-model-parallel-size": "--vpp",
    "--world-size": "--gpus",
}


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
    commands: "argparse._SubParsersAction[Any]", name: str, *, summary: str, usage: str, text: str
) -> argparse.ArgumentParser:
    """A command whose options are described in a text of its own."""
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
