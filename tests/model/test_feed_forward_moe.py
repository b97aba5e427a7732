from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.data.plans import Sample, counts_of
from tests.model.exact import assert_all_close, assert_close, decoder, gradients, tokens
from tests.model.experts import KINDS, LENGTHS, make, one_layer, rows

from longshore.arch.feed_forward import MoEConfig
from longshore.arch.part import Norm
from longshore.batch import whole_context
from longshore.data.pack import cut_shards, lane_cuts, pack_step
from longshore.model.decoder import Decoder
from longshore.model.feed_forward import MoE
from longshore.model.init import init_decoder
from longshore.model.norm_rope import Float32Parameters
from longshore.ops.backends import grouped_refusal
from longshore.plan import make_plan


def run(moe, x, pieces):
    """Outputs, the auxiliary losses' sum, counts, and all gradients, piece by piece."""
    x = x.clone().requires_grad_()
    made, auxiliary, counts = [], 0.0, 0
    for ctx, part in zip(pieces, x.split([ctx.tokens for ctx in pieces]), strict=True):
        out, routed = moe(part, ctx)
        first = sum(part.numel() for part in made)
        numbers = torch.arange(first, first + out.numel(), dtype=out.dtype)
        ((out * torch.sin(numbers).view(out.shape)).sum() + routed.auxiliary).backward()
        made.append(out.detach())
        auxiliary, counts = auxiliary + routed.auxiliary.detach(), counts + routed.counts
    found = {name: p.grad.clone() for name, p in moe.named_parameters()}
    for parameter in moe.parameters():
        parameter.grad = None
    return torch.cat(made), auxiliary, counts, {"x": x.grad, **found}


def by_hand(moe, x_TC, lengths):
    """Token by token, as it is written: the output, and the balance loss without its tricks."""
    config, outputs, auxiliary = moe.config, [], 0.0
    for x_NC in x_TC.split(list(lengths)):
        chose, shares = torch.zeros(config.experts, dtype=x_TC.dtype), []
        for x_C in x_NC:
            logits = moe.router.weight @ x_C
            score = (
                torch.softmax(logits, 0) if config.score == "softmax" else 1 / (1 + (-logits).exp())
            )
            seen = score.detach() + (0 if moe.router.bias is None else moe.router.bias)
            size = config.experts // config.groups
            best = [
                seen[g * size : (g + 1) * size].sort().values[-2:].sum()
                for g in range(config.groups)
            ]
            allowed = sorted(range(config.groups), key=lambda g: -best[g])[: config.top_groups]
            among = [e for e in range(config.experts) if e // size in allowed]
            ids = sorted(among, key=lambda e: -seen[e])[: config.top_k]
            whole = sum(score[e] for e in ids) if config.normalise else 1.0
            out_C = torch.zeros_like(x_C)
            for e in ids:
                gate, up = (moe.experts.gate_up[e] @ x_C).chunk(2)
                made = moe.experts.down[e] @ (gate / (1 + (-gate).exp()) * up)
                out_C = out_C + config.scale * score[e] / whole * made
                chose[e] += 1
            if moe.shared is not None:
                shared = moe.shared(x_C[None], None)[0][0]
                gate = 1.0 if moe.shared_gate is None else torch.sigmoid(moe.shared_gate(x_C))
                out_C = out_C + gate * shared
            outputs.append(out_C)
            shares.append(score / score.sum())
        f = chose / len(x_NC) * config.experts / config.top_k
        auxiliary = auxiliary + config.aux_weight * len(x_NC) * (f * sum(shares) / len(x_NC)).sum()
    return torch.stack(outputs), auxiliary


@pytest.mark.parametrize("kind", KINDS)
def test_as_written_out(kind):
    moe, x = make(KINDS[kind]), rows()
    out, auxiliary, counts, grads = run(moe, x, [whole_context(LENGTHS)])
    leaf = x.clone().requires_grad_()
    want, loss = by_hand(moe, leaf, LENGTHS)
    weights = torch.sin(torch.arange(want.numel(), dtype=want.dtype)).view(want.shape)
    ((want * weights).sum() + loss).backward()
    assert_close(out, want.detach())
    assert_close(auxiliary, loss.detach())
    assert counts.sum() == len(x) * moe.config.top_k
    assert_all_close(grads, {"x": leaf.grad, **gradients(moe)})


@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_each_sequence_alone(kind):
    moe, x = make(KINDS[kind]), rows()
    together = run(moe, x, [whole_context(LENGTHS)])
    alone = run(moe, x, [whole_context((length,)) for length in LENGTHS])
    assert_close(together[0], alone[0])
    assert_close(together[1], alone[1])
    assert torch.equal(together[2], alone[2])
    assert_all_close(together[3], alone[3])


def test_the_balance_loss_of_a_sequence_alone_is_not_that_of_all_tokens():
    moe, x = make(KINDS["softmax"]), rows()
    _, packed, _, _ = run(moe, x, [whole_context(LENGTHS)])
    _, joined, _, _ = run(moe, x, [whole_context((len(x),))])
    assert abs(packed - joined) > 0.01 * joined


def test_even_choices_and_scores_make_a_balance_loss_of_a_weight_for_each_token():
    moe = make(replace(KINDS["softmax"], experts=3, top_k=3, aux_weight=0.5))
    torch.nn.init.zeros_(moe.router.weight)
    _, auxiliary, counts, _ = run(moe, rows(), [whole_context(LENGTHS)])
    assert auxiliary.item() == pytest.approx(0.5 * sum(LENGTHS), rel=1e-12)
    assert counts.tolist() == [sum(LENGTHS)] * 3


def test_no_balance_loss_without_a_weight():
    moe = make(replace(KINDS["groups"], aux_weight=0.0))
    moe.exchanges = None
    _, routed = moe(rows(), whole_context(LENGTHS))
    assert routed.auxiliary.item() == 0
    assert routed.auxiliary.shape == ()


def padded_batches(lengths=(3, 5), *, lanes=1, buckets=(16,), max_cp=None):
    plan = make_plan(list(lengths), lanes=lanes, capacity=16, max_cp=max_cp)
    samples = {
        i: Sample(np.zeros(length, np.int32), np.ones(length, bool))
        for i, length in enumerate(lengths)
    }
    counts = counts_of(samples, 0)
    return [
        batch
        for lane in range(lanes)
        for batch in pack_step(
            plan,
            lane,
            cut_shards(plan, samples, lane_cuts(plan, lane)),
            counts=counts,
            buckets=buckets,
            pad_id=0,
        )
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_counts_nowhere(kind):
    (batch,) = padded_batches()
    ctx, moe = batch.ctx, make(KINDS[kind])
    real = ctx.is_real
    assert (ctx.tokens, int(real.sum())) == (16, 8)
    lengths = [plain for plain in ctx.packs[0].lengths if plain]
    x = rows((16,))
    given = x[real].clone().requires_grad_()
    out, routed = moe(given, whole_context(lengths))
    (out.sum() + routed.auxiliary).backward()
    want = {"x": given.grad, **gradients(moe)}
    for padding in (x[~real], 50 * x[~real]):
        moe.zero_grad()
        whole = x.clone()
        whole[~real] = padding
        whole.requires_grad_()
        got, found = moe(whole, ctx)
        (got[real].sum() + found.auxiliary).backward()
        assert_close(got[real], out)
        assert_close(found.auxiliary, routed.auxiliary)
        assert torch.equal(found.counts, routed.counts)
        assert not whole.grad[~real].any()
        assert_all_close({"x": whole.grad[real], **gradients(moe)}, want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lane_without_work_gives_every_parameter_a_gradient(kind):
    batch = padded_batches((4,), lanes=2, buckets=(), max_cp=1)[1]
    assert batch.ctx.real_tokens == 0
    moe = make(KINDS[kind])
    x = rows((batch.ctx.tokens,)).requires_grad_()
    out, routed = moe(x, batch.ctx)
    (torch.where(batch.ctx.is_real[:, None], out, 0.0).sum() + routed.auxiliary).backward()
    assert routed.auxiliary.item() == 0
    assert not routed.counts.any()
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_an_expert_that_no_token_chose_has_a_gradient_of_zeros():
    moe = make(replace(KINDS["groups"], groups=1, top_groups=1))
    moe.router.bias.copy_(torch.tensor([9.0, 9, 9] + 9 * [0]))
    _, _, counts, grads = run(moe, rows(), [whole_context(LENGTHS)])
    assert counts.tolist() == 3 * [sum(LENGTHS)] + 9 * [0]
    for name in ("experts.gate_up", "experts.down"):
        assert grads[name][:3].flatten(1).any(1).all()
        assert not grads[name][3:].any()
    assert grads["router.weight"].any(1).all()


def test_a_bias_chooses_and_does_not_weigh():
    moe = make(MoEConfig(experts=4, top_k=2, width=4, bias=True), width=4)
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(4))
    x = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    moe.router.bias.zero_()
    ids, weights, scores = moe.router(x)
    assert ids.tolist() == [[0, 1]]
    assert_close(weights, torch.tensor([[4 / 7, 3 / 7]], dtype=torch.float64))
    moe.router.bias[2] = 0.15
    ids, weights, again = moe.router(x)
    assert ids.tolist() == [[0, 2]]
    assert_close(weights, torch.tensor([[4 / 6, 2 / 6]], dtype=torch.float64))
    assert torch.equal(scores, again)


def test_a_shared_pack_needs_another_core():
    ctx = padded_batches((40,), lanes=4, buckets=())[0].ctx
    assert ctx.packs[0].group.cp_size == 4
    with pytest.raises(ValueError, match="a pack is shared by 4 lanes, but this model is not"):
        make(KINDS["softmax"])(rows((ctx.tokens,)), ctx)


@pytest.mark.parametrize("kind", KINDS)
def test_the_grouped_product_agrees_with_the_loop(kind):
    moe = make(KINDS[kind])
    x, ctx = rows(), whole_context(LENGTHS)
    out, auxiliary, counts, grads = run(moe, x, [ctx])
    single = moe.float()
    assert grouped_refusal(x.float(), single.experts.gate_up, single.experts.down) is None
    got = run(single, x.float(), [ctx])
    assert torch.equal(got[2], counts)
    pairs = {"out": (got[0], out), "auxiliary": (got[1], auxiliary)}
    pairs |= {name: (got[3][name], grad) for name, grad in grads.items()}
    for name, (a, b) in pairs.items():
        assert (a - b).abs().max() <= 1e-5 * b.abs().max(), name


@pytest.mark.usefixtures("half_by_float32")
def test_a_router_keeps_float32_among_bfloat16():
    config = replace(KINDS["groups"], width=8)
    moe = make(config, width=8).bfloat16()
    moe.router.float()
    moe.router.bias.copy_(torch.arange(12) * 1e-5)
    x = rows((4,), width=8).bfloat16().requires_grad_()
    _, weights, scores = moe.router(x)
    assert (weights.dtype, scores.dtype) == (torch.float32, torch.float32)
    out, routed = moe(x, whole_context((4,)))
    (out.float().sum() + routed.auxiliary).backward()
    assert (out.dtype, routed.auxiliary.dtype) == (torch.bfloat16, torch.float32)
    assert moe.router.weight.grad.dtype == torch.float32
    assert isinstance(moe.router, Float32Parameters)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it itself
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.long)]
)
def test_compiled_blocks(dtype):
    config = one_layer(KINDS["groups"])
    plain, compiled = decoder(config).to(dtype), decoder(config).to(dtype)
    graphs, counts = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled.layers["0"].compile(dynamic=True, backend=backend)
    for lengths in ((1, 2, 20), LENGTHS, (41,), (3, 3, 3, 3)):
        ctx, ids, labels = tokens(config, lengths)
        for model in (plain, compiled):
            model.zero_grad()
            out = model(ids, ctx, labels)
            (out.values.sum() + out.routed[0].auxiliary).backward()
        for name, want in gradients(plain).items():
            got = gradients(compiled)[name]
            limit = 1e-4 if dtype == torch.float32 else 1e-9
            assert (got - want).abs().max() <= limit * want.abs().max(), name
        counts.append(len(graphs))
    assert counts[0] > 1
    assert len(set(counts)) == 1, f"new shapes or packs were compiled again: {counts}"


def test_first_values_and_names():
    config = replace(one_layer(replace(KINDS["gated"], bias=True, width=64)), init_std=0.03)
    model = Decoder(config)
    init_decoder(model, seed=0)
    moe = model.layers["0"].mlp
    assert [name for name, _ in moe.named_parameters()] == [
        "router.weight",
        "experts.gate_up",
        "experts.down",
        "shared.gate_proj.weight",
        "shared.up_proj.weight",
        "shared.down_proj.weight",
        "shared_gate.weight",
    ]
    assert [name for name, _ in moe.named_buffers()] == ["router.bias"]
    assert not moe.router.bias.any()
    assert moe.experts.gate_up.std().item() == pytest.approx(0.03, rel=0.05)
    assert moe.experts.down.std().item() == pytest.approx(0.03 / 2**0.5, rel=0.05)
    assert moe.router.weight.std().item() == pytest.approx(0.03, rel=0.3)


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


@pytest.mark.slow
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
