import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.data.batches import BLOCK, Batches, BatchSize, Place, shuffled

# Never change these: a run that is resumed relies on them.
GOLDEN = {
    (4, 0, 0): [0, 3, 2, 1],
    (12, 0, 0): [0, 10, 7, 5, 3, 6, 9, 11, 4, 2, 1, 8],
    (12, 0, 1): [2, 9, 7, 3, 8, 0, 5, 10, 6, 11, 4, 1],
    (12, 1, 0): [9, 8, 7, 11, 4, 10, 2, 0, 3, 6, 5, 1],
    (8, 2**63 - 1, 2): [3, 1, 0, 5, 6, 4, 2, 7],
    (1, 5): [0],
    (0, 5): [],
}


@pytest.mark.parametrize("case", GOLDEN)
def test_an_order_never_changes(case):
    assert shuffled(*case).tolist() == GOLDEN[case]


def test_an_epoch_is_in_this_order():
    batches = Batches(np.ones(12, dtype=np.int64), BatchSize("sequences", 12), seed=0)
    for epoch in (0, 1):
        _, places = next(batches.from_place(Place(epoch=epoch)))
        assert places.tolist() == GOLDEN[12, 0, epoch]
        assert places.dtype == np.int64


def mix(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 % 2**64
    z ^= z >> 27
    z = z * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def twin(size: int, *key: int) -> list[int]:
    """In Python's own integers, as the module's text has it."""
    gamma, state = 0x9E3779B97F4A7C15, len(key)
    for part in key:
        state = mix((state + gamma) % 2**64 ^ part)
    cut = max(size - 1, 0).bit_length()
    numbers = [mix((state + (i + 1) * gamma) % 2**64) >> cut << cut | i for i in range(size)]
    return [number & (1 << cut) - 1 for number in sorted(numbers)]


def test_numbers_are_those_of_splitmix64():
    """The first of its numbers with state 0, as its authors give it."""
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


@pytest.mark.property
@given(st.integers(0, 200), st.lists(st.integers(0, 2**64 - 1), max_size=4))
def test_as_the_twin_does(size, key):
    assert shuffled(size, *key).tolist() == twin(size, *key)


def test_more_than_one_block():
    size = BLOCK + 3
    assert shuffled(size, 7).tolist() == twin(size, 7)


def test_it_looks_shuffled():
    """Every place comes early as often as late, and neighbours are seldom beside each other."""
    orders = np.array([shuffled(100, 0, epoch) for epoch in range(2000)])
    mean = orders.mean(axis=0)  # of 2000 draws each: 49.5 with a deviation of 0.65
    assert abs(mean - 49.5).max() < 3
    assert (abs(np.diff(orders, axis=1)) == 1).mean() == pytest.approx(0.02, abs=0.002)


def test_a_key_out_of_range_is_refused():
    with pytest.raises(ValueError, match="has -1; it must lie between 0 and"):
        shuffled(3, -1)
