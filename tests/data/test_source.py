import pickle
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.data.fields import Field
from longshore.data.mixture import Mixture, draw_order, mix_streams
from longshore.data.source import MemorySource, SampleError, TokenizedSample, from_packed, from_rows

ADVANTAGE = Field("advantage", "token", "float32")
SAMPLE_ID = Field("sample_id", "sequence", "int64")


def sample(id, tokens, mask, **fields):
    arrays = {name: np.asarray(value) for name, value in fields.items()}
    return TokenizedSample(id, np.array(tokens, np.int32), np.array(mask, np.bool_), arrays)


def numbered(first, count):
    """A source of one-token sequences that hold their own number."""
    return MemorySource(from_rows(([first + i, 0], [0, 1]) for i in range(count)))


def test_the_first_token_is_never_a_loss_token():
    assert sample(0, [5, 6, 7], [1, 1, 0]).loss_tokens == 1
    assert sample(0, [5], [1]).loss_tokens == 0
    assert sample(0, [5, 6, 7], [0, 1, 1]).length == 3


def test_samples_compare_by_content():
    one = sample(3, [5, 6], [0, 1], advantage=[1.0, 2.0])
    assert one == sample(3, [5, 6], [0, 1], advantage=[1.0, 2.0])
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != sample(4, [5, 6], [0, 1], advantage=[1.0, 2.0])
    assert one != sample(3, [5, 7], [0, 1], advantage=[1.0, 2.0])
    assert one != sample(3, [5, 6], [1, 1], advantage=[1.0, 2.0])
    assert one != sample(3, [5, 6], [0, 1], advantage=[1.0, 3.0])
    assert one != sample(3, [5, 6], [0, 1])
    assert one != "a sample"
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_sample_errors_survive_a_process_boundary():
    error = pickle.loads(pickle.dumps(SampleError("too long", "it has 9 tokens")))
    assert (error.reason, str(error)) == ("too long", "it has 9 tokens")


def test_rows_as_dicts_and_tuples():
    rows = [
        {"tokens": [1, 2], "loss_mask": [False, True], "sample_id": 8},
        (np.array([3]), [1], {"sample_id": np.int64(9)}),
    ]
    first, second = from_rows(rows, [SAMPLE_ID])
    assert first == sample(0, [1, 2], [0, 1], sample_id=np.int64(8))
    assert second == sample(1, [3], [1], sample_id=np.int64(9))
    assert first.tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": [1]}, "row 1: has no loss_mask; to train on every token, give all True"),
        ({"loss_mask": [1]}, "row 1: has no tokens"),
        (([], []), "row 1: tokens must be a list of at least one"),
        (([[1]], [[1]]), "row 1: tokens must be a list"),
        (([1.5], [1]), "row 1: token ids must be whole numbers"),
        (([-1], [1]), "row 1: token ids must be whole numbers from 0"),
        (([2**31], [1]), "from 0 to 2147483647"),
        (([1, 2], [1]), "row 1: 2 tokens, but the loss mask has 1 values"),
        (([1, 2], [1, 2]), "row 1: the loss mask must have only True and False"),
        (([1, 2], [1, -100]), "row 1: the loss mask must have only True and False"),
        (([1, 2], [1, None]), "row 1: the loss mask must have only True and False"),
        (([1, 2], [1, 1], {"reward": 1}), "row 1: field 'reward' is not declared"),
        ([1, 2, 3], "row 1: is list; it must be a dict"),
        (([1],), "row 1: is tuple"),
    ],
)
def test_bad_rows_are_named(row, message):
    rows = from_rows([([1], [1]), row])
    assert next(rows).length == 1
    with pytest.raises(ValueError, match=message):
        next(rows)


def test_packed_rows_by_hand():
    row = {"tokens": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1]}
    expected = [sample(0, [5, 6, 7], [0, 1, 1]), sample(1, [8, 9], [0, 1])]
    assert list(from_packed([{**row, "boundaries": [0, 3, 5]}])) == expected
    assert list(from_packed([{**row, "positions": [0, 1, 2, 0, 1]}])) == expected


def test_packed_rows_carry_fields():
    row = {
        "tokens": [5, 6, 7],
        "loss_mask": [0, 1, 0],
        "positions": np.array([0, 1, 0]),
        "advantage": [1, 2, 3],
        "sample_id": [40, 41],
    }
    a, b = from_packed([row], [ADVANTAGE, SAMPLE_ID])
    assert a.fields["advantage"].tolist() == [1.0, 2.0]
    assert (a.fields["sample_id"], b.fields["sample_id"]) == (40, 41)
    assert b.fields["advantage"].tolist() == [3.0]


PACKED = {"tokens": [5, 6, 7], "loss_mask": [0, 1, 0], "boundaries": [0, 1, 3]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boundaries": [0, 1]}, "packed row 0: boundaries must increase from 0 to 3"),
        ({"boundaries": [1, 3]}, "must increase from 0"),
        ({"boundaries": [0, 1, 1, 3]}, "must increase from 0"),
        ({"boundaries": [0, 4]}, "must increase from 0"),
        ({"boundaries": []}, "must increase from 0"),
        ({"boundaries": [0.0, 3.0]}, "must increase from 0"),
        ({"positions": [0, 1, 2]}, "packed row 0: give either boundaries or positions"),
        ({"tokens": [], "loss_mask": [], "boundaries": [0]}, "packed row 0: .* at least one value"),
        ({"loss_mask": [0, 1]}, "both must have one dim, the same length"),
        ({"advantage": [1, 2]}, "field 'advantage' must be a list of 3 values"),
        ({"advantage": [1, 2, 3], "sample_id": 7}, "field 'sample_id' must be a list of 2 values"),
        ({"reward": [1, 2]}, "packed row 0, sequence 0: field 'reward' is not declared"),
        ({}, "the declared field 'advantage' is missing"),
    ],
)
def test_bad_packed_rows_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        list(from_packed([{**PACKED, **change}], [ADVANTAGE, SAMPLE_ID]))


@pytest.mark.parametrize("positions", [[1, 2, 3], [0, 1], [0, 2, 0], [0, 0, 2], [], [[0, 1, 2]]])
def test_positions_must_count(positions):
    row = {"tokens": [5, 6, 7], "loss_mask": [0, 1, 0], "positions": positions}
    with pytest.raises(ValueError, match="positions must be one for each of the 3 tokens"):
        list(from_packed([row]))


@pytest.mark.property
@given(st.data())
def test_packing_and_splitting_is_the_identity(data):
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    rng = np.random.default_rng(sum(lengths))
    samples = [
        sample(
            i,
            rng.integers(0, 99, n),
            rng.integers(0, 2, n),
            advantage=rng.random(n, np.float32),
            sample_id=np.int64(i * 7),
        )
        for i, n in enumerate(lengths)
    ]
    row = {
        "tokens": np.concatenate([s.tokens for s in samples]),
        "loss_mask": np.concatenate([s.loss_mask for s in samples]),
        "advantage": np.concatenate([s.fields["advantage"] for s in samples]),
        "sample_id": [s.fields["sample_id"] for s in samples],
    }
    how = data.draw(st.sampled_from(["boundaries", "positions"]))
    if how == "positions":
        row["positions"] = np.concatenate([np.arange(n) for n in lengths])
    else:
        row["boundaries"] = np.cumsum([0, *lengths])
    assert list(from_packed([row], [ADVANTAGE, SAMPLE_ID])) == samples


def test_memory_source():
    source = MemorySource(from_rows([([1, 2], [0, 1]), ([3, 4, 5], [1, 1, 1])]))
    assert source.lengths.tolist() == [2, 3]
    assert source.loss_tokens.tolist() == [1, 2]
    assert source[-1] == sample(1, [3, 4, 5], [1, 1, 1])
    assert source[np.int64(0)].id == 0
    with pytest.raises(IndexError, match="sequence 2 is out of range: the source has 2"):
        source[2]
    assert [s.id for s in source] == [0, 1]


def test_draws_by_hand():
    assert list(islice(draw_order([3, 1], seed=0), 8)) == [0, 0, 0, 1] * 2
    assert list(islice(draw_order([1], seed=0), 3)) == [0, 0, 0]
    orders = {tuple(islice(draw_order([1, 1, 1], seed=seed), 6)) for seed in range(20)}
    assert len(orders) > 1


@pytest.mark.property
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=7), st.integers(0, 9))
def test_after_any_draw_each_share_is_within_one(weights, seed):
    shares = [Fraction(repr(weight)) for weight in weights]
    counts = [0] * len(weights)
    for n, due in enumerate(islice(draw_order(weights, seed=seed), 300), start=1):
        counts[due] += 1
        for share, count in zip(shares, counts, strict=True):
            assert abs(count - n * share / sum(shares)) < 1


@pytest.mark.property
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(0, 99),
)
def test_an_epoch_ends_when_all_were_drawn_or_before_one_repeats(sources, seed):
    sizes, weights = zip(*sources, strict=True)
    made = [numbered(100 * i, size) for i, size in enumerate(sizes)]
    every = Mixture(made, weights, seed=seed)
    drawn = [int(every[i].tokens[0]) for i in range(len(every))]
    assert set(drawn) == {100 * i + k for i, size in enumerate(sizes) for k in range(size)}
    assert drawn[-1] not in drawn[:-1], "the last draw is the first of its sequence"
    for i, size in enumerate(sizes):
        mine = [d for d in drawn if d // 100 == i]
        for start in range(0, len(mine), size):
            assert len(set(mine[start : start + size])) == len(mine[start : start + size])
    first = Mixture(made, weights, seed=seed, ends="first")
    drawn = [int(first[i].tokens[0]) for i in range(len(first))]
    assert len(set(drawn)) == len(drawn)
    assert any(sum(d // 100 == i for d in drawn) == size for i, size in enumerate(sizes))
    assert np.array_equal(first.drawn_from, every.drawn_from[: len(first)])


def test_mixture_is_a_source_like_any_other():
    a = MemorySource(from_rows([([1, 2], [0, 1]), ([3, 4, 5], [0, 1, 1])]))
    b = MemorySource(from_rows([([7], [0])]))
    mixture = Mixture([a, b], [2, 1], seed=4)
    for i, got in enumerate(mixture[i] for i in range(len(mixture))):
        assert got.id == i
        assert got.length == mixture.lengths[i]
        assert got.loss_tokens == mixture.loss_tokens[i]
        assert mixture.mask_head(i, 2).tolist() == got.loss_mask[:2].tolist()
    assert sorted(mixture.lengths.tolist()) == [1, 2, 3]


def test_epochs_and_seeds_change_the_order_alone():
    source = numbered(0, 50)
    orders = [
        Mixture([source], [1], seed=seed, epoch=epoch).drawn_index.tolist()
        for seed, epoch in [(0, 0), (0, 1), (1, 0), (0, 0)]
    ]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert all(sorted(order) == list(range(50)) for order in orders)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1], "2 sources, but 1 weights"),
        ([1, 0], "the weight of source 1 is 0; it must be above 0"),
        ([1, -1], "source 1 is -1"),
        ([float("nan"), 1], "source 0 is nan"),
        ([1, float("inf")], "source 1 is inf"),
    ],
)
def test_bad_weights(weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture([numbered(0, 1), numbered(0, 1)], weights, seed=0)


def test_bad_mixtures():
    other = MemorySource(from_rows([([1], [1], {"sample_id": 1})], [SAMPLE_ID]), [SAMPLE_ID])
    with pytest.raises(
        ValueError, match="the extra fields of source 1 differ from those of source 0"
    ):
        Mixture([numbered(0, 1), other], [1, 1], seed=0)
    with pytest.raises(ValueError, match="source 1 is empty"):
        Mixture([numbered(0, 1), numbered(0, 0)], [1, 1], seed=0)
    with pytest.raises(ValueError, match="ends is 'last'"):
        Mixture([numbered(0, 1)], [1], seed=0, ends="last")
    with pytest.raises(ValueError, match="0 sources"):
        Mixture([], [], seed=0)


def test_streams_end_when_the_due_one_ends():
    a = from_rows(([i, 0], [0, 1]) for i in range(5))
    b = from_rows(([100 + i, 0], [0, 1]) for i in range(100))
    mixed = list(mix_streams([a, b], [3, 1], seed=0))
    assert [s.tokens[0] for s in mixed] == [0, 1, 2, 100, 3, 4]
    assert [s.id for s in mixed] == list(range(6))
