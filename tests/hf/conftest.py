import pytest


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test asks the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
