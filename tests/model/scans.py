"""Checks that Mamba2 and gated delta net share."""

from itertools import pairwise

import torch
from tests.model.exact import assert_close

from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.part import Norm
from longshore.batch import whole_context
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder
from longshore.model.registry import make_mixer

LENGTHS = (1, 2, 7, 3, 33, 1, 150)


def outcome(made, forward, x_TC):
    """Outputs, and the gradients of the input and of every parameter."""
    inputs = x_TC.clone().requires_grad_()
    out_TC = forward(inputs)
    made.zero_grad()
    weight_TC = torch.sin(torch.arange(out_TC.numel(), dtype=torch.float64)).view(out_TC.shape)
    (out_TC * weight_TC).sum().backward()
    parameters = {name: parameter.grad for name, parameter in made.named_parameters()}
    return {"out": out_TC.detach(), "x": inputs.grad, **parameters}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for value in want.values():
        assert value.abs().max() > 0
    for name in want:
        assert_close(got[name], want[name])


def as_written_out(made, written_out, width, lengths):
    torch.manual_seed(2)
    x_TC = torch.randn(sum(lengths), width, dtype=torch.float64)
    ctx = whole_context(lengths)
    got = outcome(made, lambda x: made(x, ctx, {}), x_TC)

    def alone(x_TC):
        return torch.cat([written_out(made, part) for part in x_TC.split(lengths)])

    assert_same(got, outcome(made, alone, x_TC))


def packed_as_one_at_a_time(made, width):
    def alone(x_TC):
        parts = x_TC.split(LENGTHS)
        return torch.cat([made(part, whole_context((len(part),)), {}) for part in parts])

    torch.manual_seed(2)
    x_TC = torch.randn(sum(LENGTHS), width, dtype=torch.float64)
    ctx = whole_context(LENGTHS)
    assert_same(outcome(made, lambda x: made(x, ctx, {}), x_TC), outcome(made, alone, x_TC))


def nothing_leaks(made, width):
    """Bit by bit, no output depends on another sequence or on a later token."""
    torch.manual_seed(2)
    x_TC = torch.randn(sum(LENGTHS), width, dtype=torch.float64)
    ctx = whole_context(LENGTHS)
    before = made(x_TC, ctx, {})
    for start, stop in pairwise(ctx.packs[0].padded.offsets):
        for row in {start, (start + stop) // 2, stop - 1}:
            changed = x_TC.clone()
            changed[row] += 1.0
            differs = (made(changed, ctx, {}) != before).any(dim=1).nonzero().flatten().tolist()
            assert differs[0] == row
            assert differs[-1] < stop


def parameters_as_counted(config, made, width):
    assert config.parameters(width) == sum(p.numel() for p in made.parameters())


def begins_as_it_should(config, others):
    """A from 1 to 16, steps from 0.001 to 0.1, and the other numbers of each head."""
    decoder = DecoderConfig(vocab_size=3, width=8, layers=(LayerConfig(config, None),))
    model = Decoder(decoder)
    init_decoder(model, seed=0)
    mixer = model.layers["0"].mixer
    rates = mixer.per_head.A_log.exp()
    steps = torch.nn.functional.softplus(mixer.per_head.dt_bias)
    assert 1 < rates.min() < rates.max() < 16
    assert 0.001 <= steps.min() < steps.max() <= 0.1
    assert torch.unique(steps).numel() == len(steps)
    for name, value in others.items():
        assert (getattr(mixer.per_head, name) == value).all()
    assert (mixer.norm.weight == 1).all()
    assert 0.2 < mixer.conv1d.weight.std() < 0.4


def bfloat16_is_near(config, width):
    """With all but the numbers of each head in bfloat16, as FSDP casts them; and gradients."""
    torch.manual_seed(3)
    made = make_mixer(config, width, norm=Norm(1e-5))
    x_TC, ctx = torch.randn(40, width), whole_context((3, 37))
    want = made(x_TC, ctx, {})
    _cast(made)
    got = made(x_TC.to(torch.bfloat16), ctx, {})
    got.sum().backward()
    assert got.dtype == torch.bfloat16
    assert all(parameter.grad is not None for parameter in made.parameters())
    assert {p.dtype for p in made.per_head(torch.zeros(1))} == {torch.float32}
    assert (got - want).abs().max() <= 0.05 * want.abs().max()


def _cast(made):
    """To bfloat16, all but the numbers of each head."""
    for name, part in made.named_children():
        if name != "per_head":
            part.to(torch.bfloat16)


def keeps_what_it_says(config, width):
    """What autograd keeps of many tokens in bfloat16, within a hundredth of the estimate.

    On the meta device, where nothing is computed: not every CPU multiplies bfloat16.
    """
    with torch.device("meta"):
        made = make_mixer(config, width, norm=Norm(1e-5))
        x_TC = torch.empty(1024, width, dtype=torch.bfloat16, requires_grad=True)
    _cast(made)
    # Held here: a storage that is let go may leave its identity to another.
    known = [tensor.untyped_storage() for tensor in (x_TC, *made.parameters())]
    identities = {storage._cdata for storage in known}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in identities:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out_TC = made(x_TC, whole_context((len(x_TC),)), {})
    measured = sum(storage.nbytes() for storage in kept.values()) / len(out_TC)
    saved = config.saved(width)
    assert abs(2 * saved.values + 4 * saved.stats - measured) <= 0.01 * measured
