"""What a failed step says of tokens on other ranks."""

from types import SimpleNamespace

import torch

from longshore.train import record
from longshore.train.record import FaultyToken


def test_a_field_of_another_rank_has_no_name(monkeypatch):
    """This rank's is advantages; the other's may be another one."""
    theirs = torch.tensor([[1, 9, 4, 0, 1]])
    monkeypatch.setattr(record, "gather", lambda mine, _: torch.cat([mine, theirs]))
    groups = SimpleNamespace(world=None)
    stepper = SimpleNamespace(topology=SimpleNamespace(device=torch.device("cpu"), groups=groups))
    mine = FaultyToken(3, 2, "gradient", "advantages")
    other = FaultyToken(9, 4, "value", "a field")
    assert record._over_ranks([mine], stepper) == [mine, other]
