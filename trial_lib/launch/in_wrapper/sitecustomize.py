"""Runs first in every Python that a wrapper starts. A program that is about to train writes a file and waits.

A training under DeepSpeed begins when it joins a process group. Before that a program only prepares. This module needs
the standard library alone, because any Python may run it.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

ARRIVED = "ZEROTUNE_ARRIVED"
"""The environment variable with the path of the file that the first training writes."""

OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""A variable that torch's launcher gives to its ranks, whoever calls it: torchrun, or Accelerate in its own process."""

_JOINS = {"torch.distributed.distributed_c10d": "init_process_group", "deepspeed.comm.comm": "init_distributed"}

# These are read at the start, because the program may change them before it trains.
_started = {
    "words": list(sys.orig_argv),
    "interpreter": sys.executable,
    "folder": os.getcwd(),  # noqa: PTH109 - a path that begins with a link is to stay as it is
    "environment": dict(os.environ),
}
_process = os.getpid()


class _Finder(importlib.abc.MetaPathFinder):
    """Changes the modules of `_JOINS` when they are loaded. The other finders find them."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _JOINS or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is None or spec.loader is None:
            return spec
        exec_module = spec.loader.exec_module

        def exec_and_change(module: ModuleType) -> None:
            exec_module(module)
            name = _JOINS[fullname]
            setattr(module, name, _arriving(getattr(module, name)))

        spec.loader.exec_module = exec_and_change  # type: ignore[method-assign]
        return spec


def _arriving(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def arrive(*args: Any, **kwargs: Any) -> None:
        asked = kwargs.get("world_size", -1)
        _arrive(asked if isinstance(asked, int) and asked > 0 else int(os.environ.get("WORLD_SIZE", "1")))

    return arrive


def _arrive(ranks: int) -> NoReturn:
    # Writes the file whole, unless another process has written it.
    is_worker = os.getpid() != _process or "--multiprocessing-fork" in sys.orig_argv
    path = os.environ[ARRIVED]
    own = f"{path}.{os.getpid()}"
    with open(own, "w", encoding="ascii") as file:  # noqa: PTH123
        json.dump({**_started, "ranks": ranks, "is_worker": is_worker}, file)
    with contextlib.suppress(FileExistsError):
        os.link(own, path)
    while True:
        time.sleep(60)


def _run_hidden() -> None:
    # Runs the `sitecustomize` of the environment, which this one hides.
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    others = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != here]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if ARRIVED in os.environ:
    if OF_TORCHRUN in os.environ:
        # As with a launcher that ZeroTune finds by its name. To import what the program trains with takes long.
        _arrive(int(os.environ["WORLD_SIZE"]))
    sys.meta_path.insert(0, _Finder())
    _run_hidden()
