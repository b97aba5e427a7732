"""Which compressed entries a query attends to, by the scores of a small indexer, and its loss.

In: the indexer's queries (T, H, D), a weight for each (T, H), keys of entries (E, D). The score of
an entry is Σ over heads of weight · relu(query · key). Out: the best entries of each query, rising,
ties to the lower index; and the divergence of the scores from the attention's mass.
"""

import torch
from torch import Tensor

from longshore.ops.reference import indexer as reference
from longshore.ops.row_ranges import RowRanges


def choose(
    q_THD: Tensor, weights_TH: Tensor, keys_ED: Tensor, *, ranges: RowRanges, top_k: int
) -> Tensor:
    """int32 (T, K), absolute, rising, then −1; K = min(top_k, the largest count). No autograd."""
    with torch.no_grad():
        return reference.choose(q_THD, weights_TH, keys_ED, ranges=ranges, top_k=top_k)


def index_loss(
    q_THD: Tensor,
    weights_TH: Tensor,
    keys_ED: Tensor,
    chosen_TK: Tensor,
    mass_TK: Tensor,
    counted_T: Tensor,
) -> Tensor:
    """Σ over counted rows of KL(mass over the chosen ‖ softmax of the scores over the chosen).

    0-dim, in float32 at least. A row without chosen entries, or with a mass of 0, gives 0.
    """
    return reference.index_loss(q_THD, weights_TH, keys_ED, chosen_TK, mass_TK, counted_T)
