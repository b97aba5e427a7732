"""Decoders in float64 and what they give, for tests that compare gradients."""

import torch

from longshore.batch import whole_context
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder

LENGTHS = (1, 2, 7, 33, 1, 90)


def decoder(config, **parts):
    """Initialised in float64, with biases and norms that are not all alike."""
    model = Decoder(config, **parts).double()
    init_decoder(model, seed=3)
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(len(parameter), generator=draws)
            else:
                parameter *= 8  # scores far from uniform
    return model


def tokens(config, lengths=LENGTHS):
    """The context, ids and labels; the last label of each sequence is missing."""
    ctx = whole_context(lengths)
    draws = torch.Generator().manual_seed(7)
    ids = torch.randint(config.vocab_size, (ctx.tokens,), generator=draws)
    labels = torch.randint(config.vocab_size, (ctx.tokens,), generator=draws)
    labels[torch.tensor(ctx.packs[0].real.offsets[1:]) - 1] = -100
    return ctx, ids, labels


def cut(tensor, lengths=LENGTHS):
    return tensor.split(list(lengths))


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_close(got, want):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e-9 * want.abs().max()


def assert_all_close(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert want[name].abs().max() > 0, f"{name} has no gradient to compare"
        assert (got[name] - want[name]).abs().max() <= 1e-9 * want[name].abs().max(), name
