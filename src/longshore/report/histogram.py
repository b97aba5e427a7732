"""Lengths in classes that grow by a fixed factor, for an axis that is even in the logarithm.

In: lengths. Out: edges, and the sequences and tokens between each edge and the next. The lengths 1,
2, 3, 3 make the classes 1, 2 and 3 with the counts 1, 1, 2 and the tokens 1, 2, 6.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
MOST_CLASSES = 24


@dataclass(frozen=True, slots=True)
class Histogram:
    """Class i holds the lengths from edges[i] to edges[i + 1] − 1."""

    edges: list[int]
    counts: list[int]
    tokens: list[int]


def length_histogram(lengths: Ints) -> Histogram:
    """Up to 24 classes; a narrow range of lengths gets finer ones."""
    edges = class_edges(int(lengths.min()), int(lengths.max()))
    place = np.searchsorted(edges, lengths, side="right") - 1
    classes = len(edges) - 1
    counts = np.bincount(place, minlength=classes)
    tokens = np.zeros(classes, dtype=np.int64)
    np.add.at(tokens, place, lengths)
    return Histogram(edges.tolist(), counts.tolist(), tokens.tolist())


def class_edges(low: int, high: int) -> Ints:
    """Edges 2^(i/n) around low … high, n the largest of 8, 4, 2, 1 with few enough classes."""
    for per_octave in (8, 4, 2, 1):
        first = math.floor(math.log2(low) * per_octave)
        last = math.floor(math.log2(high) * per_octave) + 1
        if last - first <= MOST_CLASSES or per_octave == 1:
            break
    powers = np.exp2(np.arange(first, last + 1) / per_octave)
    edges: Ints = np.unique(np.ceil(powers - 1e-9).astype(np.int64))
    return edges
