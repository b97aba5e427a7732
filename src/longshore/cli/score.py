"""`longshore score`: the log-probabilities of a data set's tokens under a model.

In: the options of SCORE_HELP. Out: a prepared folder, or a Parquet file, with the new field.
`longshore score pairs --model base --out scored` gives a data set for `train.loss=dpo`.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from longshore.cli.environment import lossy_output, working_folder_last
from longshore.cli.launch import ranks_of_run
from longshore.cli.options import add_command, count, number, say
from longshore.cli.train import MOST_RANKS, run_on_ranks
from longshore.config.check import check_config
from longshore.config.load import load_config
from longshore.config.schema import RunConfig, in_keys
from longshore.data.source import Field, parse_field
from longshore.data.store import MANIFEST, read_manifest
from longshore.distributed.process_group import Ranks, ranks_from_environment

SCORE_HELP = """\
Computes the log-probability of every token of a data set under a model, packed and planned as in
training, and writes it beside the tokens: as reference of DPO or of a KL term, or as the old
log-probabilities of a policy.

  DATA                 JSONL, JSON, Parquet or Arrow, or a folder of them, of `datasets` or of
                       `longshore prepare`
  --model M            a Hugging Face checkpoint folder, or the name of a preset
  --out PATH           a folder for `data.path`, or a file that ends in .parquet
  --field NAME         the name of the new field (default: ref_logprobs)
  --temperature X      divide logits by this, as when the tokens were sampled (default: 1)
  --ranks N            processes on this machine (default: one for each GPU)
  section.key=value    any key of a recipe, such as plan.capacity=8192 or data.batch=512, the
                       sequences that are planned together (default: 256)

examples:
  longshore score prepared --model Qwen3-0.6B --out scored
  longshore score rollouts.jsonl --model Qwen3-0.6B --out scored --field old_logprobs --ranks 8
  torchrun --nproc-per-node 8 -m longshore.cli.main score prepared --model M --out scored"""
BATCH = 256


def register_score(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = add_command(
        commands,
        "score",
        summary="write the log-probabilities of a data set's tokens beside them",
        usage="longshore score DATA --model M --out PATH [options] [section.key=value …]",
        text=SCORE_HELP,
        options={
            "model out field": str,
            "ranks": count(MOST_RANKS),
            "temperature": number(lambda x: 0 < x < 1e9, "a number above 0, such as 0.7"),
        },
        required=["model", "out"],
        run=run_score,
        field="ref_logprobs",
        temperature=1.0,
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)


def run_score(args: argparse.Namespace) -> None:
    working_folder_last()
    place = ranks_from_environment()
    try:
        config = _config(args, place)
        _check_field(args.field, config)
        if place is None or place.rank == 0:
            _check_out(args.out)
    except ValueError:
        if place is not None and place.local_rank:
            raise SystemExit(2) from None  # the first rank of each machine prints it
        raise
    work = partial(score_rank, out=args.out, field=args.field, temperature=args.temperature)
    with lossy_output():
        run_on_ranks(config, place, work)
    if place is None or place.rank == 0:
        say(f"{args.out}: {config.data.path} with the field {args.field}")


def score_rank(
    config: RunConfig, ranks: Ranks, *, out: str, field: str, temperature: float
) -> None:
    """One rank's part. It imports torch, so it is imported only where it runs."""
    from longshore.run.score import ScoreTask, score

    score(config, ranks, ScoreTask(out, field, temperature))


def _config(args: argparse.Namespace, place: Ranks | None) -> RunConfig:
    data = [word for word in args.words if "=" not in word]
    if len(data) != 1:
        raise ValueError(
            f"score takes one data set, but got {' '.join(data) or 'none'}; write "
            "longshore score DATA --model M --out PATH"
        )
    overrides = [word for word in args.words if "=" in word]
    kind = "from_hf" if Path(args.model).is_dir() or "/" in args.model else "preset"
    given = [f"data.path={data[0]}", f"model.{kind}={args.model}", "train.epochs=1"]
    if not any(word.partition("=")[0] in ("data.batch", "data.batch_tokens") for word in overrides):
        given.append(f"data.batch={BATCH}")
    config = load_config(None, [*given, *overrides])
    if config.data.stream or config.data.weights:
        raise ValueError("score takes each sequence once; leave data.stream and data.weights out")
    ranks = ranks_of_run(args.ranks, config, place)
    check_config(config, ranks)
    return config.with_ranks(ranks)


def _check_field(name: str, config: RunConfig) -> None:
    """Refuses a name that is none, or that the data already have."""
    with in_keys("--field"):
        Field(name, "target", "float32")
    known = {parse_field(text).name for text in config.data.fields}
    folder = Path(str(config.data.path))
    if (folder / MANIFEST).exists():
        known |= {field.name for field in read_manifest(folder).fields}
    if name in known:
        raise ValueError(
            f"--field {name}: {config.data.path} already has a field of this name; choose another"
        )


def _check_out(out: str) -> None:
    """Refuses a place where something is, before the ranks start."""
    path = Path(out)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ValueError(f"--out: {out} exists already; choose another place, or delete it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out: {path.parent} cannot be made ({error.strerror})") from None
