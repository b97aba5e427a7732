"""Which calls share a compiled kernel, without a GPU: Triton and its tensors are stand-ins."""

from types import SimpleNamespace

import pytest
import torch

from longshore.ops.kernels.launch import Kernel


class Jitted:
    """Counts what it compiles; a compiled kernel notes its launches."""

    arg_names = ("x", "rows", "eps", "WIDTH", "ROWS")

    def __init__(self):
        self.compiled, self.launches, self.interprets = 0, [], False

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.compiled += 1
            if self.interprets:
                return None
            return {(*grid, 1, 1)[:3]: self.launch} | {(3, 2, 1): self.launch}

        return run

    def launch(self, *args):
        self.launches.append(args)


def tensor(dtype=torch.bfloat16, at=0):
    return SimpleNamespace(is_cuda=True, dtype=dtype, data_ptr=lambda: 4096 + at)


@pytest.fixture
def jitted(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Jitted()


def test_a_kind_of_call_is_compiled_once_and_launched_with_its_constants_in_order(jitted):
    kernel = Kernel(jitted)
    for rows in (32, 64, 2**31 - 16):
        kernel[3, 2](tensor(), rows, 1e-6, ROWS=4, WIDTH=8, num_warps=4)
    assert jitted.compiled == 1
    assert [args[1:] for args in jitted.launches] == [
        (64, 1e-6, 8, 4),
        (2**31 - 16, 1e-6, 8, 4),
    ]


@pytest.mark.parametrize(
    ("args", "constants"),
    [
        ((tensor(torch.float32), 32, 1e-6), {}),
        ((tensor(at=8), 32, 1e-6), {}),
        ((tensor(), 1, 1e-6), {}),
        ((tensor(), 33, 1e-6), {}),
        ((tensor(), 2**31, 1e-6), {}),
        ((tensor(), 32, 1e-6), {"WIDTH": 9}),
        ((tensor(), 32, 1e-6), {"num_warps": 8}),
    ],
)
def test_another_kind_goes_to_triton(jitted, args, constants):
    kernel, usual = Kernel(jitted), {"WIDTH": 8, "ROWS": 4, "num_warps": 4}
    kernel[3,](tensor(), 32, 1e-6, **usual)
    kernel[3,](*args, **usual | constants)
    assert (jitted.compiled, jitted.launches) == (2, [])
    kernel[3,](tensor(), 48, 1e-5, **usual)
    assert jitted.compiled == 2


def test_another_device_and_a_cpu_go_to_triton(jitted, monkeypatch):
    kernel, usual = Kernel(jitted), {"WIDTH": 8, "ROWS": 4}
    kernel[3,](tensor(), 32, 1e-6, **usual)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    kernel[3,](tensor(), 32, 1e-6, **usual)
    kernel[3,](torch.zeros(1), 32, 1e-6, **usual)
    kernel[3,](torch.zeros(1), 32, 1e-6, **usual)
    assert (jitted.compiled, jitted.launches) == (4, [])


def test_where_triton_interprets_on_a_gpu_every_call_goes_to_it(jitted):
    jitted.interprets = True
    kernel, usual = Kernel(jitted), {"WIDTH": 8, "ROWS": 4}
    for _ in range(2):
        kernel[3,](tensor(), 32, 1e-6, **usual)
    assert (jitted.compiled, jitted.launches) == (2, [])
