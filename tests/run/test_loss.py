"""Losses and data that do not fit are refused before the first step."""

import pytest

from longshore.config.load import load_config
from longshore.data.pairs import PAIR_FIELDS
from longshore.data.source import MemorySource, from_rows
from longshore.run.loss import data_loss


def row(pair: int, sign: int, *, mask=(0, 1, 1)) -> dict:
    return {"tokens": [5, 6, 7], "loss_mask": list(mask), "pair": pair, "sign": sign}


def source_of(*rows: dict) -> MemorySource:
    return MemorySource(from_rows(rows, PAIR_FIELDS), PAIR_FIELDS)


PAIRS = (row(3, 1), row(8, -1), row(3, -1), row(8, 1))


def asked(*words: str):
    return load_config(None, words)


@pytest.mark.parametrize("loss", ["", "cross_entropy"])
def test_nobody_is_fine_tuned_on_rejected_answers(loss):
    config = asked(f"train.loss={loss}")
    with pytest.raises(ValueError, match=r"has pairs of chosen and rejected .* set train.loss=dpo"):
        data_loss(config, source_of(*PAIRS))
    assert data_loss(config, MemorySource([])).is_plain
    own = asked("train.loss=tests.train.losses:mean_of_sequences")
    assert data_loss(own, source_of(*PAIRS)).call.of_sequences
