import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.plan.evaluator import padded, sequence_cost
from tests.plan.samples import CHARGED, FREE, TOKENS

from longshore.plan import CostProfile, load_profile
from longshore.plan.cost import CostTable, parse_profile

GOOD = {
    "linear": 1.0,
    "quadratic": 1.9484e-5,
    "gather": [0.01, 0.08],
    "node": 8,
    "pack": 64,
    "round": 0,
}


def written(folder: Path, data: object) -> Path:
    path = folder / "profile.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_profile_from_json(tmp_path: Path):
    assert load_profile(written(tmp_path, GOOD)) == CHARGED
    assert load_profile(str(written(tmp_path, CHARGED.as_json()))) == CHARGED
    assert CHARGED.as_json() == {**GOOD, "message": 0.0}
    messages = written(tmp_path, {**GOOD, "message": 0.5})
    assert load_profile(messages) == replace(CHARGED, message=0.5)


WRONG = {
    "a key is missing": {key: GOOD[key] for key in GOOD if key != "pack"},
    "a key too many": {**GOOD, "extra": 1},
    "not an object": [1, 2],
    "not JSON": "{",
    "empty": "",
    "gather is a number": {**GOOD, "gather": 0.1},
    "gather has one number": {**GOOD, "gather": [0.1]},
    "gather has three numbers": {**GOOD, "gather": [0.1, 0.1, 0.1]},
    "gather holds text": {**GOOD, "gather": [0.1, "0.1"]},
    "gather holds a bool": {**GOOD, "gather": [0.1, True]},
    "text": {**GOOD, "linear": "1"},
    "a bool": {**GOOD, "round": False},
    "a negative message": {**GOOD, "message": -1},
    "text as a message": {**GOOD, "message": "1"},
    "nothing": {**GOOD, "quadratic": None},
    "negative": {**GOOD, "linear": -1},
    "negative gather": {**GOOD, "gather": [0, -0.1]},
    "not a number": {**GOOD, "pack": float("nan")},
    "infinite": {**GOOD, "pack": float("inf")},
    "infinite gather": {**GOOD, "gather": [0, float("inf")]},
    "half a lane in a node": {**GOOD, "node": 2.5},
    "no lane in a node": {**GOOD, "node": 0},
    "no arithmetic costs anything": {**GOOD, "linear": 0, "quadratic": 0},
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_profile_is_one_clear_line(tmp_path: Path, fault: str):
    with pytest.raises(ValueError, match=r"^cost profile[^\n]*$"):
        load_profile(written(tmp_path, WRONG[fault]))


@pytest.mark.parametrize("key", ["linear", "quadratic", "pack", "round", "node"])
def test_a_wrong_number_is_named(tmp_path: Path, key: str):
    with pytest.raises(ValueError, match=f"{key} holds 'x', which is not a number"):
        load_profile(written(tmp_path, {**GOOD, key: "x"}))
    with pytest.raises(ValueError, match=f"{key} is -1"):
        load_profile(written(tmp_path, {**GOOD, key: -1}))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(
        ValueError, match=r"^cost profile .*missing\.json: cannot be read \(No such"
    ):
        load_profile(tmp_path / "missing.json")
    with pytest.raises(ValueError, match=r"^cost profile .*: cannot be read \(Is a directory"):
        load_profile(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"^cost profile .*binary: is not JSON"):
        load_profile(binary)


@pytest.mark.parametrize("node", [float("inf"), float("nan")])
def test_a_node_without_a_finite_size_is_one_clear_line(tmp_path: Path, node: float):
    with pytest.raises(ValueError, match=r"^cost profile[^\n]*node"):
        load_profile(written(tmp_path, {**GOOD, "node": node}))


def test_a_number_too_large_for_a_float_is_one_clear_line(tmp_path: Path):
    with pytest.raises(ValueError, match=r"^cost profile[^\n]*linear"):
        load_profile(written(tmp_path, {**GOOD, "linear": 10**400}))


# The example of cost.py: 4096 tokens, no quadratic cost.
def test_the_formula_by_hand():
    profile = replace(CHARGED, quadratic=0.0)
    assert profile.sequence_cost(4096, 4096, 1) == 4096
    assert profile.sequence_cost(4096, 4096, 4) == pytest.approx(1024 + 0.01 * 4096 * 3 / 4)


def test_exchange_is_dearer_across_nodes():
    profile = replace(TOKENS, gather=(0.5, 2.0), node=4)
    assert profile.sequence_cost(48, 48, 1) == 48
    assert profile.sequence_cost(48, 48, 4) == 12 + 0.5 * 48 * 3 / 4
    assert profile.sequence_cost(48, 48, 6) == 8 + 2.0 * 48 * 5 / 6


def test_padding_costs_linear_time_and_exchange_but_no_attention():
    profile = CostProfile(linear=3.0, quadratic=2.0, gather=(0.5, 0.5), node=8, pack=7.0, round=9.0)
    assert profile.sequence_cost(5, 8, 2) == (3 * 8 + 2 * 25) / 2 + 0.5 * 8 * 1 / 2


def test_ideal_time_has_neither_padding_nor_packs():
    profile = CostProfile(linear=3.0, quadratic=2.0, gather=(0.5, 0.5), node=8, pack=7.0, round=9.0)
    assert profile.ideal([5, 2]) == 3 * 5 + 2 * 25 + 3 * 2 + 2 * 4


def table_of(lengths: list[int], sizes: tuple[int, ...], profile: CostProfile) -> CostTable:
    return CostTable(np.array(lengths, dtype=np.int64), sizes=sizes, profile=profile)


def test_a_model_split_over_ranks_by_hand():
    whole = CostProfile(linear=8.0, quadratic=4.0, gather=(2.0, 6.0), node=8, pack=12.0, round=20.0)
    split = CostProfile(linear=1.0, quadratic=0.5, gather=(0.25, 0.75), node=4, pack=3.0, round=5.0)
    assert whole.on_ranks(tp=2, pp=4) == split
    assert whole.on_ranks(tp=1, pp=1) == whole
    assert whole.on_ranks(tp=16, pp=1).node == 1
    sends = replace(whole, message=3.0)
    assert sends.on_ranks(tp=2, pp=4).message == 3, "a stage hands on whole tokens"


def test_a_table_by_hand():
    table = table_of([8, 3], (1, 2), replace(TOKENS, pack=2.0, round=1.0))
    assert table.tokens.tolist() == [[8, 4], [3, 2]]
    assert (table.cost / table.scale).tolist() == [[8, 4], [3, 2]]
    assert table.seconds(table.pack) == 2
    assert table.seconds(table.round) == 1


@given(
    st.lists(st.integers(1, 200_000), min_size=1, max_size=20),
    st.sampled_from([FREE, CHARGED, replace(CHARGED, node=2, pack=1e5, round=3.0)]),
    st.sampled_from([1.0, 1e-4, 1e7]),
)
@pytest.mark.property
def test_whole_quanta_are_the_formula_to_eleven_digits_of_the_costliest(
    lengths: list[int], profile: CostProfile, unit: float
):
    scaled = CostProfile(
        linear=profile.linear * unit,
        quadratic=profile.quadratic * unit,
        gather=(profile.gather[0] * unit, profile.gather[1] * unit),
        node=profile.node,
        pack=profile.pack * unit,
        round=profile.round * unit,
    )
    table = table_of(lengths, (1, 2, 3, 8, 12), scaled)
    costs = [sequence_cost(scaled, max(lengths), k) for k in table.sizes]
    close = (max(costs) + scaled.pack + scaled.round) * 1e-11
    for i, length in enumerate(lengths):
        for j, k in enumerate(table.sizes):
            exact = sequence_cost(scaled, length, k)
            assert table.seconds(int(table.cost[i, j])) == pytest.approx(exact, abs=close)
            assert table.tokens[i, j] * k == padded(length, k)
    assert table.seconds(table.pack) == pytest.approx(scaled.pack, abs=close)
    assert table.seconds(table.round) == pytest.approx(scaled.round, abs=close)


def test_sums_over_all_sequences_and_lanes_stay_inside_64_bits():
    lengths = [131072] * 65536
    table = table_of(lengths, (1, 1024, 16384), CHARGED)
    assert table.cost.min() > 0
    assert float(table.cost[:, -1].sum()) * 16384 < 2**63
    assert (int(table.cost.max()) + table.pack + table.round) * len(lengths) < 2**63


def test_a_part_keeps_the_costs_of_some_rows_and_sizes():
    table = table_of([8, 3, 5], (1, 2, 4), CHARGED)
    part = table.part(np.array([2, 0]), (1, 4))
    assert part.sizes == (1, 4)
    assert part.cost.tolist() == table.cost[[2, 0]][:, [0, 2]].tolist()
    assert part.tokens.tolist() == table.tokens[[2, 0]][:, [0, 2]].tolist()
    assert (part.scale, part.pack) == (table.scale, table.pack)


def test_joined_rows_are_sums():
    table = table_of([8, 3, 5], (1, 2), CHARGED)
    joined = table.joined([[1], [2, 0]])
    assert joined.cost.tolist() == [
        table.cost[1].tolist(),
        (table.cost[2] + table.cost[0]).tolist(),
    ]
    assert joined.tokens.tolist() == [[3, 2], [13, 4 + 4]]


def test_a_curve_stands_for_squared_lengths():
    curve = ((1, 0.0), (4, 12.0), (8, 20.0))
    profile = replace(CHARGED, curve=curve)
    assert [profile.square(n) for n in (1, 2, 4, 6, 8, 10)] == [0, 4, 12, 16, 20, 24]
    table = CostTable(np.array([6, 2]), sizes=(1, 2), profile=profile)
    for row, length in enumerate((6, 2)):
        for column, size in enumerate((1, 2)):
            wanted = profile.sequence_cost(
                length, -(-length // 4) * 4 if size == 2 else length, size
            )
            assert table.seconds(int(table.cost[row, column])) == pytest.approx(wanted, rel=1e-9)
    assert parse_profile(profile.as_json(), "mine") == profile
    assert "curve" not in CHARGED.as_json()


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        (((4, 1.0), (4, 2.0)), "lengths must rise"),
        (((1, 2.0), (3, 1.0)), "must not fall"),
        (((0, 1.0),), "must rise from 1 on"),
    ],
)
def test_a_curve_that_cannot_be_is_refused(curve, said):
    with pytest.raises(ValueError, match=said):
        replace(CHARGED, curve=curve)
