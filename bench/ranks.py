"""Runs a benchmark on several local gloo ranks.

In: a function without arguments, at the top of a module. Out: what it returns on rank 0.
"""

import multiprocessing
import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def on_ranks(ranks: int, function: Callable[[], T]) -> T:
    """What the function returns on rank 0 of this many gloo ranks."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/store"
        processes = [
            context.Process(target=_rank, args=(rank, ranks, path, function, answers), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                raise SystemExit("a rank failed")
    answer: T = answers.get()
    return answer


def _rank(rank: int, ranks: int, path: str, function: Callable[[], object], answers: Any) -> None:  # noqa: ANN401
    torch.set_num_threads(1)
    store = dist.FileStore(path, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    result = function()
    if rank == 0:
        answers.put(result)
    dist.barrier()
    dist.destroy_process_group()
