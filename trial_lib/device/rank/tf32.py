"""Whether torch may multiply 32-bit numbers in TF32, by either of the names that a program can set it by."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch


def allows_products() -> bool:
    """Returns whether products of matrices may use it."""
    backend = torch.backends.cuda.matmul
    return _allows(lambda: backend.allow_tf32) or _says_tf32(backend)


def allows_convolutions() -> bool:
    """Returns whether convolutions may, as they may by default."""
    backend = torch.backends.cudnn
    return _allows(lambda: backend.allow_tf32) or _says_tf32(getattr(backend, "conv", None))


def _allows(flag: Callable[[], bool]) -> bool:
    # torch raises if the program has set it by its newer name, so that is asked as well.
    with contextlib.suppress(RuntimeError):
        return bool(flag())
    return False


def _says_tf32(backend: Any) -> bool:
    return getattr(backend, "fp32_precision", "") == "tf32"
