"""Hyper-connections, experts by token ids and mixers' own losses on lanes, stages and TP ranks."""

from dataclasses import replace

import pytest
from tests.parallel.own_loss import OwnLossConfig
from tests.ranks.composed import composed, ranks_of
from tests.ranks.harness import run_ranks
from tests.ranks.issued import check_case
from tests.ranks.piped import error_of
from tests.ranks.spine import VOCAB, alone, exact, make_samples

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.hyper import HyperConfig
from longshore.plan import make_plan
from longshore.plan.layout import parse_layout


def mixed() -> DecoderConfig:
    """The second layer, not on the first stage, chooses experts by token ids."""
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=4)
    moe = MoEConfig(experts=4, top_k=2, width=8, score="sqrt-softplus", shared_width=8, limit=0.5)
    return DecoderConfig(
        vocab_size=VOCAB,
        width=16,
        layers=(
            LayerConfig(attention, MLPConfig(width=16, limit=0.5)),
            LayerConfig(OwnLossConfig(), replace(moe, hash_rows=VOCAB)),
            LayerConfig(attention, replace(moe, aux_weight=0.1)),
        ),
        mtp=(LayerConfig(OwnLossConfig(), MLPConfig(width=16)),),
        residuals=HyperConfig(count=3, iterations=4),
        init_std=0.3,
    )


LENGTHS = [3, 40, 17, 5, 50, 1, 2]
AXES = {
    "lanes": ({"lanes": 2}, "", "none"),
    "pipeline": ({"lanes": 1, "pp": 2}, "Et|t|tm|L", "blocks"),
    "tensors": ({"lanes": 1, "tp": 2}, "", "blocks"),
}


def run_exact(axes: dict[str, int], text: str, recompute: str) -> str:
    """What is off by most; and every rank's operations, FSDP's too, are those of the trace."""
    config, depths = mixed(), 1
    with ranks_of(**axes) as (topology, groups):
        layout = None
        if text:
            layout = parse_layout(text, pp=topology.pp, layers=3, depths=depths)
            layout = replace(layout, id_layers=config.hashed_layers)
        vpp = layout.vpp if layout else 1
        plan = make_plan(
            LENGTHS, lanes=topology.lanes, capacity=64, pp=topology.pp, vpp=vpp, tp=topology.tp
        )
        samples = make_samples(plan)
        choices = exact(mode="zero3", recompute=recompute)
        result = composed(config, plan, samples, topology, groups, choices, layout=layout)
        check_case(config, text, choices, topology, groups, capacity=64)
        if topology.rank:
            return ""
        error, name = error_of(result, alone(config, samples))
        return "" if error <= 1e-9 else f"{name} is off by {error}"


@pytest.mark.parametrize("name", AXES)
def test_the_gradients_of_each_sequence_alone(name: str) -> None:
    assert run_ranks(2, run_exact, *AXES[name], timeout=100) == ["", ""]
