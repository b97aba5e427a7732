"""Options of the command line: their types, and answers to unknown ones.

In: what a user typed. Out: a value, or a ValueError of one line. `--max-length 4096`, which TRL
knows, is answered with "for --max-length use --capacity".
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NoReturn

from longshore.cli.foreign import FOREIGN_OPTIONS
from longshore.printable import printable


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
