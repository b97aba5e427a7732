"""Every ready loss from mixed plans is that of one sequence at a time, gradients included."""

import pytest
import torch
import torch.distributed as dist
from tests.data.plans import counts_of
from tests.data.stage_batch import only
from tests.ranks.composed import own_gradients, ranks_of, whole_tensors
from tests.ranks.harness import run_ranks
from tests.ranks.losses_by_hand import BY_HAND, FIELDS, alone, samples_with_fields
from tests.ranks.piped import deep, staged
from tests.ranks.spine import exact

from longshore.data.pack import cut_shards, lane_cuts, pack_step
from longshore.parallel.pipeline import EmbeddingCopies
from longshore.plan import make_plan
from longshore.plan.layout import one_stage, parse_layout
from longshore.train.losses import make_loss
from longshore.train.step import Stepper

LENGTHS = [23, 2, 7, 40, 5, 9, 18, 3]
LEAVES_A_LANE_EMPTY = [57, 18, 10, 43]
"""On 4 lanes: CP 4, then CP 4, then CP 2, CP 1 and nothing."""
LIMIT = 1e-9
READS_HEAD = ("distill", "tests.train.losses:entropy_by_logits")


def outcome(name, config, plan, samples, topology, groups, *, mode):
    """The step's loss, gradients and metrics, as all ranks have them together."""
    layers = len(config.layers)
    layout = one_stage(layers=layers, depths=0)
    if topology.pp > 1:
        layout = parse_layout("Et|tL", pp=2, layers=layers)
    model = staged(config, layout, topology, groups, exact(mode=mode))
    copies = EmbeddingCopies(model, topology) if topology.pp > 1 else None
    loss = make_loss(name.split()[0], "auto", BY_HAND[name][1])
    stepper = Stepper(
        model,
        None,
        topology,
        mode,
        loss,
        0.0,
        copies=copies,
        trace=True,
    )
    shards = cut_shards(plan, samples, lane_cuts(plan, topology.lane), fields=FIELDS)
    batches = pack_step(plan, topology.lane, shards, counts=counts_of(samples, 0))
    batches = [only(batch, layout.inputs(topology.pp_rank)) for batch in batches]
    divisor = loss.divisor(batches, topology.groups)
    losses, _, rounds = stepper.gradients(batches, divisor, plan=plan)
    assert all(int(row) == -1 for faults in rounds.faults if faults for row in faults)
    mine = torch.cat([losses, rounds.totals])
    mine = mine if topology.tp_rank == 0 else torch.zeros_like(mine)
    dist.all_reduce(mine)
    totals = mine[len(losses) :].tolist()
    metrics = [a / b for a, b in zip(totals[2::2], totals[3::2], strict=True)]
    parts = [None] * topology.world_size
    dist.all_gather_object(parts, own_gradients(model))
    if copies is not None:
        copies.close()
    whole = {k.split()[1]: v for k, v in whole_tensors(parts).items()}
    return mine[0].item(), whole, dict(zip(loss.metrics, metrics, strict=True))


def differences(name: str, got, want) -> list[str]:
    (loss, gradients, metrics), (wanted, by_name, by_hand) = got, want
    faults = [] if abs(loss - wanted) <= LIMIT * abs(wanted) else [f"{name}: {loss}, not {wanted}"]
    assert gradients.keys() == by_name.keys()
    for key, expected in by_name.items():
        error = (gradients[key] - expected).abs().max().item() / expected.abs().max().item()
        if not error <= LIMIT:
            faults.append(f"{name}: {key} is off by {error:.1e}")
    for key, expected in by_hand.items():
        if not abs(metrics[key] - expected) <= LIMIT * abs(expected):
            faults.append(f"{name}: {key} is {metrics[key]}, not {expected}")
    return faults if not by_hand or [*metrics] == [*by_hand] else [*faults, f"{name}: {metrics}"]


def compare(axes: dict, mode: str, policy: str, names: list[str]) -> list[str]:
    """On rank 0, what differs from the loops by hand."""
    config = deep(2, kv_heads=4)
    options = {"pp": axes.get("pp", 1), "align": axes.get("tp", 1)}
    lanes = axes["lanes"]
    lengths = LEAVES_A_LANE_EMPTY if (lanes, policy) == (4, "mixed") else LENGTHS
    plan = make_plan(lengths, lanes=lanes, capacity=64 // lanes, policy=policy, **options)
    assert max(pack.cp_size for _, pack in plan.packs()) == lanes
    if lengths is LEAVES_A_LANE_EMPTY:
        assert sum(pack.cp_size for pack in plan.rounds[-1].packs) < lanes
    assert len(plan.rounds) > 1
    samples, faults = samples_with_fields(plan), []
    with ranks_of(**axes) as (topology, groups):
        for name in names:
            got = outcome(name, config, plan, samples, topology, groups, mode=mode)
            if topology.rank == 0:
                faults += differences(name, got, alone(config, samples, name))
    return faults


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("axes", "mode", "policy"),
    [
        ({"lanes": 4}, "zero3", "mixed"),
        ({"lanes": 4}, "zero2", "dynamic"),
        ({"lanes": 2, "pp": 2}, "zero2", "mixed"),
        ({"lanes": 2, "tp": 2}, "zero3", "mixed"),
    ],
    ids=lambda value: (
        "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else value
    ),
)
def test_from_any_plan(axes: dict, mode: str, policy: str, is_fuzz: bool) -> None:
    if mode == "zero2" and "pp" not in axes and not is_fuzz:
        pytest.skip("in `make fuzz`")
    names = [name for name in BY_HAND if "tp" not in axes or name not in READS_HEAD]
    assert run_ranks(4, compare, axes, mode, policy, names)[0] == []


def refused() -> str:
    with pytest.raises(ValueError, match="distill") as error:
        compare({"lanes": 1, "tp": 2}, "zero2", "mixed", ["distill"])
    return str(error.value)


def test_tensor_parallel_ranks_have_no_whole_logits() -> None:
    assert run_ranks(2, refused)[0].startswith(
        "train.loss is distill, which reads hidden states or"
    )
