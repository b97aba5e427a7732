"""CUDA graphs: gradients of replayed layers are those of eager ones, on all lanes, and in runs.

Gradients of several steps are computed from the same weights, so that a replay which reads old
inputs, old boundaries or old gradients shows at its full size; in the losses of a training run it
may hide behind what bf16 rounds. Three such faults are planted, and each must be seen.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.gpu.test_train import SMALL, finished, start
from tests.ranks.harness import run_ranks

from longshore.config.load import load_config
from longshore.distributed.process_group import Ranks
from longshore.parallel.fsdp import local_part
from longshore.run.parts import Parts, build_parts, joined_ranks, make_job
from longshore.train import cuda_graph as graph_piece
from longshore.train.cuda_graph import CudaRecorder, GraphShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NAMES = ["tiny-llama", "tiny-nemotron-h", "tiny-qwen3-next"]
LONG = (
    "data.mock={mode='distribution', type='lognormal', min_seq_len=1, max_seq_len=1024, "
    "mean_seq_len=200, lognormal_sigma=1.2}"
)
"""Some sequences exceed the capacity of 512: two lanes share them, with CP size 2."""
FORMS: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"plain": (), "recomputed": ("train.recompute=blocks",), "zero3": ("parallel.shard=zero3",)},
    2: {"plain": (LONG,), "zero3": (LONG, "parallel.shard=zero3")},
}
STEPS = 4
"""Of each shape the first micro-batch runs eagerly and the second records: most replay."""
WITHIN = {"tiny-llama": 1e-3, "tiny-nemotron-h": 1e-3, "tiny-qwen3-next": 1e-2}
"""Of a gradient's norm, besides what eager layers differ from themselves in this run: some kernels
add up in an order of their own every time. Graphs launch the same kernels. On 2 lanes gradients of
tiny-qwen3-next take one of a few values, up to 3.4e-3 apart, and one repetition may miss that."""


def words_of(name: str, *more: str) -> list[str]:
    replaced = {word.partition("=")[0] for word in more}
    words = [word for word in SMALL if word.partition("=")[0] not in replaced]
    return [*words, f"model.preset={name}", "data.count=2048", "plan.buckets=2", *more]


def graphs_of(name: str) -> tuple[str, str]:
    """What turns graphs on. The tiny delta net is plain torch, which is not replayed."""
    layers = "['all']" if name != "tiny-qwen3-next" else "['attention']"
    return f"graph.layers={layers}", "graph.max_sequences=5"


@contextmanager
def building(words: list[str], ranks: Ranks) -> Iterator[Parts]:
    """The parts of a run, built as `longshore train` builds them."""
    config = load_config(None, words)
    with joined_ranks(config, ranks, attempt=0, signals=False) as (topology, stop):
        job = make_job(config, topology, stop=stop, local_size=ranks.local_size, display="none")
        parts = build_parts(job, Path(ranks.rendezvous.removeprefix("file://")).parent)
        yield parts
        parts.close()


class Outcome(NamedTuple):
    """What a rank saw of a few steps."""

    gradients: list[dict[str, torch.Tensor]]
    """This rank's part of every gradient, of each step."""
    again: list[dict[str, torch.Tensor]]
    """The same, computed once more."""
    runs: list[int]
    """Layers replayed whole, by halves, and run eagerly."""
    cp_sizes: set[int]


def outcome(words: list[str], ranks: Ranks, plant: str = "none") -> Outcome:
    gradients, again, cp_sizes = [], [], set()
    with PLANTS[plant](), building(words, ranks) as parts:
        stepper = parts.stepper
        for step, _ in zip(parts.loader, range(STEPS), strict=False):
            divisor = step.batches[0].counts.main
            for calls in (gradients, again):
                stepper.gradients(step.batches, divisor, plan=step.plan)
                named = stepper.model.named_parameters()
                calls.append({name: local_part(p.grad).cpu().clone() for name, p in named})
                stepper.model.zero_grad()
            cp_sizes |= {pack.cp_size for _, pack in step.plan.packs()}
        runs = stepper.graphs.take_runs() if stepper.graphs else []
    return Outcome(gradients, again, runs, cp_sizes)


def worst(ones: list[dict[str, torch.Tensor]], others: list[dict[str, torch.Tensor]]) -> float:
    """The largest difference of a gradient, by its norm."""
    return max(
        float((one[name] - other[name]).norm() / one[name].norm().clamp(min=1e-12))
        for one, other in zip(ones, others, strict=True)
        for name in one
    )


def compared(name: str, forms: dict[str, tuple[str, ...]], plants: list[str], folder: str):
    """On a rank: for each form and fault, how far gradients of graphs are from eager ones, and how
    far these are from themselves."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()  # the harness's: a run makes its own
    results = {}
    for form, more in forms.items():
        stores = (f"{folder}/{form}-{number}" for number in range(1 + len(plants)))
        places = (Ranks(rank, size, rank, size, f"file://{store}") for store in stores)
        eager = outcome(words_of(name, *more), next(places))
        for plant in plants:
            graphed = outcome(words_of(name, *more, *graphs_of(name)), next(places), plant)
            pairs = (graphed.gradients, graphed.again, eager.again)
            *errors, noise = (worst(eager.gradients, other) for other in pairs)
            results[form, plant] = max(errors), noise, graphed.runs, graphed.cp_sizes
    return results


def stale_boundaries() -> AbstractContextManager[object]:
    """Boundaries and rotary tables of the micro-batch that recorded, for all."""
    load = GraphShape.load

    def load_once(shape, ctx, tables):
        if not shape.pieces:
            load(shape, ctx, tables)

    return patch.object(GraphShape, "load", load_once)


def stale_inputs() -> AbstractContextManager[object]:
    return patch.object(graph_piece, "_copy_moved", lambda fixed, coming: None)


def skipped_replays() -> AbstractContextManager[object]:
    record = CudaRecorder.record

    def record_only(recorder, run):
        replay, outputs = record(recorder, run)
        calls = iter(range(1_000_000))
        return (lambda: None if next(calls) % 3 == 2 else replay()), outputs

    return patch.object(CudaRecorder, "record", record_only)


PLANTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": nullcontext,
    "stale boundaries": stale_boundaries,
    "stale inputs": stale_inputs,
    "skipped replays": skipped_replays,
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_eager_layers(name: str, ranks: int, tmp_path: Path) -> None:
    """With 2 lanes also where they share a pack, whose layers are replayed by halves."""
    results = run_ranks(ranks, compared, name, FORMS[ranks], ["none"], str(tmp_path), timeout=300)
    for each in results:
        for (form, _), (error, noise, (whole, halves, _), cp_sizes) in each.items():
            assert error < WITHIN[name] + 4 * noise, f"{form}: {error:.1e}, eager {noise:.1e}"
            assert noise < 1e-2, f"{form}: eager {noise:.1e}"
            assert whole > 0, form
            assert ranks in cp_sizes, f"{form}: CP sizes {cp_sizes}"
            assert ranks == 1 or halves > 0, form


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3-next"])
def test_a_bad_replay_is_seen(name: str, tmp_path: Path) -> None:
    plants = [plant for plant in PLANTS if plant != "none"]
    forms = {"plain": FORMS[1]["plain"]}
    (results,) = run_ranks(1, compared, name, forms, plants, str(tmp_path), timeout=300)
    for (_, plant), (error, noise, _, _) in results.items():
        limit = 10 * (WITHIN[name] + 4 * noise)
        assert not error < limit, f"{plant}: {error:.1e}, eager {noise:.1e}"


RUNS: dict[str, tuple[str, ...]] = {
    "one rank": ("--ranks", "1"),
    "2 lanes": ("--ranks", "2", LONG),
}


@pytest.mark.parametrize("name", NAMES)
def test_runs_follow_eager_ones(name: str, tmp_path: Path) -> None:
    """All runs at once: most of their time is the start."""
    runs = {}
    for way, more in RUNS.items():
        words = words_of(name, "train.steps=30", *(word for word in more if "=" in word))
        launch = [word for word in more if "=" not in word]
        runs[way] = start(tmp_path / way, *words, *graphs_of(name), *launch)
        runs[f"{way}, eager"] = start(tmp_path / f"{way}, eager", *words, *launch)
    losses = {way: finished(process, tmp_path / way) for way, process in runs.items()}
    for way in RUNS:
        pairs = zip(losses[way], losses[f"{way}, eager"], strict=True)
        assert max(abs(a - b) / b for a, b in pairs) < 0.01, way
        lines = (tmp_path / way / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        assert sum(step["graphed"]["whole"] for step in steps) > 0, way
        assert way == "one rank" or sum(step["graphed"]["halves"] for step in steps) > 0
        assert steps[-1]["graph_gib"] > 0, f"{way}: nothing was recorded"
