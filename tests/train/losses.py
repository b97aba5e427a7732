"""Losses of a user: weighted fine-tuning, as a recipe would name it."""


def weighted(nll, batch):
    return nll * batch.token_fields["weight"].to(nll.dtype)


def divided(nll, batch):
    """The same, and 0 / 0 where no loss counts."""
    weight = batch.token_fields["weight"].to(nll.dtype)
    return nll / (1 / weight).where(batch.targets.loss_mask, 0.0)


def weight(batch):
    return (batch.token_fields["weight"] * batch.targets.loss_mask).sum()


def nothing_returned(nll, batch):
    nll * 2


def mean_of_batch(nll, batch):
    return nll.mean()


def not_finite(batch):
    """1 / 0 where no loss counts, times the mask."""
    return (1.0 / batch.targets.loss_mask * batch.targets.loss_mask).sum()


def entropy_weighted(nll, entropy):
    return nll * entropy


def entropy_by_logits(hidden, head, batch):
    """The same, from logits that exist by chunks."""

    def value(logits, labels):
        logp = logits.log_softmax(-1)
        nll = -logp.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        return nll * -(logp.exp() * logp).sum(-1)

    assert hidden.shape[0] == len(batch.targets.labels)
    return head.map_logits(value, batch.targets.labels)


def unknown_parameter(nll, reward):
    return nll * reward


def of_sequences_and_tokens(sequences, nll):
    return nll


def of_sequences(sequences, power=2):
    return (sequences.logprobs / sequences.tokens) ** power


def mean_of_sequences(sequences):
    return sequences.logprobs.mean()


def detached(nll):
    return nll.detach()


def whole_numbers(nll):
    return (nll > 1).long()


def detached_head(head, batch):
    return head.map_logits(lambda logits: logits.sum(1)).detach()


def detached_sequences(sequences):
    return sequences.logprobs.detach()


def constant_without_tokens(nll, batch):
    """Reads nothing where a lane has no token."""
    return nll * 2 if batch.targets.loss_mask.any() else batch.ctx.positions * 0.0


def with_metrics(nll, entropy):
    likely = (nll < 4).double()
    return nll, {"entropy": entropy, "nll_where_likely": (nll * likely, likely)}


with_metrics.metrics = ("nll_where_likely", "entropy")
