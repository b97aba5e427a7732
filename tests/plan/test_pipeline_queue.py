from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plan.samples import examples

from longshore.plan.layout import Action, make_order
from longshore.plan.simulate import Message, Queue, Walk, message_of, rank_queues, walk

pytestmark = pytest.mark.property


@st.composite
def walks(draw: st.DrawFn) -> tuple[Walk, int, int]:
    """A walk of random heights, with pp and vpp."""
    pp, vpp = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    rounds = draw(st.integers(1, 4)) * (pp if vpp > 1 else 1)
    heights = draw(st.lists(st.integers(1, 9), min_size=rounds, max_size=rounds))
    return walk(make_order(rounds, pp=pp, vpp=vpp), heights, pp=pp, vpp=vpp), pp, vpp


def queues_of(walked: Walk, pp: int, vpp: int) -> tuple[Queue, ...]:
    return rank_queues(walked, pp=pp, stages=pp * vpp)


def messages_in(queue: Queue) -> list[tuple[int, Message]]:
    """With the place of their batch."""
    return [
        (place, message)
        for place, entry in enumerate(queue)
        if not isinstance(entry, Action)
        for message in entry
    ]


def spell(queue: Queue, rank: int) -> str:
    words = []
    for entry in queue:
        if isinstance(entry, Action):
            words.append(f"{entry.kind[0].upper()}{entry.round}")
            continue
        for message in entry:
            what = f"{message.action.kind[0].upper()}{message.action.round}"
            words.append(f"{'send' if message.source == rank else 'recv'} {what}")
    return "  ".join(words)


def test_two_ranks_by_hand() -> None:
    """The example of the module's docstring."""
    queues = queues_of(walk(make_order(2, pp=2, vpp=1), [1, 1], pp=2, vpp=1), 2, 1)
    assert [spell(queue, rank) for rank, queue in enumerate(queues)] == [
        "F0  send F0  F1  send F1  recv B0  B0  recv B1  B1",
        "recv F0  F0  recv F1  B0  send B0  F1  B1  send B1",
    ]


def test_both_neighbours_are_one_rank() -> None:
    """pp 2, interleaved: what both ranks exchange at one time is one batch, in one order."""
    walked = walk(make_order(2, pp=2, vpp=2), [1, 1], pp=2, vpp=2)
    zero, one = queues_of(walked, 2, 2)
    batches = [[entry for entry in queue if isinstance(entry, tuple)] for queue in (zero, one)]
    assert batches[0] == batches[1]
    both = [batch for batch in batches[0] if len({message.source for message in batch}) == 2]
    assert both
    assert len(both[0]) == 2


def test_without_a_pipeline_there_are_no_messages() -> None:
    walked = walk(make_order(3, pp=1, vpp=1), [1, 2, 3], pp=1, vpp=1)
    assert queues_of(walked, 1, 1) == walked.order


def test_ends_and_ranks_send_nothing_to_themselves() -> None:
    assert message_of(Action("forward", 3, 0), pp=2, stages=4) is None
    assert message_of(Action("backward", 0, 0), pp=2, stages=4) is None
    assert message_of(Action("forward", 0, 0), pp=1, stages=2) is None
    assert message_of(Action("forward", 1, 5), pp=2, stages=4) == Message(
        Action("forward", 1, 5), 1, 0
    )
    assert Message(Action("backward", 2, 5), 0, 1).needed_by == Action("backward", 1, 5)


def test_an_action_without_time_is_refused() -> None:
    walked = walk(make_order(2, pp=2, vpp=1), [1, 0], pp=2, vpp=1)
    with pytest.raises(AssertionError, match="takes no time"):
        queues_of(walked, 2, 1)


@settings(max_examples=examples(100))
@given(walks())
def test_actions_keep_their_order_and_each_message_is_at_both_its_ranks(
    drawn: tuple[Walk, int, int],
) -> None:
    walked, pp, vpp = drawn
    queues = queues_of(walked, pp, vpp)
    sides: Counter[tuple[Message, int]] = Counter()
    for rank, queue in enumerate(queues):
        assert tuple(e for e in queue if isinstance(e, Action)) == walked.order[rank]
        assert all(entry for entry in queue if not isinstance(entry, Action))
        sides.update((message, rank) for _, message in messages_in(queue))
    expected = [
        message
        for actions in walked.order
        for action in actions
        if (message := message_of(action, pp=pp, stages=pp * vpp)) is not None
    ]
    wanted = [(message, side) for message in expected for side in (message.source, message.target)]
    assert sides == Counter(wanted)


@settings(max_examples=examples(100))
@given(walks())
def test_a_message_is_after_its_action_and_before_the_one_that_needs_it(
    drawn: tuple[Walk, int, int],
) -> None:
    walked, pp, vpp = drawn
    for rank, queue in enumerate(queues_of(walked, pp, vpp)):
        place_of = {entry: n for n, entry in enumerate(queue) if isinstance(entry, Action)}
        for place, message in messages_in(queue):
            if message.source == rank:
                assert place_of[message.action] < place
            else:
                assert message.target == rank
                assert place < place_of[message.needed_by]


@settings(max_examples=examples(100))
@given(walks())
def test_both_ranks_of_a_pair_have_its_messages_in_one_order(
    drawn: tuple[Walk, int, int],
) -> None:
    walked, pp, vpp = drawn
    orders: dict[tuple[int, int], list[list[Message]]] = defaultdict(list)
    for queue in queues_of(walked, pp, vpp):
        by_pair: dict[tuple[int, int], list[Message]] = defaultdict(list)
        for _, message in messages_in(queue):
            by_pair[message.source, message.target].append(message)
        for pair, messages in by_pair.items():
            orders[pair].append(messages)
    for one, other in orders.values():
        assert one == other


def most_alive(rank: int, *, pp: int, vpp: int) -> int:
    """The bound of plan/layout.py."""
    ahead = pp - rank - 1
    return ahead + 1 if vpp == 1 else 2 * ahead + (vpp - 1) * pp + 1


def counts_of(queue: Queue, rank: int) -> tuple[int, int, int]:
    """The most activations, and received rows and gradients, that are kept at one time."""
    activations = 0
    waiting: set[Action] = set()
    counts = []
    for entry in queue:
        if isinstance(entry, Action):
            waiting.discard(entry)
            activations += 1 if entry.kind == "forward" else -1
        else:
            waiting |= {message.needed_by for message in entry if message.target == rank}
        forwards = sum(action.kind == "forward" for action in waiting)
        counts.append((activations, forwards, len(waiting) - forwards))
    assert not waiting
    assert activations == 0
    stage, rows, gradients = map(max, zip(*counts, strict=True))
    return stage, rows, gradients


@settings(max_examples=examples(100))
@given(walks())
def test_activations_are_bounded_by_stages_not_by_rounds(drawn: tuple[Walk, int, int]) -> None:
    walked, pp, vpp = drawn
    queues = queues_of(walked, pp, vpp)
    for rank, queue in enumerate(queues):
        stage, rows, gradients = counts_of(queue, rank)
        assert stage <= most_alive(rank, pp=pp, vpp=vpp)
        # A round that waits here is alive on the rank before, or, backward, on this one.
        assert rows <= most_alive((rank - 1) % pp, pp=pp, vpp=vpp) * (pp > 1)
        assert gradients <= most_alive(rank, pp=pp, vpp=vpp) * (pp > 1)


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2), (4, 2), (3, 3)])
def test_many_rounds_need_no_more_memory_than_some(pp: int, vpp: int) -> None:
    def counts(rounds: int) -> list[tuple[int, int, int]]:
        walked = walk(make_order(rounds, pp=pp, vpp=vpp), [1] * rounds, pp=pp, vpp=vpp)
        return [counts_of(queue, rank) for rank, queue in enumerate(queues_of(walked, pp, vpp))]

    some = counts(4 * pp)
    assert some == counts(16 * pp)
    assert [stage for stage, _, _ in some] == [most_alive(p, pp=pp, vpp=vpp) for p in range(pp)]
