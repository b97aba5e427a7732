"""`longshore plan`: from lengths to a plan, a summary, a JSON file and a page.

In: the options of PLAN_HELP. Out: files and text. `--gpus 64 --tp 2 --pp 4` stands for `--lanes 8`,
because 64 / (2 x 4) = 8.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from longshore.advisor.machine import MachineProfile, profile_names, read_cost
from longshore.advisor.step_time import model_cost
from longshore.arch.presets import preset
from longshore.cli.environment import working_folder_last
from longshore.cli.options import add_command, count, one_of, say
from longshore.config.schema import listed
from longshore.data.source import Batches, BatchSize, Place
from longshore.files import write_atomically
from longshore.plan.cost import BUILT_IN, CostProfile, Ints
from longshore.plan.lengths_file import Lengths, demo_lengths, read_lengths
from longshore.plan.planner import plan_setting
from longshore.plan.types import (
    DEFAULT_POLICY,
    POLICIES,
    Axes,
    Plan,
    PlanSetting,
    policy_named,
    policy_names,
)
from longshore.report.pages import plan_summary, plans_as_json, write_plan_page
from longshore.settings import CPSizes, Sync, names_of
from longshore.user_code import FUNCTION_NAME

PLAN_HELP = """\
Plans how sequences of these lengths are packed and split, and predicts how long a step takes.
A lane is one GPU, or the TP x PP GPUs that share its tokens. A pack is sequences joined end to
end, on one lane or split over K lanes: its CP size (context parallelism) is K. A round is one
micro-batch on all lanes; a step, one update of the model, has one or more rounds.

what to plan:
  LENGTHS.csv        one length in tokens per line; a first line 'length' is optional
  FOLDER             made by `longshore prepare`: plans the steps of training in their order
  --demo             plan a built-in sample instead; --lanes 32 --capacity 16384 unless given
  --batch B          sequences in a step, Megatron's global batch size (default: all in one step)
  --batch-tokens T   instead of --batch: as many sequences as come closest to T tokens
  --steps N          plan only the first N steps (default: a whole epoch)
  --seed S           with a folder: the seed of its shuffle, data.seed in training (default 0)

the machine:
  --lanes N          number of lanes: data-parallel x context-parallel size in Megatron's words
  --gpus G           instead of --lanes: number of GPUs; there are G / (T x P) lanes
  --tp T             with --gpus: tensor-parallel size (default 1)
  --ep E             expert-parallel size: experts are split over E neighbouring GPUs, across lanes
                     and TP ranks; it divides lanes x T (default 1: every GPU has all experts)
  --pp P             pipeline-parallel size (default 1: no pipeline)
  --vpp V            stages of each pipeline rank (default 1: not interleaved)
  --capacity C       most tokens a lane holds in a round; Megatron's max_seqlen_per_dp_cp_rank
  --max-sequences M  most sequences a lane holds in a round (default: no limit)
  --align A          pad the tokens of a lane to a multiple of A, as FP8 needs (default 1)
  --cost COST        what tokens cost on your machine: a file of `longshore calibrate` or a name
                     (MACHINES; --gpu is the same), both with --model; or a JSON
                     object with linear, quadratic, gather, node, pack and round, and with a
                     pipeline message (default: estimated seconds of an 8B model on H100s). It is
                     the cost of the whole model on one GPU: --tp and --pp divide it; what --tp
                     communicates is not counted
  --model PRESET     with a --cost that was measured: the model, such as qwen3-8b

how to plan:
  --policy NAME      POLICY_LIST
                     For given, the first line of the file is 'length,pack'; lines such as '900,a'
                     and '512,a' form one pack. Your own function: module:function.
                     Megatron's default_dynamic_cp is dynamic, its dp_balanced is static.
  --cp-size K        the CP size for ONE_CP_SIZE, Megatron's context-parallel
                     size (default: the smallest that fits; for balanced the fastest)
  --min-cp K         smallest CP size allowed (default 1)
  --max-cp K         largest CP size allowed (default: all lanes)
  --cp-sizes KIND    pow2: powers of two and all lanes (default); any: each size, up to 64 lanes
  --sync WHEN        round: lanes wait for each other after every round, as with ZeRO-3, experts
                     or a pipeline (default); step: only inside shared packs and at the end of
                     the step, not with ZeRO-3

what to write:
  --json OUT.json    the plan: its rounds, packs, lanes and figures
  --html OUT.html    a page to look at in a browser, with the policies side by side

Errors name options by their keys in a recipe: --max-cp is plan.max_cp, --tp is parallel.tp.

example: your lengths on 64 GPUs with tensor parallelism 2, 256 sequences a step
  longshore plan lengths.csv --gpus 64 --tp 2 --capacity 16384 --batch 256 --html plan.html"""

# A mistyped number beyond these would only keep the machine busy.
COUNTS = {
    **dict.fromkeys(("lanes", "gpus", "tp", "ep", "cp-size", "min-cp", "max-cp"), 1 << 20),
    **dict.fromkeys(("batch", "batch-tokens", "capacity", "align", "max-sequences"), 1 << 40),
    **dict.fromkeys(("steps", "seed"), 1 << 40),
    **dict.fromkeys(("pp", "vpp"), 1 << 10),
}
CHOICES = {
    "policy": (*POLICIES, "module:function"),
    "cp-sizes": names_of(CPSizes),
    "sync": names_of(Sync),
}
COMPARED = policy_names(lambda policy: not policy.needs_packs)[::-1]
DEMO_LANES, DEMO_CAPACITY = 32, 16384


def register_plan(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = add_command(
        commands,
        "plan",
        summary="plan the steps for a file of lengths and predict their time",
        usage="longshore plan (LENGTHS.csv --lanes N --capacity C | --demo) [options]",
        text=plan_help(),
    )
    parser.set_defaults(run=run_plan, policy=DEFAULT_POLICY, sync="round", cp_sizes="pow2")
    parser.set_defaults(min_cp=1, align=1, ep=1, pp=1, vpp=1)
    hidden = argparse.SUPPRESS  # PLAN_HELP describes them all
    parser.add_argument("lengths", nargs="?", help=hidden)
    parser.add_argument("--demo", action="store_true", help=hidden)
    kinds: dict[str, Callable[[str], Any]] = {name: count(most) for name, most in COUNTS.items()}
    kinds |= {name: one_of(names) for name, names in CHOICES.items()}
    kinds |= {"policy": _policy_name, "cost": str, "model": str, "json": str, "html": str}
    for name, kind in kinds.items():
        also = ["--gpu"] if name == "cost" else []  # as `longshore advise` calls a machine
        parser.add_argument(f"--{name}", *also, type=kind, help=hidden)


def plan_help() -> str:
    """The help, with the registered policies in it."""
    indent = " " * 21
    rows = [
        f"{name:<9} {policy.about}" + " (default)" * (name == DEFAULT_POLICY)
        for name, policy in POLICIES.items()
    ]
    sizes = listed(policy_names(lambda policy: policy.one_cp_size), "and")
    policies = f"\n{indent}".join(rows)
    machines = ", ".join(profile_names())
    text = PLAN_HELP.replace("POLICY_LIST", policies).replace("ONE_CP_SIZE", sizes)
    return text.replace("MACHINES", machines)


def _policy_name(text: str) -> str:
    return text if FUNCTION_NAME.fullmatch(text) else one_of(CHOICES["policy"])(text)


def run_plan(args: argparse.Namespace) -> None:
    _check_complete(args)
    steps = _steps(args)
    axes, capacity = _axes(args), args.capacity or DEMO_CAPACITY
    cost = _read_cost(args.cost)
    profile = _profile(args, cost, axes=axes, capacity=capacity)
    _check_outputs(args)
    if args.policy not in POLICIES:
        working_folder_last()
    setting = plan_setting(
        axes,
        capacity=capacity,
        policy=args.policy,
        sync=args.sync,
        profile=profile.on_ranks(tp=axes.tp, pp=axes.pp),
        cp_size=args.cp_size,
        min_cp=args.min_cp,
        max_cp=args.max_cp,
        cp_sizes=args.cp_sizes,
        max_sequences=args.max_sequences,
        align=args.align,
    )
    others: dict[str, list[Plan] | str] = {}
    try:
        plans = _plan_steps(steps, setting)
        if args.html:
            others = {
                name: _compare(steps, name, setting) for name in COMPARED if name != args.policy
            }
    finally:
        _progress("")
    if args.json:
        text = json.dumps(plans_as_json(plans), allow_nan=False) + "\n"
        _write(args.json, lambda path: write_atomically(path, text))
    if args.html:
        _write(args.html, lambda path: write_plan_page(path, plans, others))
    if args.gpus:
        say(f"lanes = {args.gpus} GPUs / (tp {axes.tp} x pp {axes.pp}) = {axes.lanes}")
    ranks = {"tp": axes.tp, "pp": axes.pp}
    if divided := [f"{name} {size}" for name, size in ranks.items() if size > 1]:
        say(
            f"times: the cost of one GPU, divided by {' x '.join(divided)}; what tensor "
            "parallelism communicates is not included"
        )
    if isinstance(cost, MachineProfile) and cost.basis:
        say(f"times: {cost.basis}")
    is_machine = args.model is not None
    unit = "units of the profile" if args.cost and not is_machine else "s (estimated)"
    say("\n".join(plan_summary(plans, unit=unit)))
    if args.json:
        say(f"plan: {args.json}")
    if args.html:
        say(f"page: {args.html} (open it in a browser)")


def _steps(args: argparse.Namespace) -> list[Lengths]:
    """The lengths of each step: a file's in its order, a folder's as training takes them."""
    is_folder = args.lengths is not None and os.path.isdir(args.lengths)
    if args.seed is not None and not is_folder:
        raise ValueError("--seed is for a prepared folder; the lengths of a file keep their order")
    if args.batch is not None and args.batch_tokens is not None:
        raise ValueError("--batch and --batch-tokens are both given; leave one out")
    groups = None
    if args.demo:
        lengths = demo_lengths()
    elif is_folder:
        lengths, groups = _prepared(args.lengths)
    else:
        lengths = read_lengths(args.lengths)
    size = BatchSize("sequences", args.batch or len(lengths.lengths))
    if args.batch_tokens:
        size = BatchSize("tokens", args.batch_tokens)
    array = np.array(lengths.lengths, dtype=np.int64)
    batches = Batches(array, size, seed=args.seed or 0, shuffle=is_folder, groups=groups)
    most = min(args.steps or batches.steps(0), batches.steps(0))
    taken = islice(batches.from_place(Place()), most)
    return [lengths.part(places.tolist()) for _, places in taken]


def _prepared(folder: str) -> tuple[Lengths, Ints | None]:
    """The lengths of a prepared folder, and which sequences share a step."""
    from longshore.data.source import groups_of
    from longshore.data.store import Store

    store = Store(folder)
    lengths = tuple(store.lengths.tolist())
    by_place = Lengths(folder, lengths, tuple(range(len(lengths))), (), counted="sequence")
    return by_place, groups_of(store)


def _check_complete(args: argparse.Namespace) -> None:
    """With --demo, lanes and capacity have defaults."""
    if args.demo == (args.lengths is not None):
        raise ValueError("give either a file with one length a line or --demo, a built-in sample")
    if args.tp is not None and args.gpus is None:
        raise ValueError(
            "--tp works only with --gpus; a lane of --lanes already includes its TP and PP ranks"
        )
    missing = [args.lanes, args.gpus].count(None)
    if missing == 0 or (missing == 2 and not args.demo):
        raise ValueError("give either --lanes, or --gpus with --tp and --pp")
    if args.capacity is None and not args.demo:
        raise ValueError("give --capacity, the most tokens a lane holds in a round, such as 16384")


def _axes(args: argparse.Namespace) -> Axes:
    tp, pp = args.tp or 1, args.pp
    lanes, rest = args.lanes or DEMO_LANES, 0
    if args.gpus is not None:
        lanes, rest = divmod(args.gpus, tp * pp)
    if rest:
        working = [str(count * tp * pp) for count in (lanes, lanes + 1) if count]
        raise ValueError(
            f"--gpus {args.gpus} is not a multiple of tp {tp} x pp {pp} = {tp * pp}; "
            f"--gpus {' or '.join(working)} would work"
        )
    return Axes(lanes=lanes, tp=tp, pp=pp, vpp=args.vpp, ep=args.ep)


def _profile(
    args: argparse.Namespace, cost: CostProfile | MachineProfile, *, axes: Axes, capacity: int
) -> CostProfile:
    """The whole model on one GPU."""
    if isinstance(cost, CostProfile):
        if args.model is not None:
            raise ValueError(
                "--model is for a --cost that was measured on a machine, such as "
                "h200; leave --model out"
            )
        return cost
    if args.model is None:
        raise ValueError(
            f"--cost {args.cost} is the profile of a machine ({cost.device}); say what runs on it "
            "with --model PRESET, such as --model qwen3-8b"
        )
    return model_cost(
        cost,
        preset(args.model),
        lanes=axes.lanes,
        capacity=capacity,
        shard="none" if args.sync == "step" else "zero3",
    )


def _read_cost(name: str | None) -> CostProfile | MachineProfile:
    try:
        return BUILT_IN if name is None else read_cost(name)
    except (OverflowError, RecursionError):
        raise ValueError(
            f"cost profile {name}: its numbers are too large, or it is nested too deeply"
        ) from None


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
            raise ValueError(f"{path}: cannot be written, it is a folder, or write-protected")
        taken.add(os.path.realpath(path))


def _write(path: str, write: Callable[[str], object]) -> None:
    try:
        write(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from None


def _plan_steps(steps: Seq[Lengths], setting: PlanSetting) -> list[Plan]:
    _check_longest(steps, setting)
    plans = []
    for number, step in enumerate(steps, start=1):
        _progress(f"planning {setting.policy}, step {number} of {len(steps)} …")
        plans.append(step.plan(setting))
    return plans


def _check_longest(steps: Seq[Lengths], setting: PlanSetting) -> None:
    """Plans the longest sequence of all steps, or given pack, alone: if one is refused, it is."""
    longest, most = steps[0].part([0]), 0
    for step in steps:
        alone = [(place,) for place in range(len(step.lengths))]
        for places in step.packs() if setting.planned_by.needs_packs else alone:
            if (tokens := sum(step.lengths[place] for place in places)) > most:
                longest, most = step.part(places), tokens
    longest.plan(setting)


def _compare(steps: Seq[Lengths], policy: str, setting: PlanSetting) -> list[Plan] | str:
    """Another policy's plans, or why it was refused. Only some policies take a CP size."""
    cp_size = setting.cp_size if policy_named(policy).one_cp_size else 0
    try:
        return _plan_steps(steps, replace(setting, policy=policy, cp_size=cp_size))
    except ValueError as error:
        return str(error)


def _progress(text: str) -> None:
    """One line that is written over, for people only: a log has no use for it."""
    if sys.stderr and sys.stderr.isatty():
        print("\r\x1b[K" + text, end="", file=sys.stderr, flush=True)
