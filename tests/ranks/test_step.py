"""The step on lanes: weighted fine-tuning, steps without loss tokens, clipping."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.data.plans import Sample, counts_of
from tests.ranks.harness import run_ranks
from tests.ranks.spine import batches_of, dense, exact, lanes_of, make_samples, sharded
from tests.ranks.steps import trained

from longshore.arch.decoder import LoRAConfig
from longshore.data.pack import cut_shards, lane_cuts, pack_step
from longshore.data.source import Field, Place
from longshore.data.steps import Step
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder
from longshore.parallel.fsdp import keep_gathered_memory
from longshore.plan import make_plan
from longshore.train.losses import make_loss
from longshore.train.optimizer import Schedule, make_optimizer
from longshore.train.step import Stepper
from longshore.train.supervision import RunError

LENGTHS = [40, 7, 1, 2, 16]


WEIGHT = Field("weight", "target", "float64")


def weighted_samples(plan) -> dict[int, Sample]:
    random = np.random.default_rng(4)
    return {
        place: replace(sample, fields={"weight": random.random(len(sample.tokens))})
        for place, sample in make_samples(plan).items()
    }


def on_lanes(lanes: int, loss: str, count: str, clip: float, masked: bool) -> tuple:
    """Loss, norm and parameters after one step."""
    plan = make_plan(LENGTHS, lanes=lanes, capacity=64 // lanes + 8)
    samples = weighted_samples(plan)
    if masked:
        samples = {i: replace(s, loss_mask=np.zeros_like(s.loss_mask)) for i, s in samples.items()}
    with lanes_of(lanes) as (topology, groups):
        choices = exact(mode="zero2" if lanes > 1 else "none")
        model = sharded(dense(4), topology, groups, choices)
        optimizer = make_optimizer(model, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
        stepper = Stepper(model, optimizer, topology, choices.mode, make_loss(loss, count), clip)
        shards = cut_shards(plan, samples, lane_cuts(plan, topology.lane), fields=(WEIGHT,))
        batches = pack_step(plan, topology.lane, shards, counts=counts_of(samples, 0))
        done = stepper.step(batches, lr=0.01)
        after = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    numbers = None if done is None else (done.losses[0].item(), done.grad_norm.item())
    return numbers, after


def alone(clip: float) -> tuple:
    """The weighted mean of all sequences' losses, by hand."""
    model = Decoder(dense(4)).double()
    init_decoder(model, seed=3)
    samples = weighted_samples(make_plan(LENGTHS, lanes=1, capacity=72))
    total, weights = 0.0, 0.0
    for sample in samples.values():
        tokens = torch.from_numpy(sample.tokens).long()
        labels = torch.cat([tokens[1:], torch.tensor([-100])])
        weight = torch.from_numpy(np.append((sample.fields["weight"] * sample.loss_mask)[1:], 0.0))
        total = total + (model(tokens, None, labels).values * weight).sum()
        weights += weight.sum()
    loss = total / weights
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95)).step()
    return (loss.item(), norm.item()), dict(model.named_parameters())


@pytest.mark.parametrize(("lanes", "loss"), [(1, "weighted"), (4, "divided")])
def test_weighted_fine_tuning(lanes: int, loss: str) -> None:
    names = (f"tests.train.losses:{loss}", "tests.train.losses:weight")
    (numbers, after), *others = run_ranks(lanes, on_lanes, lanes, *names, 0.5, False)
    want, parameters = alone(0.5)
    assert want[1] > 0.5, "clipping must bite"
    assert numbers == pytest.approx(want, rel=1e-9)
    for name, parameter in parameters.items():
        # AdamW's own clip adds 1e-6 to the norm, so the last digits differ.
        assert torch.allclose(after[name], parameter, rtol=1e-7, atol=1e-9), name
    assert all(numbers == other for other, _ in others)


@pytest.mark.parametrize("count", ["tokens", "sequences", "tests.train.losses:weight"])
def test_a_step_without_loss_tokens_is_skipped(count: str) -> None:
    start = {name: p.detach() for name, p in Decoder(dense(4)).double().named_parameters()}
    fresh = Decoder(dense(4)).double()
    init_decoder(fresh, seed=3)
    for numbers, after in run_ranks(2, on_lanes, 2, "", count, 1.0, True):
        assert numbers is None
        for name, parameter in fresh.named_parameters():
            assert torch.equal(after[name], parameter), name
    assert start.keys() == {name for name, _ in fresh.named_parameters()}


def first_steps(lanes: int, losses: list[str]) -> list[str]:
    """For each loss what ends a run of one step, or "" if it is trained."""
    plan = make_plan([3], lanes=lanes, capacity=16)
    samples, ends = make_samples(plan), []
    with lanes_of(lanes) as (topology, groups):
        batches = batches_of(plan, samples, topology.lane)
        assert topology.lane == 0 or not any(b.targets.loss_mask.any() for b in batches)
        for name in losses:
            config = replace(dense(4), lora=LoRAConfig(rank=2, alpha=4.0)) if name else dense(4)
            mode = "zero2" if lanes > 1 else "none"
            model = sharded(config, topology, groups, exact(mode=mode))
            optimizer = make_optimizer(model, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8)
            loss = make_loss(name and f"tests.train.losses:{name}")
            stepper = Stepper(model, optimizer, topology, mode, loss, 1.0)
            schedule = Schedule(kind="constant", lr=1e-3, warmup=0, updates=1, min_lr=0.0)
            try:
                (metrics,) = trained(stepper, [Step(plan, batches, Place())], schedule)
                assert metrics.grad_norm > 0
                ends.append("")
            except RunError as error:
                ends.append(str(error))
    return ends


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_loss_without_gradient_ends_the_run_at_its_first_step(lanes: int) -> None:
    """On all lanes, of which the second has no token; not where a frozen model is adapted."""
    wrong = ["detached", "whole_numbers", "detached_head", "detached_sequences"]
    right = ["", "of_sequences", "constant_without_tokens"]
    for ends in run_ranks(lanes, first_steps, lanes, [*wrong, *right]):
        assert ends[len(wrong) :] == [""] * len(right)
        for name, end in zip(wrong, ends, strict=False):
            said = f"step 1: train.loss=tests.train.losses:{name} returned values without a grad"
            assert end.startswith(said)


def addresses(keep: bool) -> tuple[list[set[int]], float]:
    """Where each step's gathered parameters lie, and the last loss of three steps."""
    plan = make_plan([9, 5, 7, 8], lanes=2, capacity=16)
    samples, places = make_samples(plan), []
    with lanes_of(2) as (topology, groups):
        model = sharded(dense(4), topology, groups, exact(mode="zero2"))
        if keep:
            keep_gathered_memory(model)
        block = next(iter(model.layers.values()))
        block.mixer.register_forward_pre_hook(
            lambda mixer, args: places[-1].add(mixer.q_proj.weight.data_ptr())
        )
        optimizer = make_optimizer(model, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8)
        stepper = Stepper(model, optimizer, topology, "zero2", make_loss(), 0.0)
        for _ in range(3):
            places.append(set())
            result = stepper.step(batches_of(plan, samples, topology.lane), lr=1e-2)
            # What FSDP would give back is taken by others.
            taken = [torch.empty(1 << 12, dtype=torch.float64) for _ in range(64)]
            del taken
        assert result is not None
        return places, result.losses[0].item()


def test_gathered_parameters_stay_where_they_are() -> None:
    """As CUDA graphs need them, with the values of every update."""
    kept, loss = run_ranks(2, addresses, True)[0]
    _, plain = run_ranks(2, addresses, False)[0]
    assert len(set().union(*kept)) == 1
    assert loss == plain
