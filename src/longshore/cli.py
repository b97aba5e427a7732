"""The command line: `longshore plan lengths.csv --lanes 32 --capacity 16384`.

In: words. Out: files, a summary on stdout and an exit code: 0, or 2 with one line on stderr for
what a user got wrong. `--gpus 64 --tp 2 --pp 4` stands for `--lanes 8`, because 64 / (2 x 4) = 8.
"""

import argparse
import contextlib
import difflib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NoReturn

from longshore.plan.as_json import advice, plans_as_json, total_stats
from longshore.plan.cost import BUILT_IN, CostProfile, load_profile
from longshore.plan.lengths_file import Lengths, demo_lengths, read_lengths
from longshore.plan.planner import ONE_SIZE
from longshore.plan.policies import POLICIES
from longshore.plan.types import Plan, Stats
from longshore.report.plan_page import write_plan_page

DESCRIPTION = """\
Longshore trains language models on sequences of very different lengths without wasting the machine:
it packs short sequences together and splits long ones over several GPUs, anew for every step.

Start with `longshore plan --demo`, then `longshore plan --help`."""
PLAN_HELP = """\
Plans how sequences of these lengths are packed and split, and predicts how long a step takes.
A lane is one GPU, or the TP x PP GPUs that share its tokens. A pack is sequences joined end to
end, on one lane or split over K lanes: its CP size (context parallelism) is K. A round is one
micro-batch on all lanes; a step, one update of the model, has one or more rounds.

what to plan:
  LENGTHS.csv        one length in tokens a line; a first line 'length' is optional
  --demo             plan a built-in sample instead; --lanes 32 --capacity 16384 unless given
  --batch B          sequences in a step, Megatron's global batch size (default: the whole file)

the machine:
  --lanes N          number of lanes: data-parallel x context-parallel size in Megatron's words
  --gpus G           instead of --lanes: number of GPUs; there are G / (T x P) lanes
  --tp T             with --gpus: tensor-parallel size (default 1)
  --pp P             pipeline-parallel size (default 1: no pipeline)
  --vpp V            stages of each pipeline rank (default 1: not interleaved)
  --capacity C       most tokens a lane holds in a round; Megatron's max_seqlen_per_dp_cp_rank
  --max-sequences M  most sequences a lane holds in a round (default: no limit)
  --align A          pad the tokens of a lane to a multiple of A, as FP8 needs (default 1)
  --cost FILE.json   what tokens cost on your machine, an object with linear, quadratic, gather,
                     node, pack and round (default: estimated seconds of an 8B model on H100s)

how to plan:
  --policy NAME      mixed     packs of different CP sizes side by side on a lane (default)
                     dynamic   a CP size for each pack, one pack a lane a round
                     balanced  one CP size for all, packs balanced by cost
                     static    one CP size for all, packs filled in the order of the file
                     padded    one sequence a lane a round, padded to the longest
                     given     packs of your own: the file's first line is 'length,pack', and
                               lines such as '900,a' and '512,a' form a pack
                     Megatron's default_dynamic_cp is dynamic, its dp_balanced is static.
  --cp-size K        the CP size of padded, static and balanced, Megatron's context-parallel
                     size (default: the smallest that fits; for balanced the fastest)
  --min-cp K         smallest CP size allowed (default 1)
  --max-cp K         largest CP size allowed (default: all lanes)
  --cp-sizes KIND    pow2: powers of two and all lanes (default); any: each size, up to 64 lanes
  --sync WHEN        round: lanes wait for each other after every round, as with ZeRO-3, experts
                     or a pipeline (default); step: once a step, if parameters stay gathered

what to write:
  --json OUT.json    the plan: its rounds, packs, lanes and figures
  --html OUT.html    a page to look at in a browser, with the policies side by side

example: your lengths on 64 GPUs with tensor parallelism 2, 256 sequences a step
  longshore plan lengths.csv --gpus 64 --tp 2 --capacity 16384 --batch 256 --html plan.html"""

# A mistyped number beyond these would only keep the machine busy.
COUNTS = {
    **dict.fromkeys(("lanes", "gpus", "tp", "cp-size", "min-cp", "max-cp"), 1 << 20),
    **dict.fromkeys(("batch", "capacity", "align", "max-sequences"), 1 << 40),
    **dict.fromkeys(("pp", "vpp"), 1 << 10),
}
CHOICES = {"policy": [*POLICIES], "cp-sizes": ["pow2", "any"], "sync": ["round", "step"]}
PLANNER = ("sync", "cp_size", "min_cp", "max_cp", "cp_sizes", "max_sequences", "align", "pp", "vpp")
COMPARED = ("padded", "static", "balanced", "dynamic", "mixed")
DEMO_LANES, DEMO_CAPACITY = 32, 16384

# What users of Megatron and TRL may type, and our word for it; ": …" says why there is none.
FOREIGN = {
    "dp_balanced": "static",
    "default_dynamic_cp": "dynamic",
    "--context-parallel-size": "--cp-size",
    "--dynamic-context-parallel": "--policy dynamic",
    "--global-batch-size": "--batch",
    "--gradient-accumulation-steps": ": the plan decides the number of rounds",
    "--hybrid-context-parallel": "--policy dynamic",
    "--max-length": "--capacity",
    "--max-seq-length": "--capacity",
    "--max-seqlen-per-dp-cp-rank": "--capacity",
    "--micro-batch-size": ": --capacity decides how many sequences a micro-batch holds",
    "--min-dynamic-context-parallel-size": "--min-cp",
    "--num-layers-per-virtual-pipeline-stage": "--vpp, the stages of a rank",
    "--num-microbatches": ": the plan decides the number of rounds",
    "--packing": ": sequences are always packed",
    "--per-device-train-batch-size": "--batch, over all devices",
    "--pipeline-model-parallel-size": "--pp",
    "--seq-length": "--capacity",
    "--sequence-packing-scheduler": "--policy (dp_balanced: static, default_dynamic_cp: dynamic)",
    "--tensor-model-parallel-size": "--tp",
    "--virtual-pipeline-model-parallel-size": "--vpp",
    "--world-size": "--gpus",
}


class Parser(argparse.ArgumentParser):
    """Raises where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def main(argv: Seq[str] | None = None) -> int:
    try:
        with contextlib.suppress(SystemExit):  # argparse has printed its help
            _dispatch(sys.argv[1:] if argv is None else argv)
        print(end="", flush=True)
        return 0
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        return _drop_stdout()
    except OSError as error:
        _drop_stdout()
        return _refuse(f"the summary cannot be printed ({error.strerror})")
    except ValueError as error:
        return _refuse(_as_options(str(error)))
    except KeyboardInterrupt:
        return 130


def _dispatch(argv: Seq[str]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser("longshore", description=DESCRIPTION, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for register in COMMANDS:
        register(commands)
    args, strange = parser.parse_known_args(argv)
    if strange:
        raise ValueError(_answer(strange, options=[*vars(args)]))
    if args.version:
        print("longshore", importlib.metadata.version("longshore"))
    elif "run" in args:
        args.run(args)
    else:
        parser.print_help()


def _refuse(message: str) -> int:
    print("longshore:", " ".join(message.splitlines()), file=sys.stderr)
    return 2


def _drop_stdout() -> int:
    """Lets Python's own flush at exit succeed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _answer(strange: Seq[str], *, options: Seq[str]) -> str:
    """What to say to words that nothing takes, the first option among them."""
    word = next((word for word in strange if word.startswith("-")), strange[0])
    if not word.startswith("-"):
        return f"{word!r} is one word too many; see --help"
    typed = word.split("=")[0]
    name = typed.lower().replace("_", "-")
    if ours := FOREIGN.get(name):
        return f"there is no {typed}{ours}" if ours[0] == ":" else f"for {typed} use {ours}"
    known = ["--" + dest.replace("_", "-") for dest in options if dest not in ("run", "lengths")]
    near = difflib.get_close_matches(name, known, n=1)
    return f"there is no {typed}; " + (f"did you mean {near[0]}?" if near else "see --help")


def _count(most: int) -> Callable[[str], int]:
    """The type of an option that counts something."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
        if not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{int(text)} does not lie between 1 and {most}")
        return int(text)

    return parse


def _one_of(names: Seq[str]) -> Callable[[str], str]:
    """The type of an option that names one of several."""

    def parse(text: str) -> str:
        if text in FOREIGN:
            raise argparse.ArgumentTypeError(f"for {text} use {FOREIGN[text]}")
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def register_plan(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "plan",
        help="plan the steps for a file of lengths and predict their time",
        usage="longshore plan (LENGTHS.csv --lanes N --capacity C | --demo) [options]",
        description=PLAN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.set_defaults(run=run_plan)
    hidden = argparse.SUPPRESS  # PLAN_HELP describes them all
    parser.add_argument("--help", "-h", action="help", help=hidden)
    parser.add_argument("lengths", nargs="?", help=hidden)
    parser.add_argument("--demo", action="store_true", help=hidden)
    kinds: dict[str, Callable[[str], Any]] = {name: _count(most) for name, most in COUNTS.items()}
    kinds |= {name: _one_of(names) for name, names in CHOICES.items()}
    kinds |= {"cost": str, "json": str, "html": str}
    for name, kind in kinds.items():
        parser.add_argument(f"--{name}", type=kind, help=hidden)


COMMANDS = (register_plan,)


def run_plan(args: argparse.Namespace) -> None:
    _check_complete(args)
    lengths = demo_lengths() if args.demo else read_lengths(args.lengths)
    options = {name: value for name in PLANNER if (value := getattr(args, name)) is not None}
    options |= {"lanes": _lanes(args), "capacity": args.capacity or DEMO_CAPACITY}
    options |= {"profile": _profile(args.cost)}
    _check_outputs(args)
    policy, steps = args.policy or "mixed", lengths.steps(args.batch)
    others: dict[str, list[Plan] | str] = {}
    try:
        plans = _plan_steps(steps, policy, options)
        if args.html:
            others = {name: _compare(steps, name, options) for name in COMPARED if name != policy}
    finally:
        _progress("")
    if args.json:
        text = json.dumps(plans_as_json(plans), allow_nan=False) + "\n"
        _write(args.json, lambda path: Path(path).write_text(text, encoding="utf-8"))
    if args.html:
        _write(args.html, lambda path: write_plan_page(path, plans, others))
    print("\n".join(_summary(args, plans)), flush=True)


def _check_complete(args: argparse.Namespace) -> None:
    """With --demo, lanes and capacity have defaults."""
    if args.demo == (args.lengths is not None):
        raise ValueError("give either a file with one length a line or --demo, a built-in sample")
    if args.tp is not None and args.gpus is None:
        raise ValueError("--tp needs --gpus; --lanes does not count the ranks of TP and PP")
    missing = [args.lanes, args.gpus].count(None)
    if missing == 0 or (missing == 2 and not args.demo):
        raise ValueError("give either --lanes, or --gpus with --tp and --pp")
    if args.capacity is None and not args.demo:
        raise ValueError("give --capacity, the most tokens a lane holds in a round, such as 16384")


def _lanes(args: argparse.Namespace) -> int:
    if args.gpus is None:
        return args.lanes or DEMO_LANES
    tp, pp = args.tp or 1, args.pp or 1
    lanes, rest = divmod(args.gpus, tp * pp)
    if rest:
        working = [str(count * tp * pp) for count in (lanes, lanes + 1) if count]
        raise ValueError(
            f"--gpus {args.gpus} is no multiple of tp {tp} x pp {pp} = {tp * pp}; "
            f"--gpus {' or '.join(working)} would work"
        )
    return int(lanes)


def _profile(path: str | None) -> CostProfile:
    try:
        return BUILT_IN if path is None else load_profile(path)
    except (OverflowError, RecursionError):
        raise ValueError(f"cost profile {path}: holds numbers that cannot be used") from None


def _check_outputs(args: argparse.Namespace) -> None:
    """Refuses before planning what could not be written after it."""
    taken = {os.path.realpath(path) for path in (args.lengths, args.cost) if path}
    for path in [path for path in (args.json, args.html) if path is not None]:
        folder = os.path.dirname(path) or "."
        if os.path.realpath(path) in taken:
            raise ValueError(f"{path}: cannot be written, another argument names the same file")
        if not os.path.isdir(folder):
            raise ValueError(f"{path}: cannot be written, there is no folder {folder}")
        if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
            raise ValueError(f"{path}: cannot be written, it is a folder or protected")
        taken.add(os.path.realpath(path))


def _write(path: str, write: Callable[[str], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from None


def _plan_steps(steps: Seq[Lengths], policy: str, options: dict[str, Any]) -> list[Plan]:
    plans = []
    for number, step in enumerate(steps, start=1):
        _progress(f"planning {policy}, step {number} of {len(steps)} …")
        plans.append(step.plan(policy, options))
    return plans


def _compare(steps: Seq[Lengths], policy: str, options: dict[str, Any]) -> list[Plan] | str:
    """Another policy's plans, or why it was refused. Only some policies take a CP size."""
    own = {k: v for k, v in options.items() if k != "cp_size" or policy in ONE_SIZE}
    try:
        return _plan_steps(steps, policy, own)
    except ValueError as error:
        return _as_options(str(error))


def _as_options(message: str) -> str:
    """The planner says cp_size where the user typed --cp-size."""
    names = r"(?<![\w/.-])(?:cp_sizes?|min_cp|max_cp|max_sequences)(?![\w/.-])"
    return re.sub(names, lambda found: "--" + found[0].replace("_", "-"), message)


def _progress(text: str) -> None:
    """One line that is written over, for people only: a log has no use for it."""
    if sys.stderr and sys.stderr.isatty():
        print("\r\x1b[K" + text, end="", file=sys.stderr, flush=True)


def _summary(args: argparse.Namespace, plans: Seq[Plan]) -> list[str]:
    setting, total = plans[0].setting, total_stats([plan.stats for plan in plans])
    unit = "units of the profile" if args.cost else "s (estimated)"
    lengths = [sequence.length for plan in plans for sequence in plan.sequences]
    lanes = f"lanes = {args.gpus} GPUs / (tp {args.tp or 1} x pp {setting.pp}) = {setting.lanes}"
    names = [name for name in FIGURES if name != "bubble" or setting.pp > 1]
    sizes = ", ".join(f"{count:,} at {size}" for size, count in total.cp_histogram)
    return [
        *[lanes] * bool(args.gpus),
        f"sequences: {len(lengths):,} with {total.tokens:,} tokens, the longest {max(lengths):,}",
        f"lanes: {setting.lanes:,} of {setting.capacity:,} tokens; policy: {setting.policy}",
        "",
        *(_table(names, plans, unit) if len(plans) > 1 else _list(names, total, unit)),
        f"sequences at each CP size: {sizes}",
        "",
        advice(total, setting),
        *[f"plan: {args.json}"] * bool(args.json),
        *[f"page: {args.html} (open it in a browser)"] * bool(args.html),
    ]


FIGURES: dict[str, tuple[Callable[[Stats], str], str]] = {
    "predicted": (lambda s: _time(s.predicted), "{unit} for the step"),
    "bound": (lambda s: _time(s.lower_bound), "{unit}: no plan within these limits is faster"),
    "gap": (lambda s: f"{s.gap:.1%}", "above the bound"),
    "efficiency": (lambda s: f"{s.efficiency:.1%}", "of the lanes' time is work on real tokens"),
    "idle": (lambda s: f"{s.imbalance:.1%}", "of the lanes' time is waiting for other lanes"),
    "bubble": (lambda s: f"{s.bubble:.1%}", "of the step pipeline ranks wait for each other"),
    "padding": (lambda s: f"{s.padding:.1%}", "of the tokens are padding"),
    "fill": (lambda s: f"{s.fill:.1%}", "of the lanes' capacity is used"),
    "rounds": (lambda s: f"{s.rounds:,}", ""),
    "planned in": (lambda s: f"{s.planning_seconds:.3f} s", "on this machine"),
}


def _time(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _list(names: Seq[str], stats: Stats, unit: str) -> list[str]:
    rows = [(name, *FIGURES[name]) for name in names]
    return [f"{n:<12}{show(stats):>9} {text.format(unit=unit)}".rstrip() for n, show, text in rows]


def _table(names: Seq[str], plans: Seq[Plan], unit: str) -> list[str]:
    steps = [plan.stats for plan in plans]
    rows = {str(number): stats for number, stats in enumerate(steps, start=1)}
    rows["all"] = total_stats(steps)
    cells = [["step", *names]]
    cells += [[name, *(FIGURES[n][0](stats) for n in names)] for name, stats in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return [*lines, f"predicted and bound in {unit}"]


if __name__ == "__main__":
    sys.exit(main())
