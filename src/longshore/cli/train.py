"""`longshore train`: from a recipe to a trained model.

In: a recipe, and overrides. Out: the run's folder. All that can be refused is refused before any
text is tokenized, most of it before torch is imported; then the ranks start. `longshore train
--ranks 2 train.steps=10` runs the demo on two processes for ten steps. What --resume does:
run/resume.py.
"""

import argparse
import difflib
import signal
import textwrap
import traceback
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from longshore.cli.environment import (
    check_limits,
    exceeded_limit,
    lossy_output,
    working_folder_last,
)
from longshore.cli.launch import RankError, Work, launch, ranks_of_run
from longshore.cli.options import add_command, count, say
from longshore.config.load import load_config
from longshore.config.other_systems import all_keys, answer_key, foreign_answer
from longshore.config.schema import SECTIONS, RunConfig, toml_value
from longshore.distributed.process_group import Ranks, loopback, ranks_from_environment
from longshore.run.data import prepare_text, text_is_ready
from longshore.run.folder import newest_runs
from longshore.run.resume import (
    FRESH,
    Start,
    checked_config,
    names_run,
    recipe_of,
    start_from_environment,
)
from longshore.train.supervision import Interrupted, RunError, StoppedError, exit_code

MOST_RANKS = 1 << 20
FAILED = 1

TRAIN_HELP = """\
Trains a model on sequences of very different lengths, planned anew for every step.
Without a recipe it runs a demo: a tiny model on synthetic data, with four processes on the CPU,
in about a minute.

  RECIPE.toml          the run's configuration (default: the demo)
  section.key=value    changes a key of the recipe, such as train.lr=3e-4; repeat it for more
  --ranks N            processes on this machine (default: parallel.ranks, else one for each GPU).
                       Under torchrun: the processes that torchrun has started
  --resume RUN         resume the run in the folder RUN from its newest checkpoint, with its own
                       recipe if none is given, on any number of ranks
  --resume             with a recipe: resume the newest run of its output.folder; if there is none
                       yet, start a new one
  --force              with --resume: resume even if the data differ from those of the checkpoint
  --force-ranks        allow far more processes than there are cores
  --print-config       print the whole configuration as a recipe, check it, and stop

Ctrl-C, SIGTERM and SIGHUP end a run after the current step, with a checkpoint and the exit code
130, 143 or 129. A second Ctrl-C quits at once, without a checkpoint.

examples:
  longshore train
  longshore train data.path=chats.jsonl model.from_hf=my-model data.batch=64 train.epochs=2
  longshore train data.path=chats.jsonl model.from_hf=my-model data.batch=64 --print-config >x.toml
  longshore train x.toml --resume
  longshore train --resume runs/x-1 train.steps=2000
  torchrun --nproc-per-node 8 -m longshore.cli.main train x.toml
"""
OPTIONS = ("--ranks", "--force-ranks", "--resume", "--force", "--print-config")
WIDTH = 100
INDENT = 23


def register_train(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = add_command(
        commands,
        "train",
        summary="train a model; without a recipe, a demo",
        usage="longshore train [RECIPE.toml] [--ranks N] [--resume [RUN]] [section.key=value …]",
        text=f"{TRAIN_HELP}\n{_keys_help()}",
        options={"ranks": count(MOST_RANKS), "force force-ranks print-config": bool},
        run=run_train,
        answer=answer_option,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--resume", nargs="?", const="", help=argparse.SUPPRESS)


def run_train(args: argparse.Namespace) -> None:
    working_folder_last()
    place = ranks_from_environment()
    start = start_from_environment() if place is not None else FRESH
    try:
        start = _with_resume(args, start)
        config = _config(args, place, start)
    except ValueError:
        if place is not None and place.local_rank:
            raise SystemExit(2) from None  # the first rank of each machine prints it
        raise
    if args.print_config:
        if place is None or place.rank == 0:
            print(config.to_toml(), end="")
        return
    with lossy_output():
        work = train if start == FRESH else partial(train, start=start)
        run_on_ranks(config, place, work, check=_check_before_text)


def _check_before_text(config: RunConfig) -> None:
    """What the ranks would refuse only once the text is tokenized; it imports torch."""
    from longshore.run.parts import check_before_text

    check_before_text(config)


def run_on_ranks(
    config: RunConfig,
    place: Ranks | None,
    work: Work,
    *,
    check: Callable[[RunConfig], None] = lambda config: None,
) -> None:
    """Here under torchrun, else in new processes; an error becomes a line and an exit code.

    check: called before text is tokenized, if there is any to tokenize.
    """
    ranks = config.parallel.ranks
    try:
        check_limits(ranks if place is None else 1)
        if place is not None:
            with loopback(place):
                work(config, place)
            return
        if not text_is_ready(config):
            check(config)
        prepare_text(config, display=config.output.display)
        if config.output.display != "none":  # a sign of life: the ranks take seconds to start
            print(f"starting {ranks} rank{'s' if ranks > 1 else ''}…", flush=True)
        launch(work, config, ranks)
    except ValueError:
        raise  # main prints it
    except (Interrupted, StoppedError) as error:
        early = isinstance(error, Interrupted)
        if place is None or place.rank == 0:
            text = "stopped before the first step" if early else error
            say(f"longshore: {text}", to_stderr=True)
        raise SystemExit(exit_code(error.number)) from None
    except (RankError, RunError) as error:
        say(f"longshore: {str(error).rstrip()}", to_stderr=True)
        raise SystemExit(FAILED) from None
    except Exception:
        text = traceback.format_exc().rstrip()
        why = exceeded_limit(text)
        say(f"longshore: {why}" if why else text, to_stderr=True)
        raise SystemExit(FAILED) from None


def train(config: RunConfig, ranks: Ranks, start: Start = FRESH) -> None:
    """One rank's part, to the last step. It imports torch, so it is imported only where it runs."""
    from longshore.run.trainer import Trainer

    with Trainer.on_rank(config, ranks, start, signals=True) as trainer:
        trainer.run()
    if not trainer.is_finished:
        then = f"resume with --resume {trainer.folder}"
        if not config.output.keep:
            then = "nothing is saved, because output.keep is 0"
        where = ", in its evaluation" if trainer.done >= trainer.steps else ""
        text = f"stopped after step {trainer.done} of {trainer.steps}{where}; {then}"
        raise StoppedError(text, trainer.stopped_by or signal.SIGTERM)


def _with_resume(args: argparse.Namespace, start: Start) -> Start:
    """What --resume and --force ask for; a recipe or an override after --resume is not a folder."""
    if args.resume is None:
        if args.force:
            raise ValueError(
                "--force works only with --resume; for more processes than cores use --force-ranks"
            )
        return start
    if "=" in args.resume or args.resume.endswith((".toml", ".yaml")):
        args.words, args.resume = [*args.words, args.resume], ""
    return replace(start, is_asked=True, is_forced=args.force)


def _config(args: argparse.Namespace, place: Ranks | None, start: Start) -> RunConfig:
    """The configuration, checked, with the ranks it will run on."""
    recipe, overrides = _split_words(args.words)
    keys = [word.partition("=")[0].strip() for word in overrides]
    if args.resume:
        own = recipe_of(Path(args.resume), asked_by="--resume")
        recipe, overrides = recipe or own, [*overrides, f"output.folder={Path(args.resume)}"]
    elif args.resume == "" and recipe is None and not names_run(keys):
        raise ValueError(f"--resume: which run? {newest_runs()}")
    config = load_config(recipe, overrides)
    way_out = "lower --ranks (or parallel.ranks), or add --force-ranks"
    ranks = ranks_of_run(args.ranks, config, place, way_out="" if args.force_ranks else way_out)
    is_first = place is None or place.rank == 0
    is_run_here = not args.print_config
    return checked_config(config, ranks, start, is_first=is_first, is_run_here=is_run_here)


def _split_words(words: Seq[str]) -> tuple[str | None, list[str]]:
    """The recipe, if there is one, and the overrides."""
    recipes = [word for word in words if "=" not in word and word.endswith((".toml", ".yaml"))]
    if len(recipes) > 1:
        raise ValueError(f"{recipes[1]!r} is a second recipe; give one, and overrides to change it")
    others = [word for word in words if word not in recipes]
    return (recipes[0] if recipes else None), others


def answer_option(unknown: Seq[str]) -> str:
    """The answer to unknown options: keys are written without dashes."""
    typed = unknown[0].split("=")[0]
    word = typed.lstrip("-").replace("-", "_")
    if foreign_answer(word):
        return answer_key(word, typed=typed)
    if near := difflib.get_close_matches(typed, OPTIONS, n=1):
        return f"there is no {typed}; did you mean {near[0]}?"
    for key in all_keys():
        if word in (key, key.rpartition(".")[2]):
            return f"there is no {typed}; write {key}=VALUE, without dashes"
    return answer_key(word, typed=typed)


def _keys_help() -> str:
    """Every key with what it means and its default, from the sections themselves."""
    lines = ["keys of a recipe, and in brackets their defaults:"]
    for name, kind in SECTIONS.items():
        lines.append(f"\n[{name}] {(kind.__doc__ or '').strip()}")
        for field in fields(kind):
            text, default = field.metadata["about"], field.default
            if default is False or default not in (MISSING, "", 0, ()):
                text += f" [{toml_value(default)}]"
            start = f"  {field.name:<{INDENT - 3}} "
            lines += textwrap.wrap(
                text, WIDTH, initial_indent=start, subsequent_indent=" " * INDENT
            )
    return "\n".join(lines)
