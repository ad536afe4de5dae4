"""torch's data loaders follow the candidate: workers, prefetching, pinned memory.

A loader that the code trains from gets its settings when it is read. By then Accelerate, DeepSpeed and the Trainer have
made their loaders from the code's, and all of them are read by `torch.utils.data.DataLoader.__iter__`. Loops without
gradients are evaluations. Their loaders stay as they are.

The sampler runs in the rank, with workers as without. A loader draws its workers' seed from the same generator in both
cases. So the samples have the same order, and the code draws the same numbers. Only numbers that the data set itself
draws for a sample come from another generator.
"""

import functools
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from types import FrameType, ModuleType
from typing import Any

from trial_lib.intercept.post_import import when_imported
from trial_lib.measure.user_program import may_be_of_the_user

WORKERS, PREFETCH, PINNED, PERSISTENT = "num_workers", "prefetch_factor", "pin_memory", "persistent_workers"
"""The settings of a loader, as torch names them."""

# The default that torch gives to a loader with workers (torch/utils/data/dataloader.py).
_PREFETCH = 2
_TRAINER = "transformers.trainer"


class LoaderOrigins:
    """Finds the lines of the user's code that made the data loaders. A loader made from another has the other's."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[weakref.ref[Any] | None, str, bool]] = {}

    def note(self, loader: Any) -> None:
        """Keeps the line that makes a loader."""
        dataset = getattr(loader, "dataset", None)
        known = self._places.get(id(dataset))
        if known is None or (known[0] is not None and known[0]() is not dataset):
            self._places[id(dataset)] = (_reference(dataset), *_calling_line())

    def of(self, loader: Any) -> tuple[str, bool]:
        """Returns the line (`file:line`, empty if unknown), and whether the Trainer has made the loader."""
        _, line, by_trainer = self._places.get(id(loader.dataset), (None, "", False))
        return line, by_trainer


def _reference(dataset: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(dataset)
    except TypeError:
        return None


def _calling_line() -> tuple[str, bool]:
    frame: FrameType | None = sys._getframe(3)
    by_trainer = False
    while frame is not None:
        name = frame.f_code.co_filename
        by_trainer |= str(frame.f_globals.get("__name__", "")).startswith(_TRAINER)
        if may_be_of_the_user(name) and os.sep + "trial_lib" + os.sep not in name:
            return f"{os.path.relpath(name)}:{frame.f_lineno}", by_trainer
        frame = frame.f_back
    return "", by_trainer


origins = LoaderOrigins()
"""Those of this process."""


def install(settings: Callable[[], Mapping[str, Any]]) -> None:
    """Makes data loaders follow. Call it before the user's program runs.

    Args:
        settings: returns the candidate's settings of a loader, by torch's names. One that is missing, or None, stays as
            the code has it.
    """
    when_imported("torch.utils.data.dataloader", functools.partial(_follow, settings))


def _follow(settings: Callable[[], Mapping[str, Any]], module: ModuleType) -> None:
    import torch

    loader_class: Any = module.DataLoader
    original_init, original_iter = loader_class.__init__, loader_class.__iter__

    @functools.wraps(original_init)
    def init(loader: Any, *args: Any, **kwargs: Any) -> None:
        """Replaces `DataLoader.__init__`."""
        original_init(loader, *args, **kwargs)
        origins.note(loader)

    @functools.wraps(original_iter)
    def read(loader: Any) -> Any:
        """Replaces `DataLoader.__iter__`."""
        wanted = {name: value for name, value in settings().items() if value is not None}
        if wanted and torch.is_grad_enabled():
            apply(loader, wanted)
        return original_iter(loader)

    loader_class.__init__, loader_class.__iter__ = init, read


def apply(loader: Any, wanted: Mapping[str, Any]) -> None:
    """Gives a loader settings, as its constructor would have.

    Args:
        loader: not read yet, or read to its end.
        wanted: by torch's names.
    """
    import torch

    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        # Each worker would give all of the data.
        wanted = {name: value for name, value in wanted.items() if name == PINNED}
    # The class forbids to set some of them once it is made.
    own = vars(loader)
    workers = int(wanted.get(WORKERS, loader.num_workers))
    if workers != loader.num_workers:
        own["_iterator"] = None
    own[WORKERS] = workers
    own[PINNED] = bool(wanted.get(PINNED, loader.pin_memory))
    if workers:
        own[PREFETCH] = int(wanted.get(PREFETCH, loader.prefetch_factor or _PREFETCH))
        own[PERSISTENT] = bool(wanted.get(PERSISTENT, loader.persistent_workers))
    else:
        # Torch refuses them without workers.
        own.update({PREFETCH: None, PERSISTENT: False, "timeout": 0})
