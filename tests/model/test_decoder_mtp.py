import pytest
import torch
from tests.data.plans import Sample
from tests.ranks.hybrids import deepseek
from tests.ranks.spine import shifted

from longshore.batch import whole_context
from longshore.model.decoder import Decoder
from longshore.model.init import init_decoder
from longshore.plan.layout import parse_layout


def inputs(length=9):
    ids = torch.arange(length) * 7 % 61
    sample = Sample(ids.numpy(), (ids > -1).numpy())
    return whole_context([length]), [shifted(sample, depth) for depth in range(3)]


def model_of():
    model = Decoder(deepseek()).double()
    init_decoder(model, seed=3)
    return model


def test_a_depth_sees_the_token_it_is_given_and_what_lies_before() -> None:
    """At depth 1 a changed token 5 changes positions 4 on, where it goes in, and not those before.

    The main loss at position 4 stays, for it reads tokens up to 4; its label is the same.
    """
    model, (ctx, (main, *mtp)) = model_of(), inputs()
    before = model(main.token_ids, ctx, main.targets.labels, mtp)
    ids = mtp[0].token_ids.clone()
    ids[4] += 1
    changed = [type(mtp[0])(ids, mtp[0].targets), mtp[1]]
    after = model(main.token_ids, ctx, main.targets.labels, changed)
    assert torch.equal(before.values, after.values)
    for depth in (0, 1):
        difference = (before.mtp[depth] - after.mtp[depth]).abs()
        assert (difference[:4] < 1e-12).all(), "experts that get other rows round otherwise"
        assert difference[4] > 1e-6


def test_depths_and_their_labels_belong_together() -> None:
    model, (ctx, (main, *mtp)) = model_of(), inputs()
    with pytest.raises(ValueError, match="has 2 depths of multi-token prediction, but got"):
        model(main.token_ids, ctx, main.targets.labels, mtp[:1])
    assert model(main.token_ids, ctx).mtp == ()


@pytest.mark.parametrize("text", ["Et|tmmL", "Ett|mm|L", "Ettm|mL", "Et|tm|m|L"])
def test_stages_in_series(text) -> None:
    """Depths with the head, on a stage of their own, or on two stages."""
    model, (ctx, (main, *mtp)) = model_of(), inputs()
    whole = model(main.token_ids, ctx, main.targets.labels, mtp)
    layout = parse_layout(text, pp=1, layers=2, depths=2)
    rows, routed = main.token_ids, ()
    for number, stage in enumerate(layout.stages):
        part = Decoder(deepseek(), stage).double()
        init_decoder(part, seed=3)
        labels = main.targets.labels if stage.head else None
        out = part(rows, ctx, labels, mtp if stage.head or stage.depths else ())
        rows, routed = out.values, routed + out.routed
        if not stage.head:
            assert len(rows) == layout.streams(number) * ctx.tokens
    assert torch.equal(out.values, whole.values)
    assert all(map(torch.equal, out.mtp, whole.mtp))
    assert [r.depth for r in routed] == [r.depth for r in whole.routed]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it itself
def test_a_compiled_depth_compiles_its_block() -> None:
    """Which hides the context; a depth that was given it would be compiled anew each time."""
    plain, compiled = model_of(), model_of()
    graphs = []

    def backend(graph, given):
        graphs.append(graph)
        return graph

    for part in (*compiled.layers.values(), *compiled.mtp.values()):
        part.compile(dynamic=True, backend=backend)
    counts = []
    for length in (9, 14, 23):
        ctx, (main, *mtp) = inputs(length)
        want = plain(main.token_ids, ctx, main.targets.labels, mtp)
        got = compiled(main.token_ids, ctx, main.targets.labels, mtp)
        for a, b in zip((got.values, *got.mtp), (want.values, *want.mtp), strict=True):
            assert torch.allclose(a, b, rtol=1e-12)
        counts.append(len(graphs))
    # torch 2.11 reads every field of a context that it is given, 2.13 does not: so look, too.
    assert all(part._compiled_call_impl is None for part in compiled.mtp.values())
    assert counts[0] > 0
    assert counts[1] == counts[2]
