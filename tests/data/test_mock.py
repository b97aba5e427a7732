import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.data.mock import MockSource

LOGNORMAL = {
    "mode": "distribution",
    "type": "lognormal",
    "min_seq_len": 16,
    "max_seq_len": 65536,
    "mean_seq_len": 2048,
    "lognormal_sigma": 1.1,
}
UNIFORM = {"mode": "distribution", "type": "uniform", "min_seq_len": 3, "max_seq_len": 5}
FIXED = {"mode": "distribution", "type": "fixed", "mean_seq_len": 40}


def mock(config, count=100, vocab_size=100, seed=0):
    return MockSource(config, count=count, vocab_size=vocab_size, seed=seed)


def test_lognormal_lengths():
    lengths = mock({**LOGNORMAL, "max_seq_len": 10**9, "min_seq_len": 1}, count=200_000).lengths
    assert lengths.mean() == pytest.approx(2048, rel=0.02)
    assert np.median(lengths) == pytest.approx(2048 * np.exp(-(1.1**2) / 2), rel=0.02)
    clipped = mock({**LOGNORMAL, "min_seq_len": 500, "max_seq_len": 3000}, count=10_000).lengths
    assert (clipped.min(), clipped.max()) == (500, 3000)


def test_other_lengths():
    assert set(mock(UNIFORM).lengths.tolist()) == {3, 4, 5}
    assert set(mock(FIXED).lengths.tolist()) == {40}


def test_made_up_sequences_never_change():
    source = mock({**UNIFORM, "max_seq_len": 5000}, count=8, seed=4)
    assert source.lengths.tolist() == [3, 2135, 4397, 752, 1900, 4933, 87, 4896]
    assert source[2].tokens[:12].tolist() == [34, 37, 40, 43, 46, 49, 52, 55, 58, 61, 0, 3]


def test_lengths_from_a_file(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("length\n7\n1\n300\n")
    config = {"mode": "file", "path": str(path)}
    assert mock(config, count=None).lengths.tolist() == [7, 1, 300]
    assert mock(config, count=5).lengths.tolist() == [7, 1, 300, 7, 1]
    assert mock(config, count=2).lengths.tolist() == [7, 1]
    assert mock(config, count=None)[1].length == 1
    with pytest.raises(ValueError, match="cannot be read"):
        mock({"mode": "file", "path": str(tmp_path / "none.csv")})


@pytest.mark.property
@given(st.integers(0, 2**63 - 1), st.integers(2, 300), st.integers(0, 99))
def test_any_sequence_by_index_alone(seed, vocab_size, index):
    source = mock(UNIFORM, vocab_size=vocab_size, seed=seed)
    again = mock(UNIFORM, vocab_size=vocab_size, seed=seed)
    sample = source[index]
    assert sample == again[index]
    assert sample.id == index
    assert sample.length == source.lengths[index]
    assert sample.loss_tokens == source.loss_tokens[index]
    assert source.mask_head(index, 4).tolist() == sample.loss_mask[:4].tolist()
    assert 0 <= sample.tokens.min() <= sample.tokens.max() < vocab_size


def test_sequences_differ():
    source, other = mock(FIXED), mock(FIXED, seed=1)
    assert len({source[i].tokens.tobytes() for i in range(100)}) == 100
    assert source[0] != other[0]


def test_content_can_be_learned():
    """What a model can learn: to count in the step of the two tokens before."""
    source = mock({**FIXED, "mean_seq_len": 1000}, vocab_size=1000)
    hits = []
    for i in range(20):
        tokens = source[i].tokens
        hits.append((tokens[2:] - tokens[1:-1] - tokens[1:-1] + tokens[:-2]) % 64 == 0)
    assert np.mean(hits) > 0.8
    steps = {int(np.bincount(np.diff(source[i].tokens) % 64).argmax()) for i in range(100)}
    assert steps == {1, 2, 3, 4}


def test_a_million_sequences_are_lengths_alone():
    source = mock(LOGNORMAL, count=1_000_000)
    held = [v for v in vars(source).values() if isinstance(v, np.ndarray)]
    assert sum(array.nbytes for array in held) <= 16_000_000
    assert source[999_999].length == source.lengths[999_999]
    with pytest.raises(IndexError):
        source[1_000_000]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "files"}, "mode is 'files'; it must be 'file' or 'distribution'"),
        ({"type": "normal"}, "type is 'normal'; it must be one of lognormal, uniform, fixed"),
        ({"type": ["uniform"]}, "type is"),
        ({"median": 3}, "unknown key 'median' for type 'lognormal'"),
        ({"type": "uniform"}, "unknown key 'mean_seq_len' for type 'uniform'"),
        ({"min_seq_len": 0}, "min_seq_len is 0; it must be a whole number from 1"),
        ({"min_seq_len": 1.5}, "min_seq_len is 1.5"),
        ({"min_seq_len": True}, "min_seq_len is True"),
        ({"max_seq_len": 8}, "min_seq_len is 16; it must be at most max_seq_len, which is 8"),
        ({"mean_seq_len": 0}, "mean_seq_len is 0"),
        ({"mean_seq_len": "2k"}, "mean_seq_len is '2k'; it must be a number"),
        ({"lognormal_sigma": -1}, "lognormal_sigma is -1; it must be finite and not negative"),
        ({"lognormal_sigma": float("nan")}, "lognormal_sigma is nan"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        mock({**LOGNORMAL, **change})


def test_missing_settings_are_named():
    for key in ("mean_seq_len", "lognormal_sigma", "min_seq_len"):
        with pytest.raises(ValueError, match=f"'{key}' is missing"):
            mock({k: v for k, v in LOGNORMAL.items() if k != key})
    with pytest.raises(ValueError, match="'path' is missing"):
        mock({"mode": "file"})
    with pytest.raises(ValueError, match=r"needs data\.count"):
        mock(LOGNORMAL, count=None)
    with pytest.raises(ValueError, match="vocab_size is 1"):
        mock(LOGNORMAL, vocab_size=1)
    with pytest.raises(ValueError, match="seed is -1"):
        mock(LOGNORMAL, seed=-1)
    with pytest.raises(ValueError, match="count is 0"):
        mock(LOGNORMAL, count=0)
