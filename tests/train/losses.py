"""Losses of a user: weighted fine-tuning, as a recipe would name it."""


def weighted(nll, batch):
    return nll * batch.token_fields["weight"].to(nll.dtype)


def weight(batch):
    return (batch.token_fields["weight"] * batch.targets.loss_mask).sum()


def mean_of_batch(nll, batch):
    return nll.mean()
