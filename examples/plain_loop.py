"""A plain torch loop: plan, pack, model, loss, optimizer, without Longshore's Trainer.

In: token ids of any lengths. Out: a trained model, and a line for each step:

    step 2: loss 5.058, 2 rounds
"""

import numpy as np
import torch

from longshore import Decoder, TokenizedSample, init_decoder, make_plan, pack_lane, preset


def draw(step: int) -> list[TokenizedSample]:
    """Your data: here 16 sequences that count upwards, of very different lengths."""
    random = np.random.default_rng(step)
    lengths = random.lognormal(3.0, 1.2, 16).clip(4, 500).astype(int)
    rows = [(int(random.integers(64)) + np.arange(n, dtype=np.int32)) % 64 for n in lengths]
    return [TokenizedSample(i, row, np.ones(len(row), bool)) for i, row in enumerate(rows)]


if __name__ == "__main__":
    model = Decoder(preset("tiny-qwen3"))
    init_decoder(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, 11):
        samples, total = draw(step), 0.0
        plan = make_plan([sample.length for sample in samples], lanes=1, capacity=512)
        for batch in pack_lane(plan, 0, samples):  # one for each round
            assert batch.targets is not None  # only a pipeline's stages before the last have none
            nll = model(batch.token_ids, batch.ctx, batch.targets.labels).values
            # Divided by the loss tokens of the whole step: no mean of means.
            loss = nll.where(batch.targets.loss_mask, 0).sum() / batch.counts.main
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {total:.3f}, {plan.stats.rounds} rounds")
