"""Whether a model can be compiled, by the compilers that its device's host has."""

import importlib.util
import shutil

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from zerotune.trial_lib.rank.model_transforms import find_compiled as find


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("cpu", "torch.compile needs a C++ compiler such as g++"),
        ("cuda", "torch.compile needs triton"),
        # A device that is pretended is on another host, and nothing is compiled for it here.
        ("foreseen", ""),
    ],
)
def test_a_compiler_is_needed_where_the_model_trains_and_not_where_it_is_foreseen(
    monkeypatch: pytest.MonkeyPatch, device: str, reason: str
) -> None:
    monkeypatch.setattr(type(get_accelerator()), "device_name", lambda self, index=None: device)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = find(torch.nn.Linear(2, 2))
    assert found.reason == reason
    assert found.values == (() if reason else (False, True))
