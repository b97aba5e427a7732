import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.twins import assert_same, run

from longshore.ops import experts as op
from longshore.ops import reference as twin
from longshore.ops.backends import grouped_refusal


def ids_of(tokens, *, top_k=2, experts=5, seed=0):
    make = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=make).argsort(1)[:, :top_k]


def inputs(rows, *, experts, width=4, inner=8, seed=0, dtype=torch.float64):
    make = torch.Generator().manual_seed(seed)
    shapes = {
        "x_MC": (rows, width),
        "gate_up_E2FC": (experts, 2 * inner, width),
        "down_ECF": (experts, width, inner),
    }
    return {k: torch.randn(v, generator=make, dtype=dtype) for k, v in shapes.items()}


def test_the_example():
    order, counts, offsets = op.sort_by_expert(torch.tensor([[2, 0], [0, 1]]), 3)
    assert order.tolist() == [1, 2, 3, 0]
    assert counts.tolist() == [2, 1, 1]
    assert offsets.tolist() == [2, 3, 4]
    assert (order.dtype, counts.dtype, offsets.dtype) == (torch.int64, torch.int32, torch.int32)
    rows_MC = op.dispatch(torch.tensor([[10.0], [20.0]]), order)
    assert rows_MC.flatten().tolist() == [10, 20, 20, 10]
    weights_TK = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert op.combine(rows_MC, order, weights_TK).flatten().tolist() == [30, 140]


def test_ids_beyond_the_experts_lie_past_the_last_offset():
    order, counts, offsets = op.sort_by_expert(torch.tensor([[3], [0], [3], [1]]), 3)
    assert order.tolist() == [1, 3, 0, 2]
    assert counts.tolist() == [1, 1, 0]
    assert offsets.tolist() == [1, 2, 2]


@pytest.mark.property
@given(
    ids=st.integers(1, 3).flatmap(
        lambda k: st.lists(
            st.lists(st.integers(0, 4), min_size=k, max_size=k), min_size=1, max_size=12
        )
    )
)
def test_sorting_spreading_and_combining_equal_their_twins(ids):
    ids_TK = torch.tensor(ids)
    order, counts, offsets = op.sort_by_expert(ids_TK, 4)
    for a, b in zip((order, counts, offsets), twin.sort_by_expert(ids_TK, 4), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    rows = {"rows_MC": torch.randn(ids_TK.numel(), 3, dtype=torch.float64)}
    weights = {"weights_TK": torch.randn(ids_TK.shape, dtype=torch.float64)}
    assert_same(
        run(op.combine, rows | weights, order=order), run(twin.combine, rows | weights, order=order)
    )
    tokens = {"x_TC": torch.randn(len(ids), 3, dtype=torch.float64)}
    assert_same(run(op.dispatch, tokens, order=order), run(twin.dispatch, tokens, order=order))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.property
@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    past=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_loop_and_grouped_product_equal_their_twin(dtype, counts, past, seed):
    """The loop serves float64, the grouped product float32."""
    offsets_E = torch.tensor(counts).cumsum(0).int()
    rows = sum(counts) + past
    given = inputs(max(rows, 1), experts=len(counts), seed=seed, dtype=dtype)
    is_grouped = dtype == torch.float32
    assert (grouped_refusal(*given.values()) is None) == is_grouped
    assert_same(
        run(op.grouped_mlp, given, offsets_E=offsets_E),
        run(twin.grouped_mlp, given, offsets_E=offsets_E),
        within=1e-5 if is_grouped else 1e-9,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_past_the_end_give_zeros_and_experts_without_rows_get_gradients(dtype):
    offsets_E = torch.tensor([0, 3, 3], dtype=torch.int32)
    given = inputs(6, experts=3, dtype=dtype)
    given["x_MC"][3:] = float("nan")
    y, x_grad, gate_up_grad, down_grad = run(op.grouped_mlp, given, offsets_E=offsets_E)
    assert y[:3].all()
    assert x_grad[:3].all()
    assert not y[3:].any()
    assert not x_grad[3:].any()
    for grad in (gate_up_grad, down_grad):
        assert grad[1].all()
        assert not grad[[0, 2]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 4])
def test_no_expert_has_rows(rows, dtype):
    given = inputs(rows, experts=3, dtype=dtype)
    offsets_E = torch.zeros(3, dtype=torch.int32)
    y, *grads = run(op.grouped_mlp, given, offsets_E=offsets_E)
    assert y.shape == (rows, 4)
    assert not y.any()
    assert not any(grad.any() for grad in grads)


def test_expanded_and_transposed_gradients_are_taken():
    given = inputs(6, experts=2, dtype=torch.float32)
    offsets_E = torch.tensor([2, 6], dtype=torch.int32)
    x_MC = given.pop("x_MC").requires_grad_()
    op.grouped_mlp(x_MC, offsets_E, **given).sum().backward()
    summed = x_MC.grad.clone()
    x_MC.grad = None
    y = op.grouped_mlp(x_MC.T.contiguous().T, offsets_E, **given)
    y.backward(torch.ones(4, 6).T)
    assert torch.equal(x_MC.grad, summed)


@pytest.mark.usefixtures("half_by_float32")
@pytest.mark.parametrize(
    ("width", "inner", "dtype", "refusal"),
    [
        (4, 8, torch.float32, None),
        (8, 8, torch.bfloat16, None),
        (4, 8, torch.bfloat16, "rows of 4 numbers are not a multiple of 16 bytes"),
        (8, 4, torch.bfloat16, "rows of 4 numbers are not a multiple of 16 bytes"),
        (6, 8, torch.float32, "rows of 6 numbers are not a multiple of 16 bytes"),
        (4, 8, torch.float64, "the grouped product takes float32 and bfloat16, not torch.float64"),
    ],
)
def test_what_the_grouped_product_takes(width, inner, dtype, refusal):
    given = inputs(5, experts=2, width=width, inner=inner, dtype=dtype)
    assert grouped_refusal(*given.values()) == refusal
    offsets_E = torch.tensor([3, 5], dtype=torch.int32)
    exact = {name: tensor.double() for name, tensor in given.items()}
    y_MC = op.grouped_mlp(**given, offsets_E=offsets_E)
    assert y_MC.dtype == dtype
    within = 0.03 if dtype == torch.bfloat16 else 1e-5
    assert_same([y_MC.double()], [twin.grouped_mlp(**exact, offsets_E=offsets_E)], within=within)


def test_all_together_equals_each_token_through_its_experts():
    ids_TK = ids_of(7)
    weights_TK = torch.rand(7, 2, dtype=torch.float64)
    given = inputs(7, experts=5)

    def layer(x_MC, gate_up_E2FC, down_ECF, weights_TK):
        order, _, offsets = op.sort_by_expert(ids_TK, 5)
        rows = op.dispatch(x_MC, order)
        made = op.grouped_mlp(rows, offsets, gate_up_E2FC=gate_up_E2FC, down_ECF=down_ECF)
        return op.combine(made, order, weights_TK)

    def plain(x_MC, gate_up_E2FC, down_ECF, weights_TK):
        tokens = []
        for x_C, ids, weights in zip(x_MC, ids_TK.tolist(), weights_TK, strict=True):
            gates = [(gate_up_E2FC[e] @ x_C).chunk(2) for e in ids]
            made = [
                down_ECF[e] @ (torch.nn.functional.silu(gate) * up)
                for e, (gate, up) in zip(ids, gates, strict=True)
            ]
            tokens.append(weights[0] * made[0] + weights[1] * made[1])
        return torch.stack(tokens)

    given["weights_TK"] = weights_TK
    assert_same(run(layer, given), run(plain, given))


def test_combine_weighs_half_precision_rows_in_float32():
    order, *_ = op.sort_by_expert(ids_of(6), 5)
    rows_MC = torch.randn(12, 4).bfloat16()
    weights_TK = torch.rand(6, 2)
    y_TC = op.combine(rows_MC, order, weights_TK)
    assert y_TC.dtype == torch.bfloat16
    assert torch.equal(y_TC, op.combine(rows_MC.float(), order, weights_TK).bfloat16())
