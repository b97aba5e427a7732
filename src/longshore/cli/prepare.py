"""`longshore prepare`: from files of samples to a folder of sequences.

In: the options of PREPARE_HELP. Out: a store, and a summary of what is in it and what was rejected.
"""

import argparse
import os
import sys
from typing import Any

from longshore.cli.options import add_command, count, number, one_of, say
from longshore.settings import LossOn, TooLong, names_of

PREPARE_HELP = """\
Tokenizes files of samples, in parallel, into a folder that training and `longshore plan` read.
A sample is a line of JSONL, a record of a JSON list or a row of Parquet or Arrow: a chat under
`messages` (role and content, tool calls too) or `conversations` (from and value), `prompt` and
`completion`, Alpaca's `instruction`, `input` and `output`, a plain `text`, or `input_ids`.
If the command is killed, give it again: it resumes where it stopped. Bad samples go to
rejected.jsonl with their line and the reason; if there are too many, the command fails, but what
it has prepared is kept.

  INPUT …            JSONL, JSON, Parquet or Arrow files, globs, folders of files, or folders that
                     datasets' save_to_disk made; JSON may be compressed, as .gz or .zst
  --tokenizer DIR    a Hugging Face tokenizer folder: tokenizer.json, tokenizer_config.json;
                     rows of input_ids need none
  --out DIR          the folder to make
  --template T       the chat template. auto (default): the tokenizer's, or Longshore's for its
                     family if the tokenizer's rewrites earlier turns; own: always the
                     tokenizer's; the name of a family (qwen3, llama_3, …); or a file
  --loss-on WHAT     tokens in the loss; assistant: what the assistant says (default); all: all
  --max-length N     longest sequence in tokens (default: no limit)
  --too-long DO      reject (default) or truncate longer sequences
  --field F          an extra field, as name:per_token:float32 or name:per_sequence:int64;
                     repeat it for more. Other columns must be named with --ignore
  --ignore NAMES     columns to leave out, as id,source; '*' for all that are not used
  --max-bytes N      reject samples of more bytes without parsing them (default: 16777216)
  --max-rejected X   fail if a larger share of the samples is rejected (default: 0.05)
  --workers W        processes (default: one for each core)
  --start-over       delete what an earlier command with other settings wrote into --out

Errors name options by their keys in a recipe: --max-length is data.max_length.

examples:
  longshore prepare chats.jsonl --tokenizer my-tokenizer --out prepared
  longshore prepare rollouts.jsonl --field advantages:per_target:float32 --out prepared"""


def register_prepare(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = add_command(
        commands,
        "prepare",
        summary="tokenize chats or texts into a folder for training",
        usage="longshore prepare INPUT … [--tokenizer DIR] --out DIR [options]",
        text=PREPARE_HELP,
        options={
            "tokenizer out template": str,
            "loss-on": one_of(names_of(LossOn)),
            "too-long": one_of(names_of(TooLong)),
            "max-length max-bytes": count(1 << 40),
            "workers": count(1 << 12),
            "field ignore": list,
            "start-over": bool,
            "max-rejected": number(lambda x: 0 <= x <= 1, "a number from 0 to 1, such as 0.05"),
        },
        required=["out"],
        run=run_prepare,
        loss_on="assistant",
        too_long="reject",
        workers=os.cpu_count(),
    )
    parser.add_argument("inputs", nargs="+", help=argparse.SUPPRESS)


def run_prepare(args: argparse.Namespace) -> None:
    from longshore.config.schema import split_list
    from longshore.data.inputs import MAX_BYTES
    from longshore.data.prepare import prepare, show_progress
    from longshore.data.rejected import MAX_REJECTED
    from longshore.data.source import parse_field

    fields = [parse_field(text) for names in args.field or () for text in split_list(names)]
    try:
        with show_progress(sys.stderr) as progress:
            summary = prepare(
                args.inputs,
                args.tokenizer,
                args.out,
                workers=args.workers,
                template=args.template,
                loss_on=args.loss_on,
                max_length=args.max_length,
                too_long=args.too_long,
                fields=fields,
                ignore=[name for names in args.ignore or () for name in split_list(names)],
                max_bytes=args.max_bytes or MAX_BYTES,
                start_over=args.start_over,
                progress=progress,
            )
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    say(summary.explain())
    summary.rejections.check(MAX_REJECTED if args.max_rejected is None else args.max_rejected)
