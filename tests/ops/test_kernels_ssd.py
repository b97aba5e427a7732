"""The scan's kernels against the twin in float64: on CUDA, or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from dataclasses import replace
from itertools import accumulate

from longshore.arch.part import Norm
from longshore.arch.scan import Mamba2Config
from longshore.batch import Boundaries, whole_context
from longshore.model.recurrent import Mamba2
from longshore.ops import backends
from longshore.ops import reference as twin
from longshore.ops import ssd as op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("x_THP", "dt_TH", "A_H", "B_TGN", "C_TGN", "D_H", "initial")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(backends, "_interpreted", lambda: DEVICE == "cpu")
    with backends.using_kernels("auto"):
        yield


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory that no kernel wrote is NaN."""
    for name in ("empty", "empty_like"):
        allocate = getattr(torch, name)

        def filled(*args, _allocate=allocate, **settings):
            tensor = _allocate(*args, **settings)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        monkeypatch.setattr(torch, name, filled)


def bounds_of(lengths):
    offsets = tuple(accumulate(lengths, initial=0))
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    return Boundaries(offsets, cu_seqlens, max(lengths))


def inputs(lengths, *, heads=4, groups=2, width=8, state=16, dtype=torch.float32):
    """x, B and C are parts of one tensor, as after a convolution."""
    make = torch.Generator().manual_seed(0)
    rows, sizes = sum(lengths), [heads * width, groups * state, groups * state]

    def normal(*shape):
        return torch.randn(shape, generator=make)

    x, B, C = (0.5 * normal(rows, sum(sizes))).to(DEVICE, dtype).split(sizes, dim=1)
    values = (
        x.unflatten(1, (heads, width)),
        torch.nn.functional.softplus(normal(rows, heads) - 1).to(DEVICE),
        -normal(heads).exp().to(DEVICE),
        B.unflatten(1, (groups, state)),
        C.unflatten(1, (groups, state)),
        normal(heads).to(DEVICE),
        normal(len(lengths), heads, width, state).to(DEVICE),
    )
    return dict(zip(NAMES, values, strict=True))


def run(function, given, **settings):
    """The outputs, then the gradient of each tensor given, for random gradients of outputs."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in given.items()}
    outs = function(**leaves, **settings)
    make = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=make).to(out) for out in outs]
    torch.autograd.backward(outs, grads)
    results = dict(zip(("y", "final"), (out.detach() for out in outs), strict=False))
    return results | {name: leaf.grad for name, leaf in leaves.items()}


def in_float64(given):
    return {name: tensor.double() for name, tensor in given.items()}


def assert_same(results, wanted, *, within=2e-5):
    assert results.keys() == wanted.keys()
    for name, want in wanted.items():
        result = results[name]
        if want is None:
            assert result is None or not result.any(), name
            continue
        assert result.shape == want.shape, name
        if want.numel():
            error = (result.double() - want).abs().max() / want.abs().max().clamp_min(1e-30)
            assert error <= within, f"{name}: {error:.1e}"


def test_tables_of_a_fixed_size():
    """As CUDA graphs want them: empty sequences at the end, and chunks without rows."""
    lengths = (3, 70, 1, 0, 0)
    given = {name: x for name, x in inputs(lengths).items() if name != "initial"}
    fixed = replace(bounds_of(lengths), fixed=True)
    results = run(op.ssd, given, bounds=fixed)
    (table,) = fixed.tables.values()
    assert len(table.chunks) == 74 // 64 + 5
    assert_same(results, run(op.ssd, given, bounds=bounds_of(lengths)), within=0.0)


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ((1, 5, 64, 65, 130), {}),
        ((0, 3, 0, 0, 70, 0), {"width": 20, "state": 24}),
        ((2, 9), {"groups": 1, "heads": 3}),
        ((40,), {"groups": 4, "width": 16, "state": 5}),
    ],
)
@pytest.mark.parametrize("left_out", [(), ("initial",), ("D_H", "initial")])
def test_equals_its_twin(lengths, sizes, left_out):
    given = {name: x for name, x in inputs(lengths, **sizes).items() if name not in left_out}
    bounds = bounds_of(lengths)
    results = run(op.ssd, given, bounds=bounds)
    assert backends.chosen()["ssd"] == "triton"
    assert list(bounds.tables) == ["ssd chunks of 64"]
    assert results["y"].dtype == results["final"].dtype == torch.float32
    assert_same(results, run(twin.ssd, in_float64(given), bounds=bounds))


def test_a_walk_is_split_where_there_are_few():
    given = inputs((70,), heads=2, groups=1, width=48)
    assert_same(run(op.ssd, given), run(twin.ssd, in_float64(given)))


def test_no_rows_at_all():
    results = run(op.ssd, inputs((0, 0)), bounds=bounds_of((0, 0)))
    assert results["y"].shape == (0, 4, 8)
    assert torch.equal(results["final"], inputs((0, 0))["initial"])
    assert all(not results[name].any() for name in NAMES[:-1])
    assert results["initial"].isfinite().all()


@pytest.mark.parametrize("used", [0, 1])
def test_only_one_of_the_outputs_is_used(used):
    given, bounds = inputs((3, 66)), bounds_of((3, 66))

    def only_used(function):
        return lambda **tensors: function(**tensors, bounds=bounds)[used : used + 1]

    results = run(only_used(op.ssd), given)
    assert_same(results, run(only_used(twin.ssd), in_float64(given)))


def test_ends_equal_the_twin():
    lengths = (1, 0, 67, 9)
    names = NAMES[:5]
    given, bounds = inputs(lengths), bounds_of(lengths)
    given = {name: given[name] for name in names}

    def ends(**tensors):
        return op.prepare_ssd(**tensors, bounds=bounds).ends()

    def want(dt_TH, A_H, **tensors):
        final = twin.ssd(dt_TH=dt_TH, A_H=A_H, **tensors, bounds=bounds)[1]
        return twin.ssd_transition(dt_TH, A_H, bounds=bounds), final

    assert_same(run(ends, given), run(want, in_float64(given)))


@pytest.mark.parametrize("cut", [1, 64, 69])
def test_a_sequence_cut_in_two_equals_the_whole(cut):
    """As lanes pass states: of both parts the ends first, then the outputs."""
    given = inputs((80,))

    def in_two(initial, **tensors):
        prepared = op.prepare_ssd(**tensors, bounds=bounds_of((cut, 80 - cut)))
        transition, final = prepared.ends()
        second = transition[0, :, None, None] * initial[0] + final[0]
        y_THP, final = prepared.run(torch.stack([initial[0], second]))
        return y_THP, final[1:]

    assert_same(run(in_two, given), run(twin.ssd, in_float64(given)))


def test_no_bit_of_a_sequence_depends_on_another():
    lengths = (3, 70, 12)
    given = inputs(lengths)
    other = {name: tensor.clone() for name, tensor in given.items()}
    for name in ("x_THP", "dt_TH", "B_TGN", "C_TGN"):
        other[name][3:73] = float("nan")
    other["initial"][1] = float("inf")
    results = [run(op.ssd, each, bounds=bounds_of(lengths)) for each in (given, other)]
    assert results[1]["y"][3:73].isnan().all()
    for name, before in results[0].items():
        if name not in ("A_H", "D_H"):
            kept = [0, 2] if name in ("final", "initial") else [0, 1, 2, *range(73, 85)]
            assert torch.equal(before[kept], results[1][name][kept]), name


@pytest.mark.parametrize("strength", [1e3, 1e6])
def test_strong_decays_do_not_overflow(strength):
    given, bounds = inputs((5, 40)), bounds_of((5, 40))
    given["dt_TH"][::3] *= strength
    results = run(op.ssd, given, bounds=bounds)
    assert_same(results, run(twin.ssd, in_float64(given), bounds=bounds))


def test_small_decays_after_a_strong_one_keep_their_digits():
    given = inputs((64,))
    given["dt_TH"] *= 0.01
    given["dt_TH"][3] = 1e6
    y_THP, final = op.ssd(**given)
    want_THP, want = twin.ssd(**in_float64(given))
    assert_same({"y": y_THP[4:], "final": final}, {"y": want_THP[4:], "final": want}, within=1e-5)


def test_a_mixer_equals_its_plain_self():
    config = Mamba2Config(heads=4, head_dim=8, state_dim=16, groups=2)
    torch.manual_seed(0)
    mixer = Mamba2(config, 24, norm=Norm(1e-5)).to(DEVICE)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x_TC = torch.randn(75, 24).to(DEVICE)
    context = whole_context((70, 5))
    if DEVICE == "cuda":
        context = context.to(torch.device("cuda"))
    results = []
    for kernels in ("auto", "plain"):
        leaf = x_TC.clone().requires_grad_()
        mixer.zero_grad()
        with backends.using_kernels(kernels):
            output = mixer(leaf, context, {})
            output.square().sum().backward()
        grads = {name: parameter.grad for name, parameter in mixer.named_parameters()}
        results.append({"y": output.detach(), "x": leaf.grad, **grads})
    assert_same(*results)


def test_wide_states_are_for_plain_torch():
    x = torch.zeros(4, 2, 160)
    assert backends.pick("ssd", x, torch.zeros(4, 1, 16)) is None
    assert "wider than 128 and 256" in backends.chosen()["ssd"]


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA: half precision at the width of a model")
def test_half_precision_is_near():
    lengths = (1, 700, 64, 0, 259)
    given = inputs(lengths, heads=16, groups=2, width=64, state=128, dtype=torch.bfloat16)
    bounds = bounds_of(lengths)
    results = run(op.ssd, given, bounds=bounds)
    assert results["y"].dtype == torch.bfloat16
    assert results["final"].dtype == torch.float32
    assert_same(results, run(twin.ssd, in_float64(given), bounds=bounds), within=2e-2)


def test_numbers_of_heads_with_strides():
    """Columns of a larger tensor, and one number for all heads."""
    lengths = [3, 70]
    given = inputs(lengths)
    given |= {"A_H": given["A_H"].repeat(3, 1).t()[:, 0], "D_H": given["D_H"][:1].expand(4)}
    wanted = run(twin.ssd, in_float64(given), bounds=bounds_of(lengths))
    assert_same(run(op.ssd, given, bounds=bounds_of(lengths)), wanted)
