import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.data.batches import Batches, BatchSize, Place


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
