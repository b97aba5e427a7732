"""Losses and data that do not fit are refused before the first step."""

import pytest
from tests.data.rows import from_rows

from longshore.config.load import load_config
from longshore.data.columns import PAIR_FIELDS
from longshore.data.source import MemorySource
from longshore.run.data import check_pairs
from longshore.run.parts import data_loss


def row(pair: int, sign: int, *, mask=(0, 1, 1)) -> dict:
    return {"tokens": [5, 6, 7], "loss_mask": list(mask), "pair": pair, "sign": sign}


def source_of(*rows: dict) -> MemorySource:
    return MemorySource(from_rows(rows, PAIR_FIELDS), PAIR_FIELDS)


PAIRS = (row(3, 1), row(8, -1), row(3, -1), row(8, 1))


DPO = ("train.loss=dpo", "train.loss_options={reference_free=true}")


def asked(*words: str):
    return load_config(None, words)


@pytest.mark.parametrize("loss", ["", "cross_entropy"])
def test_nobody_is_fine_tuned_on_rejected_answers(loss):
    config = asked(f"train.loss={loss}")
    message = r"rejected answers, and with(out a)? train.loss.* both .* set train.loss=dpo"
    with pytest.raises(ValueError, match=message):
        data_loss(config, source_of(*PAIRS))
    assert data_loss(config, MemorySource([])).is_plain
    own = asked("train.loss=tests.train.losses:mean_of_sequences")
    assert data_loss(own, source_of(*PAIRS)).call.of_sequences


def test_pairs_as_dpo_wants_them():
    check_pairs(asked(*DPO), source_of(*PAIRS))
    check_pairs(asked(*DPO, "data.group=pair"), source_of(*PAIRS))
    check_pairs(asked(), source_of(row(3, 1)))
    hashes = [row(number, sign) for number in (2**62, 2**62 + 1, -(2**63)) for sign in (1, -1)]
    check_pairs(asked(*DPO), source_of(*hashes))  # float64 would make the first two one number


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        ((*PAIRS, row(9, 1)), (), "pair 9 has 1 sequence, of sign 1; give each"),
        ((*PAIRS, row(8, 1)), (), "pair 8 has 3 sequences, of sign -1, 1, 1; give each"),
        ((row(3, 1), row(3, 1)), (), "pair 3 has 2 sequences, of sign 1, 1; give each"),
        ((row(3, 2), row(3, -1)), (), "pair 3 has 2 sequences, of sign -1, 2; give each"),
        ((*PAIRS, *PAIRS), (), "pair 3 has 4 sequences, of sign -1, -1, 1, 1; give each"),
        ((*PAIRS, row(5, 1, mask=(1, 0, 0)), row(5, -1)), (), "sequence 4 has no loss token;"),
        (PAIRS, ("data.group=sign",), "pair 3 have different values of data.group; set data.group"),
    ],
)
def test_what_a_step_of_dpo_would_fail_on_is_refused_first(rows, words, said):
    with pytest.raises(ValueError, match=f"^data.path: train.loss=dpo compares .*{said}"):
        check_pairs(asked(*DPO, *words), source_of(*rows))
