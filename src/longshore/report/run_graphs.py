"""How CUDA graphs served a run's layers: the share of each way, over steps and in all.

In: a run's metrics, with graphed_whole, graphed_halves and graphed_eager for each step. Out: shares
for drawing, or None for a run without graphs. Steps of 6, 2, 0 and of 8, 0, 0 layers:

    {"whole": 0.875, "halves": 0.125, "eager": 0, …}
"""

import math
from collections.abc import Mapping

import numpy as np

from longshore.report.run_curves import MOST_POINTS, Floats, Json, curve, edges, rounded
from longshore.report.run_files import GRAPHED


def graphs_data(metrics: Mapping[str, Floats], *, most: int = MOST_POINTS) -> Json | None:
    """Shares in all and as curves, the layers that ran and the graphs' memory."""
    counts = np.stack([metrics[f"graphed_{way}"] for way in GRAPHED])
    known = np.isfinite(counts).all(axis=0) & (counts.sum(axis=0) > 0)
    if not known.any():
        return None
    counts, steps = counts[:, known], metrics["step"][known].astype(np.int64)
    shares, at = counts / counts.sum(axis=0), edges(len(steps), most=most)
    in_all = rounded(counts.sum(axis=1) / counts.sum(), 4)
    memory = metrics["graph_gib"][np.isfinite(metrics["graph_gib"])]
    return {
        **dict(zip(GRAPHED, in_all, strict=True)),
        "layers": int(counts.sum()),
        "memory_gib": rounded([float(memory.max()) if len(memory) else math.nan])[0],
        "step": steps[at[1:] - 1].tolist(),
        "curves": {way: curve(shares[row], at) for row, way in enumerate(GRAPHED)},
    }


def graphs_text(graphs: Json) -> str:
    """One line for people."""
    memory = graphs["memory_gib"]
    return (
        f"CUDA graphs: layers ran {graphs['whole']:.1%} whole, "
        f"{graphs['halves']:.1%} by halves, {graphs['eager']:.1%} eagerly"
        + ("" if memory is None else f"; {memory:.3g} GiB")
    )
