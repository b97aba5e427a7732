from dataclasses import replace

import pytest
import torch
from tests.model.exact import (
    LENGTHS,
    assert_all_close,
    assert_close,
    cut,
    decoder,
    gradients,
    tokens,
)

from longshore.arch.attention import AttentionConfig
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.presets import preset
from longshore.arch.rope import DynamicScaling, LongRopeScaling, RopeConfig
from longshore.batch import CPGroup, PackContext, whole_context
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder
from longshore.model.interface import Exchanges
from longshore.model.norm_rope import Float32Parameters, rope_tables
from longshore.parallel.apply import set_exchanges
from longshore.plan.layout import Stage, one_stage, parse_layout


def mixed():
    """Every option of attention, layers without a mixer or a feed-forward part."""
    base = AttentionConfig(heads=4, kv_heads=2, head_dim=8)
    dynamic = RopeConfig(scaling=DynamicScaling(factor=2.0, original_length=16))
    long = LongRopeScaling(
        short_factor=(1.0, 1.5), long_factor=(2.0, 4.0), original_length=32, factor=4.0
    )
    mlp = MLPConfig(width=24)
    layers = (
        LayerConfig(replace(base, rope=dynamic, bias=True, output_bias=True), mlp),
        LayerConfig(replace(base, rope=RopeConfig(rotary_dim=4, scaling=long)), None),
        LayerConfig(None, mlp),
        LayerConfig(replace(base, rope=None, window=3, qk_norm=True), mlp),
    )
    return DecoderConfig(vocab_size=50, width=20, layers=layers)


CONFIGS = {
    "llama": preset("tiny-llama"),
    "qwen3": preset("tiny-qwen3"),
    "window": preset("tiny-llama", window=5, kv_heads=1),
    "mixed": mixed(),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_alone(name):
    config = CONFIGS[name]
    model = decoder(config)
    ctx, ids, labels = tokens(config)
    packed_T = model(ids, ctx, labels).values
    packed_T.sum().backward()
    packed = gradients(model)
    model.zero_grad()
    alone = [model(i, None, y).values for i, y in zip(cut(ids), cut(labels), strict=True)]
    torch.cat(alone).sum().backward()
    assert_close(packed_T, torch.cat(alone))
    assert_all_close(packed, gradients(model))
    assert_close(model(ids, ctx).values, torch.cat([model(i).values for i in cut(ids)]))


def test_loss_is_that_of_the_logits():
    config = preset("tiny-llama")
    model = decoder(config)
    ctx, ids, labels = tokens(config)
    want = torch.nn.functional.cross_entropy(model(ids, ctx).values, labels, reduction="none")
    assert_close(model(ids, ctx, labels).values, want)
    assert not model(ids, ctx, labels).values[labels == -100].any()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_leaks(name, dtype):
    """A changed token leaves every other sequence bit for bit as it was, at every layer."""
    config = CONFIGS[name]
    model = decoder(config).to(dtype)
    ctx, ids, _ = tokens(config)
    changed_ids = ids.clone()
    start = sum(LENGTHS[:3])
    changed_ids[start + 4] = (ids[start + 4] + 1) % config.vocab_size
    others = torch.ones(len(ids), dtype=torch.bool)
    others[start : start + LENGTHS[3]] = False

    def outputs(ids):
        made = {}
        hooks = [
            part.register_forward_hook(
                lambda _, __, out, name=name: made.update(
                    {name: out[0] if name.endswith("mlp") else out}
                )
            )
            for name, part in model.named_modules()
            if name.endswith(("mixer", "mlp", "head"))
        ]
        model(ids, ctx)
        for hook in hooks:
            hook.remove()
        return made

    before, after = outputs(ids), outputs(changed_ids)
    assert len(before) == sum(len(layer.parts) for layer in config.layers) + 1
    for place in before:
        assert torch.equal(before[place][others], after[place][others]), place
    # It did change its own sequence, from its place on.
    assert not torch.equal(before["head"][start + 4], after["head"][start + 4])
    assert torch.equal(before["head"][start : start + 4], after["head"][start : start + 4])


def halved(config):
    """Two stages."""
    layers = len(config.layers)
    text = f"E{'t' * (layers // 2)}|{'t' * (layers - layers // 2)}L"
    return parse_layout(text, pp=2, layers=layers)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixed"])
def test_stages_in_series(name):
    config = CONFIGS[name]
    whole = decoder(config)
    stages = halved(config).stages
    first, last = (Decoder(config, stage).double() for stage in stages)
    weights = {**whole.state_dict(), "head.weight": (whole.head.weight if not whole.tied else None)}
    if whole.tied:
        weights["head.weight"] = whole.embed.weight.detach()
    first.load_state_dict({key: weights[key] for key in first.state_dict()})
    last.load_state_dict({key: weights[key] for key in last.state_dict()})
    assert first.state_dict().keys() | last.state_dict().keys() == weights.keys()

    ctx, ids, labels = tokens(config)
    hidden_TC = first(ids, ctx).values
    sent_TC = hidden_TC.detach().requires_grad_()
    got_T = last(sent_TC, ctx, labels).values
    got_T.sum().backward()
    hidden_TC.backward(sent_TC.grad)
    want_T = whole(ids, ctx, labels).values
    want_T.sum().backward()
    assert_close(got_T, want_T)
    got = {**gradients(last), **gradients(first)}
    if config.tied:
        got["embed.weight"] = got["embed.weight"] + got.pop("head.weight")
    assert_all_close(got, gradients(whole))


def test_tied():
    tied, free = Decoder(preset("tiny-llama")), Decoder(preset("tiny-llama", tied=False))
    assert tied.tied
    assert "head.weight" not in dict(tied.named_parameters())
    assert not free.tied
    assert free.head.weight.shape == (256, 64)
    stage = Decoder(preset("tiny-llama"), halved(preset("tiny-llama")).stages[1])
    assert not stage.tied
    assert stage.head.weight.shape == (256, 64)


def test_parameter_names():
    stage = Stage(embed=True, layers=range(3, 4), norm=True, depths=range(0), head=True)
    names = set(dict(Decoder(CONFIGS["mixed"], stage).named_parameters()))
    mixer = {f"{x}_proj.weight" for x in "qkvo"} | {"q_norm.weight", "k_norm.weight"}
    mlp = {f"{x}_proj.weight" for x in ("gate", "up", "down")}
    assert names == {
        "embed.weight",
        "norm.weight",
        "head.weight",
        "layers.3.mixer_norm.weight",
        "layers.3.mlp_norm.weight",
        *(f"layers.3.mixer.{name}" for name in mixer),
        *(f"layers.3.mlp.{name}" for name in mlp),
    }
    first = set(dict(Decoder(CONFIGS["mixed"]).layers["0"].mixer.named_parameters()))
    assert {f"{x}_proj.bias" for x in "qkvo"} <= first


def halves(ctx, at):
    """The same context as two packs, cut between sequences."""
    offsets = ctx.packs[0].padded.offsets
    packs = []
    for part in (slice(0, at), slice(at, None)):
        lengths = ctx.packs[0].lengths[part]
        bounds = whole_context(lengths).packs[0].padded
        start = offsets[part.start]
        packs.append(
            PackContext(
                group=CPGroup(0, 1, 0),
                start=start,
                stop=start + sum(lengths),
                first_sequence=part.start,
                lengths=lengths,
                real=bounds,
                padded=bounds,
                zigzag=None,
            )
        )
    return replace(ctx, packs=tuple(packs))


def test_several_packs():
    config = CONFIGS["qwen3"]
    model = decoder(config)
    ctx, ids, labels = tokens(config)
    assert_close(model(ids, halves(ctx, 3), labels).values, model(ids, ctx, labels).values)


def test_a_shared_pack_is_refused():
    config = CONFIGS["llama"]
    ctx, ids, _ = tokens(config)
    shared = replace(ctx.packs[0], group=CPGroup(0, 2, 0))
    with pytest.raises(ValueError, match="shared by 2 lanes, but this model is not"):
        Decoder(config)(ids, replace(ctx, packs=(shared,)))


def test_other_exchanges():
    config = CONFIGS["llama"]
    model = decoder(config)
    packs = []

    class Noted(Exchanges):
        def each(self, ctx):
            for exchange in super().each(ctx):
                packs.append(exchange.pack)
                yield exchange

    ctx, ids, _ = tokens(config)
    expected = model(ids, ctx).values
    set_exchanges(model, Noted())
    assert torch.equal(model(ids, ctx).values, expected)
    assert packs == [*ctx.packs] * len(config.layers)


@pytest.mark.usefixtures("half_by_float32")
def test_half_precision_keeps_its_dtype():
    config = CONFIGS["qwen3"]
    model = decoder(config).bfloat16()
    ctx, ids, labels = tokens(config, (3, 5))
    tables = rope_tables(model.ropes, ctx, torch.bfloat16)
    hidden_TC = model.embed(ids)
    assert model.layers["0"](hidden_TC, ctx, tables).values.dtype == torch.bfloat16
    assert model(ids, ctx, labels).values.dtype == torch.float32


def test_what_does_not_fit():
    config = CONFIGS["llama"]
    ctx, ids, labels = tokens(config, (3, 5))
    with pytest.raises(ValueError, match=r"token ids of shape \(8,\).* got shape \(7,\)"):
        Decoder(config)(ids[:7], ctx)
    with pytest.raises(ValueError, match=r"hidden states of shape \(8, 64\).* got shape \(8,\)"):
        Decoder(config, halved(config).stages[1])(ids, ctx)
    with pytest.raises(ValueError, match="without a head"):
        Decoder(config, halved(config).stages[0])(ids, ctx, labels)
    three = one_stage(layers=3).stages[0]
    with pytest.raises(ValueError, match=r"layers up to 3 .* this decoder has 2 layers"):
        Decoder(config, three)


def compared(model, compiled, config, lengths):
    ctx, ids, labels = tokens(config, lengths)
    got_T, want_T = compiled(ids, ctx, labels).values, model(ids, ctx, labels).values
    got_T.sum().backward()
    want_T.sum().backward()
    assert_close(got_T, want_T)
    assert_all_close(gradients(compiled), gradients(model))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it itself
def test_compiled_blocks():
    config = CONFIGS["qwen3"]
    model, compiled = decoder(config), decoder(config)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for block in compiled.layers.values():
        block.compile(dynamic=True, backend=backend)
    counts = []
    for lengths in ((1, 2, 20), LENGTHS, (41,), (3, 3, 3, 3)):
        compared(model, compiled, config, lengths)
        counts.append(len(graphs))
    assert counts[0] > 0
    assert len(set(counts)) == 1, f"new shapes or packs were compiled again: {counts}"
    assert compiled.state_dict().keys() == model.state_dict().keys()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_blocks_compiled_from_outside():
    config = CONFIGS["mixed"]
    model, compiled = decoder(config), decoder(config)
    for block in compiled.layers.values():
        block.forward = torch.compile(block.forward, dynamic=True, backend="eager")
    for lengths in ((1, 2, 20), LENGTHS):
        compared(model, compiled, config, lengths)


@pytest.mark.filterwarnings("ignore:.*bf16")  # of CPUs without it
@pytest.mark.parametrize("wide", [True, False])
def test_the_residual_is_as_wide_as_the_config_says(wide):
    config = replace(preset("tiny-nemotron-h"), float32_residual=wide)
    model = Decoder(config).to(torch.bfloat16)
    init_decoder(model, seed=0)
    entering, leaving = [], []
    for part in (*model.layers.values(), model.norm):
        part.register_forward_pre_hook(lambda _, args: entering.append(args[0].dtype))
    model.norm.register_forward_hook(lambda *args: leaving.append(args[2].dtype))
    logits = model(torch.arange(5)).values
    assert set(entering) == {torch.float32 if wide else torch.bfloat16}
    assert set(leaving) == set(entering)
    assert logits.dtype == torch.bfloat16
    logits.float().sum().backward()
    assert all(parameter.grad.dtype == torch.bfloat16 for parameter in model.parameters())


def test_a_float64_decoder_has_a_float64_residual():
    config = preset("tiny-nemotron-h")
    model = Decoder(config).double()
    wide = Decoder(replace(config, float32_residual=True)).double()
    init_decoder(model, seed=0)
    init_decoder(wide, seed=0)
    ids = torch.arange(9)
    assert torch.equal(model(ids).values, wide(ids).values)


def test_the_pad_token_must_be_one():
    with pytest.raises(ValueError, match=r"pad_token_id is 256; it must be a token, from 0 to 255"):
        replace(preset("tiny-llama"), pad_token_id=256)


@pytest.mark.parametrize("name", ["tiny-hybrid", "tiny-qwen3-next"])
def test_modules_that_fsdp_wraps_get_an_argument(name):
    """In a recomputed block FSDP takes such a module for a root, and moves its first argument."""
    model = Decoder(preset(name))
    calls = []
    for part in model.modules():
        if isinstance(part, Float32Parameters):
            part.register_forward_pre_hook(lambda _, args: calls.append(len(args)))
    model(torch.arange(5))
    assert calls
    assert min(calls) > 0
