import pytest
import torch
from tests.model.experts import LENGTHS, rows

from longshore.arch.feed_forward import MoEConfig
from longshore.arch.part import Norm
from longshore.batch import whole_context
from longshore.model.moe import MoE

HUGGING_FACE = {
    "qwen3_moe": MoEConfig(experts=8, top_k=3, width=16),
    "qwen3_moe, not normalised": MoEConfig(experts=8, top_k=3, width=16, normalise=False),
    "qwen3_next": MoEConfig(experts=8, top_k=3, width=16, shared_width=20, shared_gate=True),
    "deepseek_v3": MoEConfig(
        experts=16,
        top_k=4,
        width=16,
        score="sigmoid",
        groups=4,
        top_groups=2,
        scale=2.5,
        shared_width=32,
        bias=True,
    ),
}


def hugging_face(kind: str, config: MoEConfig, width: int) -> torch.nn.Module:
    """That block of transformers, expert by expert."""
    common = {
        "hidden_size": width,
        "num_experts_per_tok": config.top_k,
        "moe_intermediate_size": config.width,
        "norm_topk_prob": config.normalise,
    }
    if kind.startswith("qwen3_moe"):
        from transformers.models.qwen3_moe import modeling_qwen3_moe as at

        made = at.Qwen3MoeConfig(**common, num_experts=config.experts)
        kind_of_block = at.Qwen3MoeSparseMoeBlock
    elif kind == "qwen3_next":
        from transformers.models.qwen3_next import modeling_qwen3_next as at

        sizes = {"shared_expert_intermediate_size": config.shared_width}
        made = at.Qwen3NextConfig(**common, **sizes, num_experts=config.experts)
        kind_of_block = at.Qwen3NextSparseMoeBlock
    else:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as at

        made = at.DeepseekV3Config(
            **common,
            n_routed_experts=config.experts,
            n_group=config.groups,
            topk_group=config.top_groups,
            n_shared_experts=config.shared_width // config.width,
            routed_scaling_factor=config.scale,
        )
        kind_of_block = at.DeepseekV3MoE
    made._experts_implementation = "eager"
    return kind_of_block(made)


NAMES = {
    "gate.weight": "router.weight",
    "gate.e_score_correction_bias": "router.bias",
    "experts.gate_up_proj": "experts.gate_up",
    "experts.down_proj": "experts.down",
    "shared_expert_gate.weight": "shared_gate.weight",
}


def our_name(name: str) -> str:
    for start in ("shared_experts.", "shared_expert."):
        if name.startswith(start):
            return "shared." + name.removeprefix(start)
    return NAMES[name]


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_as_transformers_routes(kind):
    config, width = HUGGING_FACE[kind], 24
    theirs = hugging_face(kind, config, width)
    ours = MoE(config, width, norm=Norm(1e-6))
    torch.manual_seed(2)
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            tensor.normal_(std=0.3)
    ours.load_state_dict({our_name(name): t for name, t in theirs.state_dict().items()})
    x = rows(LENGTHS, width=width).float()
    mine, yours = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = ours(mine, whole_context(LENGTHS))[0], theirs(yours[None])[0]
    numbers = torch.sin(torch.arange(want.numel())).view(want.shape)
    (got * numbers).sum().backward()
    (want * numbers).sum().backward()
    pairs = {"x": (mine.grad, yours.grad), "out": (got, want)}
    for name, parameter in theirs.named_parameters():
        pairs[name] = (ours.get_parameter(our_name(name)).grad, parameter.grad)
    for name, (a, b) in pairs.items():
        assert (a - b).abs().max() <= 1e-5 * b.abs().max(), name
