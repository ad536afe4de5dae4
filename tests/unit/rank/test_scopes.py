"""DeepSpeed's functions that wait have names in a trace."""

import importlib

import pytest

from zerotune.trial_lib.rank.step_trace import _FUNCTIONS


@pytest.mark.parametrize("function", _FUNCTIONS, ids=lambda each: f"{each[1]}.{each[2]}")
def test_the_installed_deepspeed_has_each_of_them(function: tuple[str, str, str, str]) -> None:
    module, owner, name, _ = function
    assert callable(getattr(getattr(importlib.import_module(module), owner), name))
