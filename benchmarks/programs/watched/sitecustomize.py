"""Stands on PYTHONPATH of a plain training: writes down the optimizer steps of its ranks, without a word of ZeroTune.

Each rank appends a line of JSON for each step of the first engine that makes one: the seconds by the clock, those of
processor time, the rows that went forward since the step before, and the engine's batch. The first line of a rank has
the engine's whole configuration too.
"""

import json
import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

ENGINE = "deepspeed.runtime.engine"
# A training is not watched for longer, in seconds: its speed is known by then.
LONG_ENOUGH_S = 5.0


class Watch:
    """Of one rank.

    Args:
        folder: where its steps are written.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._engine: int | None = None
        self._rows: dict[int, int] = {}
        self._first_s: float | None = None

    def forward(self, engine: Any, values: tuple[Any, ...]) -> None:
        """Counts the rows of a batch by its first tensor."""
        if engine.module.training:
            self._rows[id(engine)] = self._rows.get(id(engine), 0) + _rows(values)

    def step(self, engine: Any) -> None:
        """Writes down an optimizer step."""
        is_first = self._engine is None
        if is_first:
            self._engine = id(engine)
        if self._engine != id(engine):
            return
        now = time.perf_counter()
        line = {
            "clock": now,
            "cpu": time.process_time(),
            "rows": self._rows.pop(id(engine), 0),
            "batch": [
                engine.train_micro_batch_size_per_gpu(),
                engine.gradient_accumulation_steps(),
                engine.train_batch_size(),
            ],
        }
        if is_first:
            line["engine"] = _plain(vars(engine._config))
        # Lightning gives its first rank a number when it has begun.
        with (self._folder / f"rank-{os.environ['RANK']}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._first_s = self._first_s or now
        if now - self._first_s > LONG_ENOUGH_S:
            os._exit(0)


def _rows(values: Any) -> int:
    """Returns the first dimension of the first tensor in the arguments of a forward pass; 0 where there is none."""
    if hasattr(values, "shape"):
        return int(values.shape[0]) if len(values.shape) else 0
    inner = values.values() if hasattr(values, "values") else values if isinstance(values, (list, tuple)) else ()
    return next((rows for rows in map(_rows, inner) if rows), 0)


def _plain(value: Any) -> Any:
    """Returns a configuration as values that JSON has."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        if value.get("device") == "none":
            return None  # no offload
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(each) for each in value]
    if hasattr(value, "value") and hasattr(value, "name"):
        return value.value
    if value is None or isinstance(value, (str, int, float)):
        return value
    if type(value).__module__ == "torch":
        return str(value)
    return _plain(vars(value)) if hasattr(value, "__dict__") else type(value).__name__


def _watch(module: ModuleType) -> None:
    engine = module.DeepSpeedEngine
    watch = Watch(os.environ["WATCH_FOLDER"])
    forward, step = engine.forward, engine._take_model_step

    def watched_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch.forward(self, (*args, kwargs))
        return forward(self, *args, **kwargs)

    def watched_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        watch.step(self)
        return result

    engine.forward, engine._take_model_step = watched_forward, watched_step


def _replace(module: ModuleType) -> None:
    """Puts a configuration in the place of the dictionary in the code, as a user would by hand."""
    config = json.loads(Path(os.environ["WATCH_CONFIG"]).read_text())
    initialize = module.initialize

    def replaced(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("config") or kwargs.get("config_params")
        if isinstance(given, dict) and ("optimizer" in given or kwargs.get("optimizer") is not None):
            kwargs.pop("config_params", None)
            kwargs["config"] = config
        return initialize(*args, **kwargs)

    module.initialize = replaced


def _replace_arguments(module: ModuleType) -> None:
    """Puts the winner's batch into the Trainer's arguments, as a user would by hand."""
    path = os.environ["WATCH_CONFIG"]
    config = json.loads(Path(path).read_text())
    arguments = module.TrainingArguments
    complete = arguments.__post_init__

    def replaced(self: Any) -> None:
        if self.deepspeed:
            self.deepspeed = path
            self.per_device_train_batch_size = config["train_micro_batch_size_per_gpu"]
            self.gradient_accumulation_steps = config["gradient_accumulation_steps"]
        complete(self)

    arguments.__post_init__ = replaced


def _whole(module: ModuleType) -> None:
    """Leaves a model whole where the winner's stage does not partition it, as a user would by hand."""
    config = json.loads(Path(os.environ["WATCH_CONFIG"]).read_text())
    if config.get("zero_optimization", {}).get("stage", 0) == 3:
        return
    init = module.Init.__init__

    def whole(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "enabled": False})

    module.Init.__init__ = whole


class Finder(MetaPathFinder):
    """Has a word with a module when it has been imported."""

    def __init__(self) -> None:
        self._words = {ENGINE: _watch}
        if os.environ.get("WATCH_CONFIG"):
            self._words["deepspeed"] = _replace
            self._words["deepspeed.runtime.zero.partition_parameters"] = _whole
            self._words["transformers.training_args"] = _replace_arguments

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds a module as everybody else does, and has it changed by its loader."""
        word = self._words.pop(name, None)
        if word is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                _change(spec.loader, word)
                return spec
        return None


def _change(loader: Loader, word: Any) -> None:
    execute = loader.exec_module

    def changed(module: ModuleType) -> None:
        execute(module)
        word(module)

    loader.exec_module = changed  # type: ignore[method-assign]


if os.environ.get("WATCH_FOLDER"):
    sys.meta_path.insert(0, Finder())
if os.environ.get("WATCH_FOLDER") and "LOCAL_RANK" in os.environ:
    # As a slot of a CPU is a core.
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["LOCAL_RANK"])]})
