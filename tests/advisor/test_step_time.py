from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.advisor.machines import PART, make_machine

from longshore.advisor.step_time import (
    block_works,
    cost_profile,
    end_works,
    model_cost,
    part_time,
    part_works,
    round_busy,
    step_seconds,
)
from longshore.arch.attention import AttentionConfig
from longshore.arch.costs import forward_flops, parameter_count
from longshore.arch.decoder import DecoderConfig, LayerConfig
from longshore.arch.feed_forward import MLPConfig
from longshore.arch.memory import ALONE
from longshore.arch.part import Part, Product, Saved
from longshore.arch.presets import PRESETS, preset
from longshore.plan.types import Axes

DEVICE_BOUND = make_machine(host=0.0)
TINY = preset("tiny-qwen3")
PROFILE = cost_profile(DEVICE_BOUND, TINY, capacity=8192)
lengths_st = st.lists(st.integers(1, 3000), min_size=1, max_size=12)


def round_seconds(*args, **settings):
    return round_busy(*args, **settings).seconds


def test_work_by_hand():
    """The example of the module: 1 head of 2 dims at width 4, 3 tokens."""
    part = AttentionConfig(heads=1, kv_heads=1, head_dim=2, rope=None)
    (work,) = part_works(part, 4, [3], item=4)
    assert work.products == (Product(4, 2),) * 3 + (Product(2, 4),)
    assert work.core == 4 * 2 * 6
    assert work.values == 3 * (8 + 8 + 1 + 1)  # norm's rows, q k v and output, two statistics
    assert work.sequences == 2


def test_a_part_by_hand():
    part = AttentionConfig(heads=1, kv_heads=1, head_dim=2, rope=None)
    (work,) = part_works(part, 4, [3], item=4)
    rest = PART.call + PART.value * 54 + PART.core * 48 + PART.sequence * 2
    flops = 2 * 3 * 4 * 2 * 4
    each = part_time(make_machine(), work)
    assert each.forward == pytest.approx(flops * 1e-11 + 0.25 * rest)
    assert each.backward == pytest.approx(2 * flops * 1e-11 + 0.75 * rest)
    assert (each.host, each.host_forward) == (2e-4, 5e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_products_and_cores_are_all_flops(name):
    """Every part of every preset: nothing is counted twice, nothing is left out."""
    config, lengths = preset(name), [300, 7]
    works = block_works(config, lengths, item=2) + end_works(config, sum(lengths))
    flops = sum(
        times * (work.core + work.rows * sum(product.flops for product in work.products))
        for work, times in works.items()
    )
    assert flops == sum(forward_flops(config, length) for length in lengths)
    assert all(work.core >= 0 for work in works)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_time(name):
    machine = make_machine()
    assert round_seconds(machine, preset(name), [700, 80], tokens=800) > 0
    profile = cost_profile(machine, preset(name), capacity=4096)
    assert profile.linear > 0


@dataclass(frozen=True)
class Own(Part):
    """A user's part: only its FLOPs are known."""

    def parameters(self, width):
        return width

    def flops(self, width, length):
        return 1000 * length

    def saved(self, width):
        return Saved(0)


def test_an_unknown_part_takes_its_flops():
    machine = make_machine(byte=1e-9)
    (work,) = part_works(Own(), 4, [10], item=4)
    each = part_time(machine, work)
    moved = 10 * (8 + 1) * 4 * 4  # norm's rows and statistic, four times
    assert each.forward + each.backward == pytest.approx(3 * 10_000 * 1e-11 + moved * 1e-9)


def step_by_hand(machine, config, axes=ALONE):
    return step_seconds(machine, config, [[100], [50]], tokens=[100, 64], axes=axes)


def test_a_step_is_its_rounds_and_its_update():
    machine = make_machine(host=0.0, norm=1e-9, optimizer=2e-9, step_parameter=4e-9, step=0.5)
    count = parameter_count(TINY)
    rounds = [
        round_seconds(machine, TINY, [100], tokens=100),
        round_seconds(machine, TINY, [50], tokens=64),
    ]
    assert step_by_hand(machine, TINY) == pytest.approx(sum(rounds) + count * 7e-9 + 0.5)


def test_the_host_may_be_slower():
    machine = make_machine(host=1000.0, block_host=0.1, round_host=1.0, step_host=5.0)
    parts = 2 * len(TINY.layers) + 2  # with embedding and head
    host = parts * 0.2 + 0.1 * len(TINY.layers) + 1.0
    assert round_seconds(machine, TINY, [100], tokens=100) == pytest.approx(host)
    assert step_by_hand(machine, TINY) == pytest.approx(2 * host + 5.0)
    machine = make_machine(host=1000.0, graph_host=0.01)
    host = 2 * 0.2 + 0.01 * len(TINY.layers)
    assert round_busy(machine, TINY, [9], tokens=9, graph=True).host == pytest.approx(host)


def test_recomputation_adds_the_forward_of_blocks():
    plain = round_seconds(DEVICE_BOUND, TINY, [100], tokens=100)
    works = block_works(TINY, [100], item=4)
    forward = sum(n * part_time(DEVICE_BOUND, work).forward for work, n in works.items())
    assert round_seconds(DEVICE_BOUND, TINY, [100], tokens=100, recompute=True) == pytest.approx(
        plain + forward
    )


def test_ranks_of_a_lane_divide():
    whole = round_busy(make_machine(), TINY, [100], tokens=100)
    split = round_busy(make_machine(), TINY, [100], tokens=100, axes=Axes(lanes=1, tp=2, pp=4))
    assert split.device == pytest.approx(whole.device / 8)
    assert split.host == pytest.approx(whole.host / 4)


def test_weights_travel_in_each_round_or_once():
    """4 lanes, float32: zero3 gathers twice and reduces in each round, the others once."""
    machine, count = make_machine(host=0.0), parameter_count(TINY)
    moved = count * 3 / 4 * 1e-9
    zero3 = Axes(lanes=4, shard="zero3")
    assert round_busy(machine, TINY, [9], tokens=9, axes=zero3).exchange == pytest.approx(
        moved * 12
    )
    once = step_by_hand(machine, TINY)
    for shard in ("zero2", "none"):
        axes = Axes(lanes=4, shard=shard)
        assert step_by_hand(machine, TINY, axes) == pytest.approx(once + moved * 8)


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match="measured in float32, but the run computes in bfloat16"):
        model_cost(make_machine(), TINY, lanes=1, capacity=64, dtype="bfloat16")
    with pytest.raises(ValueError, match="tokens is 8, fewer than the 9"):
        round_seconds(make_machine(), TINY, [9], tokens=8)


@pytest.mark.property
@given(lengths_st, st.integers(1, 500))
def test_more_tokens_take_longer(lengths, more):
    tokens = sum(lengths)
    before = round_seconds(DEVICE_BOUND, TINY, lengths, tokens=tokens)
    padded = round_seconds(DEVICE_BOUND, TINY, lengths, tokens=tokens + more)
    longer = [lengths[0] + more, *lengths[1:]]
    grown = round_seconds(DEVICE_BOUND, TINY, longer, tokens=tokens + more)
    assert before < padded
    assert before < grown


@pytest.mark.property
@given(lengths_st, lengths_st)
def test_sequences_add_up(first, second):
    """Without costs of a call, two micro-batches take as long together as apart."""
    parts = tuple(replace(part, call=0.0) for part in DEVICE_BOUND.parts)
    machine = replace(DEVICE_BOUND, parts=parts)

    def seconds(lengths):
        return round_seconds(machine, TINY, lengths, tokens=sum(lengths))

    assert seconds([*first, *second]) == pytest.approx(seconds(first) + seconds(second))


@pytest.mark.property
@given(st.lists(st.integers(200, 8192), min_size=1, max_size=30))
def test_the_planners_costs_agree_with_predicted_rounds(lengths):
    """Micro-batches of half the capacity and more, on a machine whose sequences cost little."""
    while sum(lengths) > 8192 and len(lengths) > 1:
        lengths = lengths[1:]
    lengths = [*lengths, *[500] * max(0, (4096 - sum(lengths)) // 500 + 1)]
    lengths = lengths if sum(lengths) <= 8192 else [8192]
    profile = PROFILE
    cost = profile.round + profile.pack + profile.ideal(lengths)
    seconds = round_seconds(DEVICE_BOUND, TINY, lengths, tokens=sum(lengths))
    assert cost == pytest.approx(seconds, rel=0.03)


def test_the_planners_costs_where_the_host_is_slower():
    """It takes what it takes; plans are still to be level in what the device does."""
    machine = make_machine(round_host=1000.0)
    profile = cost_profile(machine, TINY, capacity=512)
    assert profile.linear > 0
    full = profile.sequence_cost(512, 512, 1) + profile.pack + profile.round
    assert full == pytest.approx(round_seconds(machine, TINY, [512], tokens=512), rel=0.1)


@pytest.mark.parametrize("machine", [make_machine(), DEVICE_BOUND], ids=["host", "device"])
@pytest.mark.parametrize("capacity", [2, 8, 64, 96, 127, 128])
def test_the_planners_costs_of_a_small_capacity(machine, capacity):
    """Enough samples to tell what a token costs from what a round costs."""
    profile = cost_profile(machine, TINY, capacity=capacity)
    full = profile.ideal([capacity]) + profile.pack + profile.round
    assert profile.ideal([capacity]) > 0
    assert full == pytest.approx(round_seconds(machine, TINY, [capacity], tokens=capacity), rel=0.1)


def test_the_planners_costs_on_ranks():
    machine = make_machine(message=1e-9)
    whole = cost_profile(machine, TINY, capacity=4096)
    split = cost_profile(machine, TINY, capacity=4096, axes=Axes(lanes=1, tp=2, pp=2))
    assert split == whole.on_ranks(tp=2, pp=2)
    rows = 2 * 8 * 16 * len(TINY.layers) * 4 * 3  # keys and values, three times
    assert whole.gather == pytest.approx((rows * 1e-9, rows * 4e-9))
    assert whole.message == pytest.approx(64 * 4 * 1e-9)
    assert whole.node == 8


def test_a_window_is_cheaper():
    def decoder(window):
        part = AttentionConfig(heads=4, kv_heads=2, head_dim=16, window=window)
        return DecoderConfig(
            vocab_size=64, width=64, layers=(LayerConfig(part, MLPConfig(width=128)),)
        )

    near, far = (
        round_seconds(DEVICE_BOUND, decoder(window), [4096], tokens=4096) for window in (64, None)
    )
    assert near < far
