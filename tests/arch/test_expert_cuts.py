import pytest

from longshore.arch.cuts import Span, TensorCut, expert_cut
from longshore.arch.decoder import check_ep
from longshore.arch.presets import preset


def test_the_worked_example():
    assert expert_cut(8, ep=4, ep_rank=2) == TensorCut(0, 8, (Span(4, 6),), "ep")


def test_together_all_ranks_have_each_expert_once():
    spans = [span for rank in range(3) for span in expert_cut(12, ep=3, ep_rank=rank).spans]
    assert [e for span in spans for e in range(span.start, span.stop)] == list(range(12))


def test_sizes_that_do_not_divide_are_refused_by_name():
    check_ep(preset("tiny-llama"), 1)
    config = preset("tiny-qwen3-moe")
    experts = config.layers[0].mlp.experts
    check_ep(config, experts)
    with pytest.raises(ValueError, match=f"ep is 3, which does not divide the {experts} exp"):
        check_ep(config, 3)
    with pytest.raises(
        ValueError, match=r"^parallel\.ep is 2, but .* no experts; use parallel\.ep=1"
    ):
        check_ep(preset("tiny-llama"), 2)
