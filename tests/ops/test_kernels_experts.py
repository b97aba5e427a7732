"""The kernels of experts against the reference in float64: on a GPU, or interpreted on a CPU."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from dataclasses import replace

from tests.model.exact import decoder, tokens
from tests.model.experts import KINDS, one_layer

from longshore.arch.feed_forward import MoEConfig
from longshore.batch import whole_context
from longshore.model.feed_forward import MoE
from longshore.ops import backends
from longshore.ops import experts as op
from longshore.ops import reference as twin
from longshore.ops.backends import chosen, using_kernels

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
WITHIN = 0.02 if CUDA else 1e-5
CLIPPED = MoEConfig(experts=4, top_k=2, width=4, aux_weight=0.1, limit=0.05)
NAMES = ("y", "x_TC", "weights_TK", "gate_up_E2FC", "down_ECF")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(backends, "_interpreted", lambda: not CUDA)


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that is not initialised holds NaN, that of grouped products too."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def nan(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    def grouped(a, b, *, offs):
        # Also the product of no rows, which some devices leave unwritten.
        out = product(a, b, offs=offs)
        if out.dim() == 2:
            out[int(offs[-1]) :] = float("nan")
        else:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = float("nan")
        return out

    from longshore.ops.kernels import experts as kernels

    product = kernels.grouped_mm
    monkeypatch.setattr(kernels, "grouped_mm", grouped)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **b: nan(new_empty(*a, **b)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **b: nan(empty_like(*a, **b)))


def inputs(rows, *, experts, top_k, width=24, inner=40, seed=0):
    draws = torch.Generator().manual_seed(seed)
    shapes = {
        "x_TC": (rows, width),
        "weights_TK": (rows, top_k),
        "gate_up_E2FC": (experts, 2 * inner, width),
        "down_ECF": (experts, width, inner),
    }
    given = {k: torch.randn(v, generator=draws, dtype=torch.float64) / 2 for k, v in shapes.items()}
    # The reference gets the same rounding; weights are float32 on every device.
    return {
        k: v.to(torch.float32 if k == "weights_TK" else DTYPE).double() for k, v in given.items()
    }


def kernels(ids_TK, x_TC, weights_TK, gate_up_E2FC, down_ECF):
    y_TC, counts_E = op.expert_mlp(
        x_TC.to(DEVICE, DTYPE),
        ids_TK.to(DEVICE),
        weights_TK.to(DEVICE, torch.float32),
        gate_up_E2FC=gate_up_E2FC.to(DEVICE, DTYPE),
        down_ECF=down_ECF.to(DEVICE, DTYPE),
    )
    assert chosen()["experts"] == "triton"
    assert counts_E.tolist() == [int((ids_TK == e).sum()) for e in range(len(down_ECF))]
    return y_TC.cpu().double()


def reference(ids_TK, x_TC, weights_TK, **experts):
    order, _, offsets = twin.sort_by_expert(ids_TK, len(experts["down_ECF"]))
    return twin.combine(
        twin.grouped_mlp(twin.dispatch(x_TC, order), offsets, **experts), order, weights_TK
    )


def run(function, ids_TK, given, dy_TC):
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    y_TC = function(ids_TK, **leaves)
    y_TC.backward(dy_TC)
    return dict(zip(NAMES, [y_TC.detach(), *(leaf.grad for leaf in leaves.values())], strict=True))


def some_ids(rows, experts, top_k, *, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return torch.rand(rows, experts, generator=draws).argsort(1)[:, :top_k]


def without(ids_TK, *, experts):
    """Tokens 0, 3, 6, … go to no expert; so does the last choice of token 1."""
    ids_TK = ids_TK.clone()
    ids_TK[::3] = experts
    ids_TK[1:2, -1] = experts + 1
    return ids_TK


IDS = {
    "several": (5, some_ids(17, 5, 2)),
    "one token": (4, torch.tensor([[2, 0, 3]])),
    "one choice": (3, some_ids(9, 3, 1)),
    "all to one expert": (4, torch.full((13, 1), 2)),
    "experts without rows": (9, some_ids(5, 9, 2) // 2 * 2),
    "tokens of no expert": (5, without(some_ids(20, 5, 3), experts=5)),
    "no expert has rows": (3, torch.full((7, 2), 3)),
    "an id far past the experts": (3, torch.tensor([[0, 99_999], [1, 2], [70_000, 1]])),
}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", IDS)
def test_outputs_and_gradients_equal_the_reference(case):
    experts, ids_TK = IDS[case]
    given = inputs(len(ids_TK), experts=experts, top_k=ids_TK.shape[1])
    dy_TC = torch.sin(torch.arange(given["x_TC"].numel()) + 1.0).view(given["x_TC"].shape)
    dy_TC = dy_TC.to(DTYPE).double()
    ours, theirs = (run(f, ids_TK, given, dy_TC) for f in (kernels, reference))
    for name in NAMES:
        a, b = ours[name], theirs[name]
        assert a.shape == b.shape
        assert not a.isnan().any(), name
        assert (a - b).abs().max() <= WITHIN * b.abs().max(), name
    is_none = (ids_TK >= experts).all(1)
    assert not ours["y"][is_none].any()
    assert not ours["x_TC"][is_none].any()
    assert not ours["weights_TK"][ids_TK >= experts].any()
    for expert in set(range(experts)) - set(ids_TK.flatten().tolist()):
        assert not ours["gate_up_E2FC"][expert].any()
        assert not ours["down_ECF"][expert].any()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("block", [16, 32])
def test_rows_wider_than_a_block(monkeypatch, block):
    from longshore.ops.kernels import experts as module

    for name in ("SPREAD_BLOCK", "SUM_BLOCK", "INNER_BLOCK", "CLEAR_BLOCK"):
        monkeypatch.setattr(module, name, block)
    ids_TK = some_ids(6, 4, 2) // 2 * 2
    given = inputs(6, experts=4, top_k=2)
    dy_TC = torch.ones_like(given["x_TC"])
    ours, theirs = (run(f, ids_TK, given, dy_TC) for f in (kernels, reference))
    for name in NAMES:
        off = (ours[name] - theirs[name]).abs().max()
        assert off <= WITHIN * theirs[name].abs().max(), name


@pytest.mark.usefixtures("poisoned")
def test_nan_in_rows_of_no_expert_reaches_nothing_else():
    ids_TK = without(some_ids(20, 5, 2), experts=5)
    is_none = (ids_TK >= 5).all(1)
    given = inputs(20, experts=5, top_k=2)
    dy_TC = torch.randn(20, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    clean = run(kernels, ids_TK, given, dy_TC)
    for name in ("x_TC", "weights_TK"):
        given[name][is_none] = float("nan")
    dy_TC[is_none] = float("nan")
    dirty = run(kernels, ids_TK, given, dy_TC)
    for name in NAMES:
        assert torch.equal(clean[name], dirty[name]), name


def test_only_wanted_gradients_and_any_strides():
    """As of adapters on frozen experts; gradients may be expanded, rows transposed."""
    ids_TK, given = some_ids(6, 4, 2), inputs(6, experts=4, top_k=2)
    frozen = {name: given[name] for name in ("gate_up_E2FC", "down_ECF")}
    whole = run(kernels, ids_TK, given, torch.ones(6, 24, dtype=torch.float64))
    x_TC = given["x_TC"].t().contiguous().t().clone(memory_format=torch.preserve_format)
    x_TC.requires_grad_()
    kernels(ids_TK, x_TC, given["weights_TK"], **frozen).sum().backward()
    assert torch.equal(x_TC.grad, whole["x_TC"])
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in frozen.items()}
    kernels(ids_TK, given["x_TC"], given["weights_TK"], **leaves).sum().backward()
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, whole[name])


@pytest.mark.skipif(CUDA, reason="float32 is for the interpreter")
@pytest.mark.parametrize("kind", [*KINDS, "clipped"])
def test_a_layer_equals_plain_torch(kind):
    torch.manual_seed(0)
    config: MoEConfig = CLIPPED if kind == "clipped" else KINDS[kind]
    moe = MoE(config, 12, norm=None)
    ctx = whole_context((1, 7, 12))
    ctx = replace(ctx, is_real=torch.arange(ctx.tokens) != 5)
    x_TC = torch.randn(ctx.tokens, 12)

    def layer():
        leaf = x_TC.clone().requires_grad_()
        out, routed = moe(leaf, ctx)
        ((out * out).sum() + routed.auxiliary).backward()
        grads = {name: p.grad for name, p in moe.named_parameters()}
        moe.zero_grad(set_to_none=True)
        return {"out": out.detach(), "x": leaf.grad, "counts": routed.counts, **grads}

    ours = layer()
    assert chosen()["experts"] == "triton"
    with using_kernels("plain"):
        theirs = layer()
        assert chosen()["experts"] == "torch grouped_mm"
    assert torch.equal(ours.pop("counts"), theirs.pop("counts"))
    for name, want in theirs.items():
        assert (ours[name] - want).abs().max() <= 1e-5 * want.abs().max(), name


@pytest.mark.skipif(CUDA, reason="float32 is for the interpreter")
def test_a_decoder_equals_plain_torch():
    config = one_layer(KINDS["softmax"])
    model = decoder(config)
    lengths = (1, 2, 7, 15)

    def step(dtype):
        model.to(dtype)
        ctx, ids, labels = tokens(config, lengths)
        output = model(ids, ctx, labels=labels)
        (output.values.sum() + sum(layer.auxiliary for layer in output.routed)).backward()
        grads = {name: p.grad.double() for name, p in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return {"values": output.values.detach().double(), **grads}

    exact = step(torch.float64)
    assert chosen()["experts"].startswith("plain torch (triton: float64 is left to plain torch")
    ours = step(torch.float32)
    assert chosen()["experts"] == "triton"
    for name, want in exact.items():
        assert (ours[name] - want).abs().max() <= 1e-4 * want.abs().max(), name
