"""Cross entropy with label smoothing and z-loss.

In: statistics of each token. Out: a value for each token. With label_smoothing ε and z_loss z

    (1 − ε)·nll + ε·(logsumexp − mean_logit) + z·logsumexp²

The second term is the mean over the vocabulary of −log p, as in torch's cross_entropy. Logits 0 and
log 3 with label 1, ε = 0.1 and z = 0: 0.9·0.288 + 0.1·(1.386 − 0.549) = 0.343.
"""

from torch import Tensor


def smoothed_cross_entropy(
    nll: Tensor,
    logsumexp: Tensor,
    mean_logit: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    smooth = logsumexp - mean_logit
    return nll + label_smoothing * (smooth - nll) + z_loss * logsumexp.square()
