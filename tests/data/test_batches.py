"""Which sequences each step takes, and the shuffle, which must never change."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.data.source import BLOCK, Batches, BatchSize, Place, shuffled


def take(batches, place, count):
    steps = batches.from_place(place)
    return [next(steps) for _ in range(count)]


def test_by_tokens_and_by_sequences():
    lengths = np.array([5, 1, 4, 2])
    by_tokens = Batches(lengths, BatchSize("tokens", 6), seed=0, shuffle=False)
    assert [places.tolist() for _, places in take(by_tokens, Place(), 2)] == [[0, 1], [2, 3]]
    by_count = Batches(lengths, BatchSize("sequences", 3), seed=0, shuffle=False)
    assert [places.tolist() for _, places in take(by_count, Place(), 3)] == [
        [0, 1, 2],
        [3],
        [0, 1, 2],
    ]


def test_by_tokens_ends_where_it_is_nearest():
    lengths = np.array([4, 10, 4, 1])
    batches = Batches(lengths, BatchSize("tokens", 6), seed=0, shuffle=False)
    # 4 is nearer to 6 than 14; 10 alone is more than 6; 4 + 1 is all that is left.
    assert [places.tolist() for _, places in take(batches, Place(), 3)] == [[0], [1], [2, 3]]


sizes = st.builds(BatchSize, st.sampled_from(["sequences", "tokens"]), st.integers(1, 60))
all_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)


@pytest.mark.property
@given(all_lengths, sizes, st.integers(0, 2**40))
def test_an_epoch_has_every_sequence_once(lengths, size, seed):
    batches = Batches(np.array(lengths), size, seed=seed)
    for epoch in range(2):
        steps = batches.steps(epoch)
        taken = take(batches, Place(epoch=epoch), steps)
        assert all(len(places) for _, places in taken)
        assert sorted(np.concatenate([places for _, places in taken])) == list(range(len(lengths)))
        assert [place.step_in_epoch for place, _ in taken] == list(range(steps))


def test_groups_by_hand():
    lengths, groups = np.array([5, 1, 4, 2]), np.array([7, 8, 7, 8])
    for size in (BatchSize("sequences", 2), BatchSize("tokens", 6)):
        batches = Batches(lengths, size, seed=0, shuffle=False, groups=groups)
        assert [places.tolist() for _, places in take(batches, Place(), 2)] == [[0, 2], [1, 3]]


@pytest.mark.property
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), min_size=1), sizes, st.booleans())
def test_a_group_is_in_one_step(rows, size, shuffle):
    lengths, groups = np.array(rows).T
    batches = Batches(lengths, size, seed=1, shuffle=shuffle, groups=groups)
    for epoch in range(2):
        taken = [places for _, places in take(batches, Place(epoch), batches.steps(epoch))]
        assert sorted(np.concatenate(taken)) == list(range(len(rows)))
        steps = {(int(groups[i]), step) for step, places in enumerate(taken) for i in places}
        assert len(steps) == len(set(groups.tolist()))


@pytest.mark.property
@given(all_lengths, sizes, st.integers(0, 9), st.integers(0, 30))
def test_resuming_anywhere_goes_on_as_before(lengths, size, seed, at):
    whole = take(Batches(np.array(lengths), size, seed=seed), Place(), at + 5)
    place = whole[at][0]
    again = take(Batches(np.array(lengths), size, seed=seed), place, 5)
    for (before, taken), (after, retaken) in zip(whole[at:], again, strict=True):
        assert before == after
        assert taken.tolist() == retaken.tolist()


def test_epochs_and_seeds_differ():
    lengths = np.ones(50, dtype=np.int64)

    def order(seed, epoch):
        batches = Batches(lengths, BatchSize("sequences", 50), seed=seed)
        return take(batches, Place(epoch=epoch), 1)[0][1].tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@pytest.mark.parametrize(("unit", "amount"), [("steps", 1), ("tokens", 0), ("sequences", -3)])
def test_bad_sizes_are_refused(unit, amount):
    with pytest.raises(ValueError, match="batch"):
        BatchSize(unit, amount)


def test_an_empty_source_is_refused():
    with pytest.raises(ValueError, match="no sequences"):
        Batches(np.array([], dtype=np.int64), BatchSize("tokens", 8), seed=0)


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
    with pytest.raises(ValueError, match="has -1; it must be from 0 to"):
        shuffled(3, -1)
