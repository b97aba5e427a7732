"""The plain loop is short, learns, and its loss is that of each sequence alone."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from examples import plain_loop

from longshore import Decoder, init_decoder, make_plan, pack_lane, preset

FILE = Path(plain_loop.__file__)


def test_it_has_at_most_40_lines_and_learns(capsys):
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 40
    runpy.run_path(str(FILE), run_name="__main__")
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert len(losses) == 10
    assert losses[-1] < 0.7 * losses[0]


def test_its_loss_is_that_of_each_sequence_alone():
    samples = plain_loop.draw(2)
    model = Decoder(preset("tiny-qwen3")).double()
    init_decoder(model, seed=0)
    plan = make_plan([sample.length for sample in samples], lanes=1, capacity=512)
    assert plan.stats.rounds > 1
    with torch.no_grad():
        packed = sum(
            model(b.token_ids, b.ctx, b.targets.labels).values.where(b.targets.loss_mask, 0).sum()
            / b.counts.main
            for b in pack_lane(plan, 0, samples)
        )
        total, count = 0.0, 0
        for sample in samples:
            ids = torch.from_numpy(sample.tokens).long()
            labels = torch.cat([ids[1:], torch.tensor([-100])])
            total += model(ids, labels=labels).values.sum()
            count += len(ids) - 1
    assert packed.item() == pytest.approx((total / count).item(), rel=1e-12)
