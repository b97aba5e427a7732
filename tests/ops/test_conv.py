import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.twins import assert_same, bounds_of, run

from longshore.ops import conv
from longshore.ops import reference as twin

LENGTHS = [[1], [2], [7], [1, 2, 5], [2, 1, 1, 3], [0, 3, 0, 0, 1, 0], [3, 41, 1, 2]]


def inputs(lengths, *, taps=4, channels=3, seed=0, dtype=torch.float64):
    make = torch.Generator().manual_seed(seed)
    shapes = {
        "x_TC": (sum(lengths), channels),
        "weight_CK": (channels, taps),
        "bias_C": (channels,),
        "before": (len(lengths), taps - 1, channels),
    }
    return {k: torch.randn(v, generator=make, dtype=dtype) for k, v in shapes.items()}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("taps", [1, 2, 4, 7])
def test_equals_its_twin(lengths, taps):
    given = inputs(lengths, taps=taps)
    bounds = bounds_of(lengths)
    for left_out in [(), ("before",), ("bias_C",), ("bias_C", "before")]:
        held = {name: tensor for name, tensor in given.items() if name not in left_out}
        for activation in (False, True):
            settings = {"bounds": bounds, "activation": activation}
            assert_same(
                run(conv.causal_conv, held, **settings), run(twin.causal_conv, held, **settings)
            )


@pytest.mark.property
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(sum),
    taps=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_equals_its_twin_for_any_lengths(lengths, taps, seed):
    given = inputs(lengths, taps=taps, seed=seed)
    bounds = bounds_of(lengths)
    assert_same(
        run(conv.causal_conv, given, bounds=bounds, activation=True),
        run(twin.causal_conv, given, bounds=bounds, activation=True),
    )


def test_the_example():
    x_TC = torch.tensor([[1.0], [2], [3], [4], [5]])
    weight_CK = torch.tensor([[1.0, 10.0]])
    bounds = bounds_of([3, 2])
    y_TC = conv.causal_conv(x_TC, weight_CK, bounds=bounds)
    assert y_TC.flatten().tolist() == [10, 21, 32, 40, 54]
    before = torch.tensor([[[7.0]], [[8.0]]])
    y_TC = conv.causal_conv(x_TC, weight_CK, bounds=bounds, before=before)
    assert y_TC.flatten().tolist() == [17, 21, 32, 48, 54]


def test_without_bounds_all_rows_are_one_run():
    given = inputs([9])
    assert_same(run(conv.causal_conv, given), run(conv.causal_conv, given, bounds=bounds_of([9])))


def test_no_bit_of_a_run_depends_on_another():
    lengths = [3, 1, 5]
    given = inputs(lengths)
    other = {name: tensor.clone() for name, tensor in given.items()}
    other["x_TC"][3] = float("nan")
    other["before"][1] = float("inf")
    bounds = bounds_of(lengths)
    y, x_grad, *_, halo_grad = run(conv.causal_conv, given, bounds=bounds, activation=True)
    y2, x_grad2, *_, halo_grad2 = run(conv.causal_conv, other, bounds=bounds, activation=True)
    kept = [0, 1, 2, 4, 5, 6, 7, 8]
    assert y2[3].isnan().all()
    assert torch.equal(y[kept], y2[kept])
    assert torch.equal(x_grad[kept], x_grad2[kept])
    assert torch.equal(halo_grad[[0, 2]], halo_grad2[[0, 2]])


@pytest.mark.parametrize("cut", [1, 2, 5, 8])
def test_a_run_cut_in_two_with_a_halo_equals_the_whole(cut):
    given = inputs([9])

    def in_two(x_TC, weight_CK, bias_C, before):
        first = conv.causal_conv(x_TC[:cut], weight_CK, bias_C, before=before)
        halo = torch.cat([before, x_TC[None, :cut]], 1)[:, -3:]
        return torch.cat([first, conv.causal_conv(x_TC[cut:], weight_CK, bias_C, before=halo)])

    assert_same(run(in_two, given), run(conv.causal_conv, given))


def test_half_precision_is_computed_in_float32():
    given = inputs([5, 3], dtype=torch.bfloat16)
    bounds = bounds_of([5, 3])
    y_TC = conv.causal_conv(**given, bounds=bounds, activation=True)
    exact = {name: tensor.float() for name, tensor in given.items()}
    assert y_TC.dtype == torch.bfloat16
    assert torch.equal(y_TC, conv.causal_conv(**exact, bounds=bounds, activation=True).bfloat16())


def test_a_halo_of_another_shape_is_refused():
    given = inputs([5, 3])
    with pytest.raises(ValueError, match=r"`before` has shape \(2, 3, 3\).*here \(1, 3, 3\)"):
        conv.causal_conv(**given)
