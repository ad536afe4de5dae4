"""Code of packages that name CUDA, parameters of their own classes, and FLOPs of bitsandbytes' operators."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from zerotune.trial_lib.plan.simulate.libraries import PATCHES, PRODUCTS, flops_of, with_pretended_device
from zerotune.trial_lib.rank.patching import install, installed

SAMPLES, OUTPUTS, INPUTS = 6, 5, 4
SOURCE = """
DEVICES = {"cpu", "cuda", "xpu"}

def name(device="cuda"):
    return device

def has_kernel(kind):
    return kind in ("cuda", "xpu")

class Layer:
    def is_there(self, kind):
        return [kind == "cuda" for _ in "a"] == [True]

TEXT = "cuda is fast"
"""


def test_a_constant_becomes_the_pretended_device():
    found = {}
    exec(with_pretended_device(compile(SOURCE, "source", "exec")), found)
    assert found["DEVICES"] == {"cpu", "cuda", "xpu", "foreseen"}
    assert found["name"]() == "foreseen"
    assert found["has_kernel"]("foreseen")
    assert found["Layer"]().is_there("foreseen")
    assert found["TEXT"] == "cuda is fast"


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    install(row for row in PATCHES if row.library == "sys")
    return tmp_path


@pytest.mark.parametrize(("package", "expected"), [("liger_kernel", "foreseen"), ("a_users_own", "cuda")])
def test_packages_by_name_alone_are_changed(packages, monkeypatch, package, expected):
    (packages / package).mkdir()
    (packages / package / "__init__.py").write_text("from .parts import WORD\n")
    (packages / package / "parts.py").write_text("WORD = 'cuda'\n")
    for name in (package, f"{package}.parts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        assert expected == importlib.import_module(package).WORD
    finally:
        for name in (package, f"{package}.parts"):
            sys.modules.pop(name, None)


class _Packed(torch.nn.Parameter):
    def __new__(cls, data, requires_grad=False):
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.blocks = 4
        return made

    def twice(self):
        return 2 * self.blocks


def test_a_parameter_of_a_librarys_own_class_is_fake_too():
    class Mode:
        def __init__(self):
            self.fakes = FakeTensorMode()

        def parameter(self, real):
            return self.fakes.from_tensor(real)

    mode = Mode()
    with installed([row for row in PATCHES if row.what == "Tensor._make_subclass"], mode):
        for data in (torch.ones(3), mode.parameter(torch.ones(3))):
            made = _Packed(data)
            assert isinstance(made, FakeTensor)
            assert isinstance(made, _Packed)
            assert (made.twice(), made.requires_grad, made.shape) == (8, False, (3,))
        assert type(torch.nn.Parameter(torch.ones(3))) is torch.nn.Parameter


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_has_two_flops_for_each_sample_and_weight(name):
    samples, packed = torch.empty(2, 3, INPUTS), torch.empty(OUTPUTS * INPUTS // 2, 1)
    weights = torch.empty(OUTPUTS, INPUTS)
    arguments = {
        "int8_linear_matmul": (samples, weights),
        "int8_scaled_mm": (samples, weights, None, None),
        "int8_mixed_scaled_mm": (samples, samples, weights, None, None),
        "gemm_4bit": (samples, packed, [OUTPUTS, INPUTS], None, 64, "nf4"),
        "gemv_4bit": (samples, packed, [OUTPUTS, INPUTS], None, None, 64),
    }[name]
    assert flops_of(*PRODUCTS[name])(*arguments, out_val=None) == 2 * SAMPLES * OUTPUTS * INPUTS
