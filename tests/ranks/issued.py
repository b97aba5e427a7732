"""What a model really issues on gloo ranks: our collectives, and all of torch's, FSDP's too."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from tests.ranks.composed import ranks_of
from tests.ranks.piped import stage_batches, staged, traced
from tests.ranks.spine import MTP_WEIGHT, batches_of, lanes_of, make_samples, sharded
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from longshore.distributed import collectives
from longshore.parallel.apply import Choices
from longshore.parallel.fsdp import begin_round
from longshore.parallel.pipeline.stages import stages_of
from longshore.parallel.pipeline.trace import Operation, check_issued, trace
from longshore.plan import Plan, make_plan
from longshore.plan.layout import one_stage, parse_layout
from longshore.plan.order import Action
from longshore.train.loss import make_loss
from longshore.train.step import Stepper

KINDS = {
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "recv_": "receive",
}
ITEM = 8


class TorchCollectives(TorchDispatchMode):
    """Lists (kind, ranks, bytes of the whole tensor) of every collective of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, tuple[int, ...], int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed)))
            flat = [t for arg in args for t in (arg if isinstance(arg, list) else [arg])]
            amount = max(t.nbytes for t in flat if isinstance(t, torch.Tensor))
            kind = func._schema.name.removeprefix("c10d::")
            self.log.append((KINDS.get(kind, kind), ranks, amount))
        return func(*args, **(kwargs or {}))


def check_steps(cases: Sequence[tuple]) -> int:
    """Each case by Stepper.gradients, what collectives.py records compared; how many there were."""
    compared = 0
    with lanes_of(4) as (topology, groups):
        for config, plan, choices in cases:
            model = sharded(config, topology, groups, choices)
            expected = expected_of(config, plan, choices, topology)
            stepper = Stepper(model, None, topology, choices.mode, make_loss(), 0.0, MTP_WEIGHT)
            batches = batches_of(plan, make_samples(plan), topology.lane, len(config.mtp))
            with collectives.recorded() as issued:
                stepper.gradients(batches, max(1, batches[0].counts.main))
            check_issued(expected, issued)
            compared += len(issued)
    return compared


def check_in_flight(cases: Sequence[tuple], order: Sequence[Action]) -> int:
    """With rounds in flight as in a pipeline, and all collectives of torch, FSDP's too."""
    compared = 0
    with lanes_of(4) as (topology, groups):
        for config, plan, choices in cases:
            model = sharded(config, topology, groups, choices)
            expected = expected_of(config, plan, choices, topology, queues=[tuple(order)])
            with TorchCollectives() as everything:
                run_in_order(model, plan, topology, choices, order)
            check_everything(expected, everything.log, fsdp_sizes({0: model}))
            compared += len(expected)
    return compared


def check_composed(checks: Sequence[tuple[dict[str, int], Sequence[tuple]]]) -> int:
    """Cases on several axes; how many operations there were."""
    compared = 0
    for axes, cases in checks:
        with ranks_of(**axes) as (topology, groups):
            compared += sum(check_case(*case, topology, groups) for case in cases)
    return compared


def check_case(
    config, text: str, choices: Choices, topology, groups, *, capacity=32, max_cp=None
) -> int:
    """All collectives of torch, messages included.

    Ours are compared with what collectives.py recorded, too: see Stepper.
    """
    layers, depths = len(config.layers), len(config.mtp)
    layout = one_stage(layers=layers, depths=depths)
    if text:
        layout = parse_layout(text, pp=topology.pp, layers=layers, depths=depths)
        layout = replace(layout, id_layers=config.hashed_layers)
    plan = make_plan(
        [3, 40, 17, 5, 60, 2, 40],
        lanes=topology.lanes,
        capacity=capacity,
        pp=topology.pp,
        vpp=layout.vpp,
        tp=topology.tp,
        max_cp=max_cp,
    )
    model = staged(config, layout, topology, groups, choices)
    expected = trace(plan, layout, topology.rank, model=traced(config, choices), axes=topology)
    everything = TorchCollectives()
    check = AtTheEndOfRounds(expected, everything, fsdp_sizes(stages_of(model)))
    loss = make_loss()
    stepper = Stepper(model, None, topology, choices.mode, loss, 0.0, MTP_WEIGHT, trace=check)
    batches = stage_batches(plan, make_samples(plan), topology, layout)
    with everything:
        stepper.gradients(batches, max(1, batches[0].counts.main), plan=plan)
    assert check.calls == 1
    return len(expected)


class AtTheEndOfRounds:
    """Called by a Stepper after the rounds, before it sums gradients over TP."""

    def __init__(self, expected, everything: TorchCollectives, sizes) -> None:
        self.expected, self.everything, self.sizes = expected, everything, sizes
        self.calls = 0

    def __call__(self, plan: Plan) -> list[Operation]:
        self.calls += 1
        check_everything(self.expected, self.everything.log, self.sizes)
        return self.expected


def expected_of(config, plan: Plan, choices: Choices, topology, queues=None) -> list[Operation]:
    layout = one_stage(layers=len(config.layers), depths=len(config.mtp))
    model = traced(config, choices)
    return trace(plan, layout, topology.rank, model=model, axes=topology, queues=queues)


def run_in_order(model, plan: Plan, topology, choices: Choices, order: Sequence[Action]) -> None:
    depths = len(model.config.mtp)
    batches = batches_of(plan, make_samples(plan), topology.lane, depths)
    stepper = Stepper(model, None, topology, choices.mode, make_loss(), 0.0, MTP_WEIGHT)
    losses = {}
    for action in order:
        batch = batches[action.round]
        if action.kind == "forward":
            out = model(batch.token_ids, batch.ctx, batch.targets.labels, batch.mtp)
            losses[action.round] = stepper.weighted(stepper.terms(out, batch, 10.0)[0])
        else:
            begin_round(model, mode=choices.mode, is_last=batch.is_last)
            losses.pop(action.round).backward()


def check_everything(
    expected: Sequence[Operation],
    issued: Sequence[tuple[str, tuple[int, ...], int]],
    sizes: dict[str, tuple[int, int]],
) -> None:
    """The order of everything; FSDP's collectives have the size of the module they are traced for.

    sizes: see fsdp_sizes. A trace leaves out groups of one rank, in which FSDP may call all_reduce.
    """
    issued = [real for real in issued if len(real[1]) > 1]
    for number, (operation, real) in enumerate(zip(expected, issued, strict=False)):
        kind, group, amount = operation.kind, operation.group, None
        if kind.startswith("fsdp "):
            bare, padded = sizes[operation.what.split(", ")[-1]]
            assert operation.bytes == bare, operation
            kind = kind.removeprefix("fsdp ")
            amount = bare if kind == "all_reduce" else padded
        elif kind in ("send", "receive"):
            # Whoever issues a message does so in the group of its lane's pipeline ranks.
            amount, group = operation.bytes, real[1]
            assert set(operation.group) <= set(group), operation
        kind = "all_reduce" if kind == "sum_over" else kind
        same = (kind, group) == real[:2] and amount in (None, real[2])
        assert same, f"operation {number}: {operation}; issued was {real}"
    assert len(expected) == len(issued)


def fsdp_sizes(parts: Mapping[int, torch.nn.Module]) -> dict[str, tuple[int, int]]:
    """By the trace's names: bytes of each wrapped module's own parameters, bare and padded."""
    sizes = {}
    for stage, part in parts.items():
        wrapped = {name: m for name, m in part.named_modules() if isinstance(m, FSDPModule)}
        for name, module in wrapped.items():
            inside = {
                id(p)
                for other, below in wrapped.items()
                if other != name and other.startswith(f"{name}." if name else "")
                for p in below.parameters()
            }
            own = [p for p in module.parameters() if id(p) not in inside]
            bare = sum(p.shape.numel() for p in own)
            padded = sum(padded_size(p) for p in own)
            sizes[trace_name(name, stage)] = (bare * ITEM, padded * ITEM)
    return sizes


def padded_size(parameter) -> int:
    """Values of all shards; the last axis of the mesh is the one that splits."""
    mesh, dim = parameter.device_mesh, parameter.placements[-1].dim
    ranks, size = mesh.size(mesh.ndim - 1), parameter.shape[dim]
    return parameter.shape.numel() // size * -(-size // ranks) * ranks


def trace_name(name: str, stage: int) -> str:
    """layers.2.mlp.router as the trace names it: layer 2 router."""
    if not name:
        return f"stage {stage}'s ends"
    if name == "collapse":
        return f"stage {stage}'s collapse"
    group, number, *rest = name.split(".")
    start = f"layer {number}" if group == "layers" else f"depth {int(number) + 1}"
    ends = {"router": " router", "per_head": " decay", "experts": " experts", "biases": " biases"}
    ends |= {"mixer_hyper": " mixer hyper", "mlp_hyper": " mlp hyper", "collapse": " collapse"}
    return start + (ends[rest[-1]] if rest else "")
