import pytest
import torch

from longshore.train.device import prefer_blas, preferred_blas


@pytest.fixture
def onednn():
    """Whether torch may use oneDNN, put back afterwards."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = True
    yield lambda: torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_aarch64_multiplies_by_blas_alone(onednn, dtype):
    prefer_blas(torch.device("cpu"), dtype, "aarch64")
    assert not onednn()


def test_for_a_run_alone(onednn):
    with preferred_blas(torch.device("cpu"), torch.float32, "aarch64"):
        assert not onednn()
    assert onednn()


@pytest.mark.parametrize(
    ("device", "dtype", "machine"),
    [
        ("cpu", torch.float32, "x86_64"),
        ("cuda", torch.float32, "aarch64"),
        ("cpu", torch.bfloat16, "aarch64"),
    ],
)
def test_all_others_are_left_alone(onednn, device, dtype, machine):
    prefer_blas(torch.device(device), dtype, machine)
    assert onednn()
