from pathlib import Path

import pytest

from longshore.data import prepare
from longshore.data.prepare import TextRules, cache_folder


@pytest.fixture
def folder_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text('{"text": "Hi"}\n')
    Path("tok").mkdir()

    def folder(template):
        rules = TextRules(
            tokenizer="tok",
            template=template,
            loss_on="assistant",
            max_length=0,
            too_long="reject",
            fields=(),
            ignore=(),
            max_bytes=1000,
        )
        return cache_folder("chats.jsonl", rules, "prepared").name

    return folder


def test_the_choice_of_template_and_its_content_name_the_cache(folder_of, monkeypatch):
    Path("mine.jinja").write_text("one")
    names = [folder_of(choice) for choice in ("auto", "own", "qwen3", "mine.jinja")]
    assert len(set(names)) == 4
    Path("mine.jinja").write_text("two")
    assert folder_of("mine.jinja") not in names
    monkeypatch.setattr(prepare, "templates_digest", lambda: "of another version")
    assert folder_of("auto") not in names
    assert folder_of("qwen3") not in names
    assert folder_of("own") in names
