"""Launches of Triton kernels, by modules that stand for triton's."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from zerotune.trial_lib.messages.foreseen_run import OPERATIONS
from zerotune.trial_lib.plan.simulate.libraries import PATCHES
from zerotune.trial_lib.plan.simulate.logs import OperationLog
from zerotune.trial_lib.rank.patching import installed


class _Interface:
    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)


class JITFunction(_Interface):
    def __init__(self, fn):
        self.fn, self.__name__ = fn, fn.__name__

    def run(self, *args, grid, warmup, **kwargs):
        raise RuntimeError("there is no GPU")


class Autotuner(JITFunction):
    def run(self, *args, **kwargs):
        raise RuntimeError("there is no GPU to measure on")


def _cross_entropy_kernel(x_ptr, y_ptr, n_cols): ...


@pytest.fixture
def operations(monkeypatch):
    for name, classes in (("triton.runtime.jit", [JITFunction]), ("triton.runtime.autotuner", [Autotuner])):
        module = ModuleType(name)
        for each in classes:
            setattr(module, each.__name__, each)
        monkeypatch.setitem(sys.modules, name, module)
    log = OperationLog()
    launches = [row for row in PATCHES if row.library.startswith("triton")]
    with installed(launches, SimpleNamespace(operations=log)):
        yield log


@pytest.mark.parametrize("launcher", [JITFunction, Autotuner])
def test_a_launch_moves_each_of_its_tensors_once(operations, launcher):
    x, y = torch.empty(8, 100, dtype=torch.bfloat16), torch.empty(8, dtype=torch.int64)
    launcher(_cross_entropy_kernel)[(8,)](x, y_ptr=y, n_cols=100, again=x)
    (row,) = operations.record()
    assert OPERATIONS[row.kind] == "loss"
    assert operations.dtypes[row.dtype] == "bfloat16"
    assert (row.flops, row.moved, row.on_host) == (800.0, 1600.0 + 64.0, 1)


def test_a_kernel_that_is_only_compiled_does_no_work(operations):
    JITFunction(_cross_entropy_kernel).run(torch.empty(8), grid=(1,), warmup=True)
    assert operations.record() == ()
