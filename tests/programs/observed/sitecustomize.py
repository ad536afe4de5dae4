"""Prints what rank 0's engine is given and what it trains on, in a plain run and in a trial alike.

The folder comes first on the program's PYTHONPATH. Each line is `OBSERVED` with a JSON document behind it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _say(**what: Any) -> None:
    if os.environ.get("RANK") == "0":
        print("OBSERVED", json.dumps(what, sort_keys=True, default=str), flush=True)


def _watch_engine(module: ModuleType) -> None:
    engine_class: Any = module.DeepSpeedEngine
    build, backward = engine_class.__init__, engine_class.backward

    def build_and_say(engine: Any, *args: Any, **kwargs: Any) -> None:
        build(engine, *args, **kwargs)
        _say(config=engine._config._param_dict)
        _say(batch=[engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()])

    def say_and_go_back(engine: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        _say(loss=float(loss.detach()))
        return backward(engine, loss, *args, **kwargs)

    engine_class.__init__, engine_class.backward = build_and_say, say_and_go_back


def _watch_partitioning(module: ModuleType) -> None:
    context: Any = module.Init
    enter = context.__enter__

    def say_and_enter(entered: Any) -> Any:
        _say(zero_init=bool(entered.enabled))
        return enter(entered)

    context.__enter__ = say_and_enter


_WATCHED: dict[str, Callable[[ModuleType], None]] = {
    "deepspeed.runtime.engine": _watch_engine,
    "deepspeed.runtime.zero.partition_parameters": _watch_partitioning,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Changes the watched modules when they are loaded."""

    _searching = ""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _WATCHED or fullname == self._searching:
            return None
        self._searching = fullname
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = ""
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_watch(module: ModuleType) -> None:
                exec_module(module)
                _WATCHED[fullname](module)

            spec.loader.exec_module = exec_and_watch  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
