import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.ops.twins import assert_same, bounds_of, gated_delta_rule, run
from torch.nn.functional import logsigmoid, normalize

from longshore.ops import delta_rule as op
from longshore.ops import reference as twin

LENGTHS = [[1], [2], [7], [8], [9], [16], [1, 2, 5, 8], [0, 3, 17, 0, 24, 1, 0], [3, 75, 1, 2]]


def inputs(lengths, *, heads=2, seed=0, dtype=torch.float64):
    make = torch.Generator().manual_seed(seed)
    tokens, keys, values = sum(lengths), 4, 3
    shapes = {
        "q_THK": (tokens, heads, keys),
        "k_THK": (tokens, heads, keys),
        "v_THV": (tokens, heads, values),
        "g_TH": (tokens, heads),
        "beta_TH": (tokens, heads),
        "initial": (len(lengths), heads, keys, values),
    }
    made = {k: torch.randn(v, generator=make, dtype=dtype) for k, v in shapes.items()}
    made["q_THK"] = normalize(made["q_THK"], dim=-1)
    made["k_THK"] = normalize(made["k_THK"], dim=-1)
    made["g_TH"] = logsigmoid(made["g_TH"])
    made["beta_TH"] = made["beta_TH"].sigmoid()
    return made


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_equals_its_twin(lengths, scale):
    given = inputs(lengths)
    settings = {"bounds": bounds_of(lengths), "scale": scale}
    assert_same(
        run(gated_delta_rule, given, chunk=8, **settings),
        run(twin.gated_delta_rule, given, **settings),
    )
    del given["initial"]
    assert_same(
        run(gated_delta_rule, given, chunk=8, **settings),
        run(twin.gated_delta_rule, given, **settings),
    )


def test_equals_its_twin_at_the_usual_chunk():
    lengths = [1, 64, 2, 65, 200]
    given = inputs(lengths)
    bounds = bounds_of(lengths)
    assert_same(
        run(gated_delta_rule, given, bounds=bounds),
        run(twin.gated_delta_rule, given, bounds=bounds),
    )


@pytest.mark.property
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(sum),
    chunk=st.integers(1, 5),
    heads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_equals_its_twin_for_any_lengths(lengths, chunk, heads, seed):
    given = inputs(lengths, heads=heads, seed=seed)
    bounds = bounds_of(lengths)
    assert_same(
        run(gated_delta_rule, given, bounds=bounds, chunk=chunk),
        run(twin.gated_delta_rule, given, bounds=bounds),
    )


def test_the_example():
    ones = torch.ones(3, 1, 1)
    v_THV = torch.tensor([4.0, 8, 6]).view(3, 1, 1)
    zeros, half = torch.zeros(3, 1), torch.full((3, 1), 0.5)
    o_THV, final = gated_delta_rule(ones, ones, v_THV, zeros, half, bounds=bounds_of([2, 1]))
    torch.testing.assert_close(o_THV.flatten(), torch.tensor([2.0, 5, 3]))
    torch.testing.assert_close(final.flatten(), torch.tensor([5.0, 3]))


def test_without_bounds_all_rows_are_one_run():
    given = inputs([19])
    want = run(gated_delta_rule, given, bounds=bounds_of([19]), chunk=4)
    assert all(map(torch.equal, run(gated_delta_rule, given, chunk=4), want))


def test_no_rows_at_all():
    given = inputs([0, 0])
    o_THV, final, *grads = run(gated_delta_rule, given, bounds=bounds_of([0, 0]))
    assert o_THV.shape == (0, 2, 3)
    assert torch.equal(final, given["initial"])
    assert all(grad is not None for grad in grads)


@pytest.mark.parametrize("decay", [-30.0, -1e3, -1e6, float("-inf")])
def test_strong_decays_do_not_overflow(decay):
    given = inputs([5, 40])
    given["g_TH"][::3] = decay
    bounds = bounds_of([5, 40])
    got = run(gated_delta_rule, given, bounds=bounds, chunk=16)
    want = run(twin.gated_delta_rule, given, bounds=bounds)
    assert all(tensor.isfinite().all() for tensor in got)
    assert_same(got, want)


def test_small_decays_after_a_strong_one_keep_their_digits_in_float32():
    given = inputs([64])
    given["g_TH"] *= 0.01
    given["g_TH"][3] = -1e6
    single = {name: tensor.float() for name, tensor in given.items()}
    exact = {name: tensor.double() for name, tensor in single.items()}
    assert_same(gated_delta_rule(**single), twin.gated_delta_rule(**exact), within=1e-5)


def test_no_bit_of_a_run_depends_on_another():
    lengths = [3, 9, 12]
    given = inputs(lengths)
    other = {name: tensor.clone() for name, tensor in given.items()}
    for name in ("q_THK", "k_THK", "v_THV", "g_TH", "beta_TH"):
        other[name][3:12] = float("nan")
    other["initial"][1] = float("inf")
    results = [
        run(gated_delta_rule, held, bounds=bounds_of(lengths), chunk=4) for held in (given, other)
    ]
    assert results[1][0][3:12].isnan().all()
    tokens, runs = [0, 1, 2, *range(12, 24)], [0, 2]
    for name, a, b in zip(["o", "final", *given], *results, strict=True):
        kept = runs if name in ("final", "initial") else tokens
        assert torch.equal(a[kept], b[kept]), name


@pytest.mark.parametrize("cut", [1, 8, 13, 20])
def test_a_run_cut_in_two_equals_the_whole(cut):
    given = inputs([21])

    def in_two(initial, **rows):
        state, outs = initial, []
        for part in (slice(cut), slice(cut, None)):
            held = {name: tensor[part] for name, tensor in rows.items()}
            o_THV, state = gated_delta_rule(**held, initial=state, chunk=8)
            outs.append(o_THV)
        return torch.cat(outs), state

    assert_same(run(in_two, given), run(gated_delta_rule, given, chunk=8))


@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_transition_equals_its_twin(lengths):
    given, bounds = inputs(lengths), bounds_of(lengths)
    rest = {name: given[name] for name in ("q_THK", "v_THV")}

    def transition(**held):
        return op.prepare_delta(**held, **rest, bounds=bounds, chunk=8).ends()[0]

    given = {name: given[name] for name in ("k_THK", "g_TH", "beta_TH")}
    assert_same(run(transition, given), run(twin.delta_transition, given, bounds=bounds))


def test_composed_transitions_give_the_same_states():
    lengths = [9, 1, 11]
    given = inputs(lengths)
    given["initial"] = given["initial"][:1]
    del given["q_THK"]

    def composed(k_THK, v_THV, g_TH, beta_TH, initial):
        settings = {"bounds": bounds_of(lengths), "chunk": 4}
        prepared = op.prepare_delta(k_THK, k_THK, v_THV, g_TH, beta_TH, **settings)
        transitions, finals = prepared.ends()
        state = initial[0]
        for transition_HKK, final_HKV in zip(transitions, finals, strict=True):
            state = transition_HKK @ state + final_HKV
        return state[None]

    def whole(k_THK, **held):
        return twin.gated_delta_rule(k_THK, k_THK, **held)[1]

    assert_same(run(composed, given), run(whole, given))


def test_half_precision_is_computed_in_float32():
    given = inputs([5, 9], dtype=torch.bfloat16)
    exact = {name: tensor.float() for name, tensor in given.items()}
    o_THV, final = gated_delta_rule(**given, bounds=bounds_of([5, 9]))
    want_THV, want = gated_delta_rule(**exact, bounds=bounds_of([5, 9]))
    assert o_THV.dtype == torch.bfloat16
    assert torch.equal(final, want)
    assert torch.equal(o_THV, want_THV.bfloat16())


def test_initial_states_of_another_shape_are_refused():
    given = inputs([4]) | {"initial": torch.ones(2, 2, 4, 3)}
    with pytest.raises(ValueError, match=r"initial states have shape \(2, 2, 4, 3\).*\(1, 2, 4"):
        gated_delta_rule(**given)
