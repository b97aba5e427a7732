import pickle
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.rows import from_rows

from longshore.data.source import (
    Field,
    MemorySource,
    Mixture,
    SampleError,
    TokenizedSample,
    draw_order,
)

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


@pytest.mark.slow
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
def test_an_epoch_ends_when_all_were_drawn(sources, seed):
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


def test_seeds_change_the_order_alone():
    source = numbered(0, 50)
    orders = [Mixture([source], [1], seed=seed).drawn_index.tolist() for seed in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
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
    with pytest.raises(ValueError, match="0 sources"):
        Mixture([], [], seed=0)
