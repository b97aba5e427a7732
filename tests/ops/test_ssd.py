import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.twins import assert_same, bounds_of, run

from longshore.ops import reference as twin
from longshore.ops import ssd as op
from longshore.ops.boundaries import chunks_of

LENGTHS = [[1], [2], [7], [8], [9], [16], [1, 2, 5, 8], [0, 3, 17, 0, 24, 1, 0], [3, 75, 1, 2]]


def inputs(lengths, *, heads=4, groups=2, seed=0, dtype=torch.float64):
    make = torch.Generator().manual_seed(seed)
    tokens, width, state = sum(lengths), 3, 5
    shapes = {
        "x_THP": (tokens, heads, width),
        "dt_TH": (tokens, heads),
        "A_H": (heads,),
        "B_TGN": (tokens, groups, state),
        "C_TGN": (tokens, groups, state),
        "D_H": (heads,),
        "initial": (len(lengths), heads, width, state),
    }
    made = {k: torch.randn(v, generator=make, dtype=dtype) for k, v in shapes.items()}
    made["dt_TH"] = torch.nn.functional.softplus(made["dt_TH"])
    made["A_H"] = -made["A_H"].exp()
    return made


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("left_out", [(), ("initial",), ("D_H", "initial")])
def test_equals_its_twin(lengths, left_out):
    given = {name: x for name, x in inputs(lengths).items() if name not in left_out}
    bounds = bounds_of(lengths)
    assert_same(run(op.ssd, given, bounds=bounds, chunk=8), run(twin.ssd, given, bounds=bounds))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_equals_its_twin_at_the_usual_chunk(groups):
    lengths = [1, 64, 2, 65, 200]
    given = inputs(lengths, groups=groups)
    bounds = bounds_of(lengths)
    assert_same(run(op.ssd, given, bounds=bounds), run(twin.ssd, given, bounds=bounds))


@pytest.mark.property
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum),
    chunk=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (6, 3)]),
    seed=st.integers(0, 99),
)
def test_equals_its_twin_for_any_lengths(lengths, chunk, heads, seed):
    given = inputs(lengths, heads=heads[0], groups=heads[1], seed=seed)
    bounds = bounds_of(lengths)
    assert_same(run(op.ssd, given, bounds=bounds, chunk=chunk), run(twin.ssd, given, bounds=bounds))


def test_the_example():
    ones = torch.ones(4, 1, 1)
    x_THP = torch.tensor([4.0, 2, 8, 6]).view(4, 1, 1)
    A_H = torch.tensor([0.5]).log()
    y_THP, final = op.ssd(x_THP, ones[:, 0], A_H, ones, ones, bounds=bounds_of([3, 1]))
    torch.testing.assert_close(y_THP.flatten(), torch.tensor([4.0, 4, 10, 6]))
    torch.testing.assert_close(final.flatten(), torch.tensor([10.0, 6]))


def test_without_bounds_all_rows_are_one_run():
    given = inputs([19])
    want = run(op.ssd, given, bounds=bounds_of([19]), chunk=4)
    assert all(map(torch.equal, run(op.ssd, given, chunk=4), want))


def test_no_rows_at_all():
    given = inputs([0, 0])
    y_THP, final, *grads = run(op.ssd, given, bounds=bounds_of([0, 0]))
    assert y_THP.shape == (0, 4, 3)
    assert torch.equal(final, given["initial"])
    assert all(grad is not None for grad in grads)


@pytest.mark.parametrize("strength", [30.0, 1e3, 1e6])
def test_strong_decays_do_not_overflow(strength):
    given = inputs([5, 40])
    given["dt_TH"][::3] *= strength
    bounds = bounds_of([5, 40])
    got, want = run(op.ssd, given, bounds=bounds, chunk=16), run(twin.ssd, given, bounds=bounds)
    assert all(tensor.isfinite().all() for tensor in got)
    assert_same(got, want)


def test_small_decays_after_a_strong_one_keep_their_digits_in_float32():
    given = inputs([64])
    given["dt_TH"] *= 0.01
    given["dt_TH"][3] = 1e6
    single = {name: tensor.float() for name, tensor in given.items()}
    exact = {name: tensor.double() for name, tensor in single.items()}
    y_THP, final = op.ssd(**single)
    want_THP, want = twin.ssd(**exact)
    assert_same([y_THP[4:], final], [want_THP[4:], want], within=1e-5)


def test_no_bit_of_a_run_depends_on_another():
    lengths = [3, 9, 12]
    given = inputs(lengths)
    other = {name: tensor.clone() for name, tensor in given.items()}
    for name in ("x_THP", "dt_TH", "B_TGN", "C_TGN"):
        other[name][3:12] = float("nan")
    other["initial"][1] = float("inf")
    results = [run(op.ssd, held, bounds=bounds_of(lengths), chunk=4) for held in (given, other)]
    assert results[1][0][3:12].isnan().all()
    tokens, runs = [0, 1, 2, *range(12, 24)], [0, 2]
    names = ["y", "final", *given]
    for name, a, b in zip(names, *results, strict=True):
        kept = runs if name in ("final", "initial") else tokens
        if name not in ("A_H", "D_H"):
            assert torch.equal(a[kept], b[kept]), name


@pytest.mark.parametrize("cut", [1, 8, 13, 20])
def test_a_run_cut_in_two_equals_the_whole(cut):
    given = inputs([21])

    def in_two(A_H, D_H, initial, **rows):
        state, outs = initial, []
        for part in (slice(cut), slice(cut, None)):
            held = {name: tensor[part] for name, tensor in rows.items()}
            y_THP, state = op.ssd(**held, A_H=A_H, D_H=D_H, initial=state, chunk=8)
            outs.append(y_THP)
        return torch.cat(outs), state

    names = ["x_THP", "dt_TH", "A_H", "B_TGN", "C_TGN", "D_H", "initial"]
    assert list(given) == names
    assert_same(run(in_two, given), run(op.ssd, given, chunk=8))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_transition_equals_its_twin(lengths):
    given, bounds = inputs(lengths), bounds_of(lengths)
    rest = {name: given[name] for name in ("x_THP", "B_TGN", "C_TGN")}

    def transition(**held):
        return op.prepare_ssd(**held, **rest, bounds=bounds, chunk=8).ends()[0]

    given = {name: given[name] for name in ("dt_TH", "A_H")}
    assert_same(run(transition, given), run(twin.ssd_transition, given, bounds=bounds))


def test_composed_transitions_give_the_same_states():
    lengths = [9, 1, 11]
    given = inputs(lengths)
    given["initial"] = given["initial"][:1]

    def composed(dt_TH, A_H, initial, **rest):
        bounds = bounds_of(lengths)
        prepared = op.prepare_ssd(dt_TH=dt_TH, A_H=A_H, **rest, bounds=bounds, chunk=4)
        transitions, finals = prepared.ends()
        state = initial[0]
        for transition_H, final_HPN in zip(transitions, finals, strict=True):
            state = transition_H[:, None, None] * state + final_HPN
        return state[None]

    got = run(composed, {name: given[name] for name in given if name != "D_H"})
    want = run(
        lambda **held: twin.ssd(**held)[1],
        {name: given[name] for name in given if name != "D_H"},
    )
    # C is not in the states.
    got[5], want[5] = torch.zeros(0), torch.zeros(0)
    assert_same(got, want)


def test_half_precision_is_computed_in_float32():
    given = inputs([5, 9], dtype=torch.bfloat16)
    exact = {name: tensor.float() for name, tensor in given.items()}
    y_THP, final = op.ssd(**given, bounds=bounds_of([5, 9]))
    want_THP, want = op.ssd(**exact, bounds=bounds_of([5, 9]))
    assert y_THP.dtype == torch.bfloat16
    assert torch.equal(final, want)
    assert torch.equal(y_THP, want_THP.bfloat16())


def test_chunks_lie_by_number_longest_run_first():
    layout = chunks_of((0, 5, 6, 9), 2, device=torch.device("cpu"))
    assert layout.steps == (3, 2, 1)
    assert layout.order.tolist() == [0, 2, 1]
    assert layout.back.tolist() == [0, 2, 1]
    assert layout.places.tolist() == [0, 1, 6, 7, 10, 4, 2, 3, 8]
    rows = torch.arange(1, 10)
    assert layout.cut(rows).tolist() == [[1, 2], [7, 8], [6, 0], [3, 4], [9, 0], [5, 0]]
    assert torch.equal(layout.join(layout.cut(rows)), rows)


def test_what_cannot_be_is_refused():
    given = inputs([4])
    with pytest.raises(ValueError, match="there are 4 heads, which must be a multiple of the 3"):
        op.ssd(**given | {"B_TGN": torch.ones(4, 3, 5), "C_TGN": torch.ones(4, 3, 5)})
    with pytest.raises(ValueError, match=r"initial states have shape \(2, 4\).*\(1, 4, 3, 5\)"):
        op.ssd(**given | {"initial": torch.ones(2, 4)})
    with pytest.raises(ValueError, match="chunk of 0 rows"):
        op.ssd(**given, chunk=0)
