import os
import resource
import signal
import threading
from pathlib import Path

import pytest

from longshore.data.chat_template import ChatTemplate, TemplateLimits
from longshore.data.chats import Chat
from longshore.data.prepare import run_tasks
from longshore.data.source import SampleError

CHAT = Chat(({"role": "user", "content": "Hi"},))
LOOPS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


def rendered(text, **limits):
    template = ChatTemplate(text, special_tokens={}, ends=(), limits=TemplateLimits(**limits))
    return template.render(CHAT)


def refusal(text, **limits):
    with pytest.raises(SampleError, match="the chat template") as caught:
        rendered(text, **limits)
    return caught.value


def test_a_loop_without_end_is_stopped():
    for text in (LOOPS, "{% macro f() %}" + LOOPS + "{% endmacro %}{{ f() }}"):
        error = refusal(text, seconds=0.2)
        assert error.reason == "template too slow"
        assert str(error) == "the chat template was stopped: it took more than 0.25 s of CPU time"


def render_loops():
    def work(folder):
        (Path(folder) / str(os.getpid())).write_text(refusal(LOOPS, seconds=0.2).reason)

    return work


def test_a_worker_stops_it_too(tmp_path):
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        Path(folder).mkdir()
    assert len(list(run_tasks(render_loops, folders, 2))) == 2
    written = [path for folder in folders for path in Path(folder).iterdir()]
    assert [path.read_text() for path in written] == ["template too slow"] * 2
    assert str(os.getpid()) not in {path.name for path in written}


def test_the_signal_is_given_back():
    before = signal.getsignal(signal.SIGPROF)
    assert rendered("{{ 1 + 1 }}", seconds=0.5) == "2"
    assert signal.getsignal(signal.SIGPROF) is before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_output_without_end_is_stopped():
    endless = "{% for i in range(99999) %}{{ 'ab' }}{% endfor %}"
    error = refusal(endless, characters=1000)
    assert error.reason == "template too large"
    assert "it writes more than 1,000 characters" in str(error)
    assert len(rendered("{{ 'ab' * 500 }}", characters=1000)) == 1000


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * [messages] }}",
        "{% set n = 10**10 %}{{ 'a' * n }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ messages[0].content.ljust(10**11) }}",
        "{{ messages[0].content | center(10**11) }}",
        "{{ 'a constant' | center(1000000000000) }}",
        "{{ '%100000000000d' % messages | length }}",
        "{% set ns = namespace(s='ab') %}"
        "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    ],
)
def test_what_one_step_would_blow_up_is_refused(text):
    limit = resource.getrlimit(resource.RLIMIT_AS)
    error = refusal(text, memory=2**28)
    assert error.reason in ("template too large", "template failed")
    assert resource.getrlimit(resource.RLIMIT_AS) == limit


def test_another_thread_has_the_limits_but_for_time():
    errors = []
    worker = threading.Thread(target=lambda: errors.append(refusal("{{ 'a' * 10**10 }}")))
    worker.start()
    worker.join()
    assert errors[0].reason == "template too large"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'assistant'}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ strftime_now.__self__.__class__.mro() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__base__}'.format(messages) }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro() }}",
        "{% include '/etc/passwd' %}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ messages | thought_and_content }}",
    ],
)
def test_nothing_outside_can_be_reached(attack):
    assert refusal(attack).reason == "template failed"
