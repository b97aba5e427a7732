"""Hyper-connections, clipped SwiGLU and the routers of DeepSeek-V4, against transformers."""

from dataclasses import replace

import pytest
import torch

from longshore.arch.attention import AttentionConfig
from longshore.arch.costs import parameter_count
from longshore.arch.decoder import DecoderConfig, HyperConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig, MoEConfig
from longshore.arch.part import Norm
from longshore.batch import whole_context
from longshore.model.decoder import Decoder
from longshore.model.feed_forward import MLP, MoE
from longshore.model.hyper_connection import Collapse, HyperConnection
from longshore.model.init import init_decoder
from longshore.ops.pointwise import expand

WIDTH, EXPERTS, TOP_K, VOCAB, TOKENS = 12, 6, 2, 17, 9
NORM = Norm(1e-5)
HYPER = HyperConfig(count=3, iterations=4, eps=1e-4)
EXPERTS_CONFIG = MoEConfig(
    experts=EXPERTS,
    top_k=TOP_K,
    width=8,
    score="sqrt-softplus",
    scale=1.5,
    shared_width=8,
    bias=True,
    limit=0.5,
)


@pytest.fixture
def theirs(monkeypatch):
    """transformers' module, whose float32 is float64."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as module

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return module


def their_config():
    from transformers import DeepseekV4Config

    return DeepseekV4Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=8,
        num_experts_per_tok=TOP_K,
        n_routed_experts=EXPERTS,
        hc_mult=HYPER.count,
        hc_sinkhorn_iters=HYPER.iterations,
        hc_eps=HYPER.eps,
        rms_norm_eps=NORM.eps,
        swiglu_limit=EXPERTS_CONFIG.limit,
        mlp_layer_types=["hash_moe", "moe"],
        layer_types=["heavily_compressed_attention"] * 2,
        experts_implementation="eager",
    )


def randomise(*modules) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def copy(ours, theirs, names: dict[str, str]) -> None:
    mine, other = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert (mine.keys(), other.keys()) == (set(names), set(names.values()))
    with torch.no_grad():
        for name, their_name in names.items():
            mine[name].copy_(other[their_name])


def rows(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return values.requires_grad_()


def check(ours, theirs, names: dict[str, str], outputs, x, their_x) -> None:
    """outputs: pairs of ours and theirs; these, and all gradients, agree."""
    weights = [torch.randn_like(a) for a, _ in outputs]
    for which in (0, 1):
        parts = zip(outputs, weights, strict=True)
        sum((pair[which] * weight).sum() for pair, weight in parts).backward()
    pairs = [*outputs, (x.grad, their_x.grad.view(x.shape))]
    other = dict(theirs.named_parameters())
    pairs += [(p.grad, other[names[name]].grad) for name, p in ours.named_parameters()]
    for a, b in pairs:
        assert (a - b).abs().max() <= 1e-9 * b.abs().max()
        assert b.abs().max() > 0


def test_a_part_between_residual_rows(theirs):
    """The part squares its rows, so that its gradient passes through both ends."""
    other = theirs.DeepseekV4HyperConnection(their_config()).double()
    ours = HyperConnection(HYPER, WIDTH, norm_eps=NORM.eps).double()
    names = {"weight": "fn", "base": "base", "scale": "scale"}
    randomise(other)
    copy(ours, other, names)
    x = rows(TOKENS, HYPER.count * WIDTH)
    their_x = x.detach().view(1, TOKENS, HYPER.count, WIDTH).requires_grad_()
    row_TC, mixing = ours(x)
    post, comb, collapsed = other(their_x)
    new = expand(row_TC.square(), x, *mixing)
    part = post[..., None] * collapsed.square()[..., None, :]
    their_new = part + comb.transpose(-1, -2) @ their_x
    outputs = [(row_TC, collapsed[0]), (new, their_new[0].flatten(1))]
    check(ours, other, names, outputs, x, their_x)


def test_the_collapse_before_the_last_norm(theirs):
    other = theirs.DeepseekV4HyperHead(their_config()).double()
    ours = Collapse(HYPER, WIDTH, norm_eps=NORM.eps).double()
    names = {"weight": "hc_fn", "base": "hc_base", "scale": "hc_scale"}
    randomise(other)
    copy(ours, other, names)
    x = rows(TOKENS, HYPER.count * WIDTH)
    their_x = x.detach().view(1, TOKENS, HYPER.count, WIDTH).requires_grad_()
    check(ours, other, names, [(ours(x), other(their_x)[0])], x, their_x)


def test_a_clipped_mlp(theirs):
    other = theirs.DeepseekV4MLP(their_config()).double()
    ours = MLP(MLPConfig(width=8, limit=EXPERTS_CONFIG.limit), WIDTH, norm=NORM).double()
    names = {f"{name}_proj.weight": f"{name}_proj.weight" for name in ("gate", "up", "down")}
    randomise(other)
    copy(ours, other, names)
    x, their_x = rows(TOKENS, WIDTH), rows(TOKENS, WIDTH)
    check(ours, other, names, [(ours(x, None)[0], other(their_x))], x, their_x)


@pytest.mark.parametrize("layer", [0, 1], ids=["hashed", "routed"])
def test_experts(theirs, layer):
    other = theirs.DeepseekV4SparseMoeBlock(their_config(), layer).double()
    changes = {"hash_rows": VOCAB, "bias": False} if layer == 0 else {}
    ours = MoE(replace(EXPERTS_CONFIG, **changes), WIDTH, norm=NORM).double()
    names = {"router.weight": "gate.weight"}
    names |= {"experts.gate_up": "experts.gate_up_proj", "experts.down": "experts.down_proj"}
    for name in ("gate", "up", "down"):
        names[f"shared.{name}_proj.weight"] = f"shared_experts.{name}_proj.weight"
    randomise(other)
    copy(ours, other, names)
    ids, ctx = torch.arange(TOKENS) * 5 % VOCAB, whole_context([TOKENS - 2, 2])
    if layer == 0:
        table = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(VOCAB)])
        ours.router.table.copy_(table)
        other.gate.tid2eid.copy_(table)
    else:
        bias = torch.randn(EXPERTS, dtype=torch.float64)
        ours.router.bias.copy_(bias)
        other.gate.e_score_correction_bias.copy_(bias)
    x = rows(TOKENS, WIDTH)
    their_x = x.detach()[None].requires_grad_()
    output, routed = ours(x, replace(ctx, token_ids=ids))
    assert routed.counts.sum() == TOKENS * TOP_K
    check(ours, other, names, [(output, other(their_x, ids[None])[0])], x, their_x)


def test_scores_far_below_0_have_finite_gradients():
    moe = MoE(replace(EXPERTS_CONFIG, bias=False), WIDTH, norm=NORM)
    x = torch.full((2, WIDTH), 1e4, requires_grad=True)
    with torch.no_grad():
        moe.router.weight.fill_(-1.0)
    _, weights, _ = moe.router(x)
    weights.sum().backward()
    assert x.grad.isfinite().all()
    assert moe.router.weight.grad.isfinite().all()


def hyper_decoder(**changes) -> DecoderConfig:
    attention = AttentionConfig(heads=2, kv_heads=1, head_dim=4)
    layers = (
        LayerConfig(attention, replace(EXPERTS_CONFIG, bias=False, hash_rows=VOCAB)),
        LayerConfig(attention, EXPERTS_CONFIG),
    )
    config = DecoderConfig(
        vocab_size=VOCAB,
        width=WIDTH,
        layers=layers,
        mtp=(LayerConfig(attention, MLPConfig(width=8)),),
        residuals=HYPER,
        init_std=0.3,
    )
    return replace(config, **changes)


@pytest.mark.parametrize("residuals", [None, HYPER], ids=["sums", "hyper"])
def test_parameters_are_counted(residuals):
    config = hyper_decoder(residuals=residuals)
    with torch.device("meta"):
        model = Decoder(config)
    assert parameter_count(config) == sum(p.numel() for p in model.parameters())


def test_first_tables_have_distinct_experts_and_depend_on_the_seed():
    tables = []
    for seed in (0, 0, 1):
        model = Decoder(hyper_decoder())
        init_decoder(model, seed)
        tables.append(model.layers["0"].mlp.router.table)
    first, same, other = tables
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert first.dtype == torch.int64
    assert first.unique().tolist() == list(range(EXPERTS))
    assert all(len(set(row)) == TOP_K for row in first.tolist())


def test_token_ids_are_needed_where_they_choose_experts():
    from longshore.plan.layout import parse_layout

    config = hyper_decoder(layers=hyper_decoder().layers[::-1], mtp=())
    layout = parse_layout("Et|tL", pp=2, layers=2)
    first, last = (Decoder(config, stage) for stage in layout.stages)
    ctx = whole_context([5])
    out = first(torch.arange(5), ctx)
    assert out.values.shape == (5, HYPER.count * WIDTH)
    with pytest.raises(ValueError, match="chooses experts by token ids and wants 5 of them"):
        last(out.values, ctx)
    assert last(out.values, ctx, token_ids=torch.arange(5)).values.shape == (5, VOCAB)


def test_one_residual_of_fixed_weights_is_a_plain_sum():
    """With post = mix = 1 and pre = 1 a block is that without hyper-connections."""
    one = HyperConfig(count=1, iterations=2, eps=1e-12)
    plain, hyper = (hyper_decoder(residuals=r, mtp=()) for r in (None, one))
    models = [Decoder(config).double() for config in (plain, hyper)]
    for model in models:
        init_decoder(model, 0)
    for name, parameter in models[1].named_parameters():
        if "hyper" in name or "collapse" in name:
            with torch.no_grad():
                parameter.zero_()
            if name.endswith("base"):
                # sigmoid(50) is 1 in float64, and 2·sigmoid(0) is 1.
                values = [50.0] if "collapse" in name else [50.0, 0.0, 0.0]
                parameter.data.copy_(torch.tensor(values))
    ids = torch.arange(8) % VOCAB
    sums, mixed = (model(ids, whole_context([5, 3])).values for model in models)
    assert (sums - mixed).abs().max() <= 1e-9 * sums.abs().max()
