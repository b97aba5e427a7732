"""The command line: `longshore plan lengths.csv --lanes 32 --capacity 16384`.

In: words. Out: files, a summary on stdout and an exit code: 0, 2 with one line on stderr for what a
user got wrong, 1 where training or Longshore failed, or 128 plus the number of the signal that
ended it, such as 130 after Ctrl-C.
"""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))  # `python -m` puts the working folder before what is installed

import argparse
import importlib.metadata
import signal
import traceback
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import TextIO

from longshore.cli.advise import register_advise
from longshore.cli.calibrate import register_calibrate
from longshore.cli.doctor import register_doctor
from longshore.cli.environment import keep_out_of_temp, safe_path, send_nowhere
from longshore.cli.export import register_export
from longshore.cli.options import Parser, answer
from longshore.cli.plan import register_plan
from longshore.cli.prepare import register_prepare
from longshore.cli.report import register_report
from longshore.cli.score import register_score
from longshore.cli.train import register_train
from longshore.files import printable
from longshore.train.supervision import exit_code, signals_raise

COMMANDS = (
    register_train,
    register_plan,
    register_advise,
    register_prepare,
    register_score,
    register_report,
    register_export,
    register_doctor,
    register_calibrate,
)

DESCRIPTION = """\
Longshore trains language models on sequences of very different lengths without wasting the machine:
it packs short sequences together and splits long ones over several GPUs, anew for every step.

Start with `longshore train`, a one-minute demo, and `longshore plan --demo`; then `longshore train
--help` and `longshore plan --help`."""


def main(argv: Seq[str] | None = None) -> int:
    keep_out_of_temp()
    code = 0
    try:
        with safe_path(), signals_raise():
            code = _run(sys.argv[1:] if argv is None else argv)
            print(end="", flush=True)
            return code
    except BrokenPipeError:  # the reader, such as `head`, has closed it
        _drop(sys.stdout)
        return code
    except OSError as error:
        _drop(sys.stdout)
        # A command that has ended with a code has said why: SIGHUP comes when the terminal is gone.
        return code or _refuse(f"the summary cannot be printed ({error.strerror})")
    except ValueError as error:
        return _refuse(str(error))
    except KeyboardInterrupt as error:
        return _interrupted(getattr(error, "number", signal.SIGINT))
    except Exception:
        _tell(traceback.format_exc().rstrip())
        return 1


def _run(argv: Seq[str]) -> int:
    try:
        _dispatch(argv)
    except SystemExit as stop:  # argparse has printed its help, or a rank has failed
        return stop.code if isinstance(stop.code, int) else 0
    return 0


def _dispatch(argv: Seq[str]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("longshore", description=DESCRIPTION, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for register in COMMANDS:
        register(commands)
    args, unknown = parser.parse_known_args(argv)
    if "words" in args:  # also those that follow an option
        args.words = [*args.words, *(word for word in unknown if word[:1] != "-")]
        unknown = [word for word in unknown if word[:1] == "-"]
    if unknown:
        other = getattr(args, "answer", None)
        raise ValueError(other(unknown) if other else answer(unknown, options=[*vars(args)]))
    if args.version:
        print("longshore", importlib.metadata.version("longshore"))
    elif "run" in args:
        args.run(args)
    else:
        parser.print_help()


def _refuse(message: str) -> int:
    _tell(" ".join(message.splitlines()))
    return 2


def _interrupted(number: int) -> int:
    """One line, however many ranks torchrun has started."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        name = signal.Signals(number).name
        _tell("interrupted" if number == signal.SIGINT else f"ended by {name}")
    return exit_code(number)


def _tell(text: str) -> None:
    """On stderr, if there is still one."""
    try:
        print("longshore:", printable(text), file=sys.stderr, flush=True)
    except OSError:
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Lets Python's own flush at exit succeed."""
    with suppress(OSError, ValueError):
        send_nowhere(stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
