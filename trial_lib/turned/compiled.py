"""`torch.compile` of a model, by `engine.compile()`."""

import importlib.util
import os
import shutil
from typing import Any

from trial_lib.turned.found import Found

_COMPILERS = ("g++", "clang++")


def find(model: Any) -> Found:
    """Returns whether a model is compiled, and whether it can be."""
    if hasattr(model, "activation_checkpoint_interval"):
        return Found(reason="the engine of a pipeline is not compiled")
    if hasattr(model, "_orig_mod") or any(_is_compiled(module) for module in model.modules()):
        return Found(reason="your code compiles its model by itself")
    if missing := _missing():
        return Found(reason=f"torch.compile needs {missing}")
    return Found.of(False, (False, True))


def turn(engine: Any, is_on: bool) -> None:
    """Compiles the model of an engine, which its first step then pays for."""
    if is_on:
        engine.compile()


def _is_compiled(module: Any) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def _missing() -> str:
    """Returns the compiler that inductor would not find; empty if there is one.

    A foreseen run compiles nothing, and its device has the compilers of another host.
    """
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().device_name()
    if device not in ("cpu", "cuda"):
        return ""
    if device == "cpu":
        found = any(map(shutil.which, (os.environ.get("CXX", _COMPILERS[0]), *_COMPILERS)))
        return "" if found else "a C++ compiler such as g++"
    return "" if importlib.util.find_spec("triton") is not None else "triton"
