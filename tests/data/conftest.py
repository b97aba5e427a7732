import pytest
from tests.data.samples import WORDS, write_lines
from tests.data.tiny import CHATML, word_tokenizer


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a tokenizer and an input, to work in by plain names."""
    monkeypatch.chdir(tmp_path)
    word_tokenizer(tmp_path / "tok", WORDS, template=CHATML)
    write_lines(tmp_path / "chats.jsonl")
    return tmp_path
