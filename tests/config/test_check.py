"""What the wrong ones are told is in tests/cli/test_train.py; here is what the right ones give."""

from dataclasses import replace

import pytest

from longshore.arch.presets import preset
from longshore.config.check import (
    check_config,
    check_longest,
    decoder_config,
    lane_align,
    planner_setting,
    shared_heads,
)
from longshore.config.load import load_config
from longshore.config.schema import ModelConfig, ParallelConfig, PlanConfig, RunConfig
from longshore.plan.planner import plan_step

DEMO = load_config(None)


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 8])
def test_the_demo_is_right_on_any_number_of_lanes(lanes):
    check_config(DEMO, lanes)


def test_the_demo_mixes_packs_of_several_cp_sizes():
    from longshore.data.mock import mock_lengths

    data = DEMO.data
    lengths = mock_lengths(data.mock, count=data.count, seed=data.seed).tolist()
    assert max(lengths) > 20 * sorted(lengths)[len(lengths) // 2]
    setting = planner_setting(DEMO, lanes=4, capacity=2048, decoder=decoder_config(DEMO.model))
    sizes = []
    for start in range(0, 64 * data.batch, data.batch):
        plan = plan_step(lengths[start : start + data.batch], setting)
        sizes.append(frozenset(pack.cp_size for round_ in plan.rounds for pack in round_.packs))
    assert frozenset.union(*sizes) == {1, 2, 4}
    assert frozenset({1, 2}) in sizes


def test_the_planner_gets_what_is_given():
    plan = PlanConfig(policy="static", cp_size=2, max_cp=2, max_sequences=9, align=16)
    config = replace(DEMO, plan=plan)
    setting = planner_setting(config, lanes=4, capacity=512, decoder=decoder_config(DEMO.model))
    assert (setting.lanes, setting.capacity, setting.policy) == (4, 512, "static")
    assert (setting.cp_sizes, setting.max_sequences, setting.align) == ((1, 2), 9, 16)
    assert setting.cp_size == 2
    without = planner_setting(DEMO, lanes=4, capacity=512, decoder=decoder_config(DEMO.model))
    assert (without.cp_size, without.cp_sizes, without.max_sequences) == (0, (1, 2, 4), None)


def test_heads_limit_the_cp_sizes_only_where_they_are_shared():
    decoder = preset("tiny-llama")
    assert shared_heads(decoder, ParallelConfig(attention="heads")) == 4
    assert shared_heads(decoder, ParallelConfig()) is None
    config = replace(DEMO, parallel=replace(DEMO.parallel, attention="heads"))
    check_config(config, 8)
    setting = planner_setting(config, lanes=8, capacity=512, decoder=decoder)
    assert setting.cp_sizes == (1, 2, 4)


def test_a_preset_with_other_numbers():
    decoder = decoder_config(ModelConfig(preset="tiny-qwen3", layers=5, vocab_size=99))
    assert (len(decoder.layers), decoder.vocab_size) == (5, 99)
    assert decoder_config(ModelConfig(preset="tiny-qwen3")) == preset("tiny-qwen3")


def test_the_longest_sequence_must_fit_somewhere():
    config = replace(DEMO, plan=replace(DEMO.plan, capacity=100))
    check_longest(config, 4, 400)
    with pytest.raises(ValueError, match=r"^the longest sequence: its 401 tokens .* plan.capacity"):
        check_longest(config, 4, 401)
    check_longest(replace(config, plan=replace(config.plan, capacity="auto")), 4, 401)


def test_an_empty_config_is_refused():
    with pytest.raises(ValueError, match="no model is given"):
        check_config(RunConfig(), 1)


def test_experts_are_balanced_as_asked(tmp_path):
    from tests.hf.folders import qwen3_moe

    qwen3_moe(tmp_path)
    folder = ModelConfig(from_hf=str(tmp_path))
    weights = [getattr(layer.mlp, "aux_weight", None) for layer in decoder_config(folder).layers]
    assert weights == [0.0, None, 0.0]
    decoder = decoder_config(replace(folder, aux_weight=0.25))
    assert [getattr(layer.mlp, "aux_weight", None) for layer in decoder.layers] == [
        0.25,
        None,
        0.25,
    ]
    with pytest.raises(ValueError, match=r"model\.bias_update needs a router with a bias, which"):
        decoder_config(replace(folder, bias_update=0.1))
    deepseek = ModelConfig(preset="tiny-deepseek-v3")
    assert decoder_config(deepseek).layers[1].mlp.bias_update == 1e-3
    last = decoder_config(replace(deepseek, bias_update=0.5, aux_weight=0.0)).mtp[0].mlp
    assert (last.bias_update, last.aux_weight) == (0.5, 0.0)
    off = decoder_config(replace(deepseek, bias_update=0.0)).layers[1].mlp
    assert (off.bias_update, off.bias) == (0.0, True)
    with pytest.raises(ValueError, match=r"model\.aux_weight is for experts, but this model has"):
        decoder_config(ModelConfig(preset="tiny-llama", aux_weight=0.1))
    assert decoder_config(ModelConfig(preset="tiny-llama", aux_weight=0.0)) == preset("tiny-llama")


def test_a_balance_loss_of_transformers_is_not_left_out_silently(tmp_path):
    from tests.hf.folders import qwen3_moe

    qwen3_moe(tmp_path, output_router_logits=True, router_aux_loss_coef=0.02)
    folder = ModelConfig(from_hf=str(tmp_path))
    reason = r"model\.from_hf: output_router_logits is true .* 0\.02; .* model\.aux_weight=0\.001"
    with pytest.raises(ValueError, match=reason):
        decoder_config(folder)
    for weight in (0.0, 0.5):
        assert decoder_config(replace(folder, aux_weight=weight)).layers[0].mlp.aux_weight == weight
    qwen3_moe(tmp_path / "none", output_router_logits=True, router_aux_loss_coef=0.0)
    assert decoder_config(ModelConfig(from_hf=str(tmp_path / "none")))
    qwen3_moe(tmp_path / "dense", output_router_logits=True, mlp_only_layers=[0, 1, 2])
    assert decoder_config(ModelConfig(from_hf=str(tmp_path / "dense")))


def test_what_cannot_be_written_is_refused_before_the_first_step(tmp_path, monkeypatch):
    def checked(**changes):
        model = ModelConfig(preset=changes.pop("preset"))
        output = replace(DEMO.output, **changes)
        check_config(replace(DEMO, model=model, output=output), 1)

    checked(preset="tiny-hybrid")
    checked(preset="tiny-qwen3-next", export="out")
    with pytest.raises(
        ValueError, match=r"output\.export: .* no architecture .* leave output\.exp"
    ):
        checked(preset="tiny-hybrid", export="out")
    from tests.hf.folders import llama

    from longshore.hf import config_file

    def refuse(config, base):
        raise ValueError("it has a third eye")

    llama(tmp_path)
    config = replace(DEMO, model=ModelConfig(from_hf=str(tmp_path)))
    monkeypatch.setattr(config_file, "choose_architecture", refuse)
    with pytest.raises(ValueError, match=r"model\.from_hf: .* but not written .* a third eye"):
        check_config(config, 1)


@pytest.mark.parametrize(
    ("settings", "ranks", "match"),
    [
        ({"pp": 3}, 4, "parallel.pp 3: .* multiple of 3, but there are 4; start 3 or 6 ranks"),
        ({"pp": 2}, 1, "there are 1; start 2 ranks, or change parallel.pp"),
        ({"tp": 3}, 4, "parallel.tp 3: .* start 3 or 6 ranks, or change parallel.tp$"),
        ({"tp": 2, "pp": 2}, 6, "tp 2 × parallel.pp 2 = 4: .* change parallel.tp or parallel.pp$"),
        ({"vpp": 2}, 4, "parallel.vpp needs a pipeline"),
        ({"layout": "Ett|L"}, 4, "parallel.layout needs a pipeline"),
        ({"pp": 2, "layout": "E|L"}, 4, "parallel.layout is 'E|L', which is not this model's"),
        ({"pp": 2, "vpp": 40}, 4, "too few for parallel.pp 2 × parallel.vpp 40"),
    ],
    ids=str,
)
def test_pipelines_that_cannot_be(settings, ranks, match):
    with pytest.raises(ValueError, match=match.replace("|", r"\|")):
        check_config(replace(DEMO, parallel=ParallelConfig(**settings)), ranks)


def parallel_config(model="tiny-deepseek-v3", *, sync="round", **settings):
    parallel, plan = ParallelConfig(**settings), replace(DEMO.plan, sync=sync)
    return replace(DEMO, model=ModelConfig(preset=model), parallel=parallel, plan=plan)


@pytest.mark.parametrize(
    ("config", "ranks", "match"),
    [
        (parallel_config(ep=3), 4, "ep is 3, which does not divide the 8 experts .* 1, 2, 4, 8$"),
        (
            parallel_config(ep=8),
            4,
            r"ep is 8, .* 4 ranks .*4 lanes × parallel.tp 1.; .* 1, 2, 4,",
        ),
        (parallel_config(ep=8, tp=2), 8, None),
        (parallel_config(ep=4, tp=2), 4, None),
        (parallel_config(ep=4, tp=2, pp=2), 4, "ep is 4, which does not divide the 2 ranks of a p"),
        (
            parallel_config(ep=16),
            16,
            "ep is 16, .* not divide the 8 experts .* 1, 2, 4, 8$",
        ),
        (
            parallel_config("tiny-llama", ep=2),
            2,
            "ep is 2, but the model has no experts; use parallel.ep=1",
        ),
        (parallel_config(ep=2, sync="step"), 2, "plan.sync=step does not work with parallel.ep 2"),
        (parallel_config("tiny-llama", tp=8), 8, None),
        (
            parallel_config("tiny-llama", tp=3),
            3,
            "tp is 3, .* 8 attention heads; .* 1, 2, 4, 8",
        ),
        (parallel_config("tiny-hybrid", tp=2), 4, None),
    ],
    ids=lambda value: None if isinstance(value, RunConfig) else str(value),
)
def test_tensor_and_expert_parallelism_that_the_model_allows(config, ranks, match):
    if match is None:
        check_config(config, ranks)
    else:
        with pytest.raises(ValueError, match=match):
            check_config(config, ranks)


def test_the_tokens_of_a_lane_are_a_multiple_of_tp():
    config = parallel_config("tiny-llama", tp=4)
    config = replace(config, plan=replace(config.plan, align=6, capacity=96, buckets=2))
    mock = {**config.data.mock, "max_seq_len": 150}
    check_config(replace(config, data=replace(config.data, mock=mock)), 8)
    decoder = decoder_config(config.model)
    setting = planner_setting(config, lanes=2, capacity=96, decoder=decoder)
    assert (lane_align(config), setting.align) == (12, 12)
    small = replace(config, plan=replace(config.plan, capacity=11))
    with pytest.raises(ValueError, match=r"capacity is 11, .*tp 4 .*align 6 .*capacity to 12"):
        check_config(small, 8)


def test_the_planner_costs_one_tensor_parallel_rank():
    decoder, parallel = preset("tiny-llama"), ParallelConfig(tp=2, attention="heads")
    whole, split = (
        planner_setting(replace(DEMO, parallel=each), lanes=4, capacity=512, decoder=decoder)
        for each in (replace(parallel, tp=1), parallel)
    )
    assert (whole.cp_sizes, split.cp_sizes) == ((1, 2, 4), (1, 2))
    assert split.profile.quadratic == whole.profile.quadratic / 2
    assert split.profile.node == whole.profile.node // 2
    asked = replace(DEMO, parallel=parallel, plan=replace(DEMO.plan, max_cp=4))
    with pytest.raises(ValueError, match=r"max_cp is 4, .* the 2 heads .*of each of 2 TP ranks"):
        check_config(asked, 16)


def test_the_planner_knows_what_experts_over_ranks_wait_for():
    config = parallel_config(ep=4, tp=2)
    decoder = decoder_config(config.model)
    setting = planner_setting(config, lanes=4, capacity=512, decoder=decoder)
    assert (setting.tp, setting.ep, setting.align) == (2, 4, 2)
    shares = setting.shares
    assert 0 < sum(shares.tokenwise) < sum(shares.forward_linear + shares.backward_linear)
    without = planner_setting(parallel_config(tp=2), lanes=4, capacity=512, decoder=decoder)
    assert without.stage_costs is None


def test_the_planner_costs_one_pipeline_rank():
    decoder = decoder_config(DEMO.model)
    whole, split = (
        planner_setting(
            replace(DEMO, parallel=ParallelConfig(pp=pp)), lanes=2, capacity=512, decoder=decoder
        )
        for pp in (1, 2)
    )
    assert split.profile.linear == whole.profile.linear / 2
    assert (split.pp, split.layout.count("|")) == (2, 1)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"eval_mock": {"mode": "distribution"}}, "draws from a distribution; give data.eval_cou"),
        ({"eval_path": "held-out.jsonl", "eval_count": 5}, "eval_count works only with data.eval"),
    ],
    ids=str,
)
def test_held_out_data_are_as_many_as_said(settings, match):
    config = replace(
        DEMO, data=replace(DEMO.data, **settings), train=replace(DEMO.train, eval_every=5)
    )
    with pytest.raises(ValueError, match=match):
        check_config(config, 4)


@pytest.mark.parametrize("loss", ["dpo", "grpo", "ppo", "distill", "cross_entropy"])
def test_depths_never_train_the_likelihood_of_bad_answers(loss):
    model = ModelConfig(preset="tiny-deepseek-v3")
    depths = len(decoder_config(model).mtp)
    config = replace(DEMO, model=model, train=replace(DEMO.train, loss=loss))
    if loss in ("distill", "cross_entropy"):
        check_config(config, 1)
    else:
        wanted = rf"train.loss is {loss}, but train.mtp_weight 0.1 .* {depths} depth.*=0$"
        with pytest.raises(ValueError, match=wanted):
            check_config(config, 1)
    check_config(replace(config, train=replace(config.train, mtp_weight=0.0)), 1)
    check_config(replace(config, model=ModelConfig(preset="tiny-llama")), 1)
