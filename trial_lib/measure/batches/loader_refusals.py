"""Decides whether torch's data loader gives the same batches with other workers, and says why if it may not.

Workers are processes. Torch forks them, or starts new interpreters and pickles the data set. Both share less with the
training than a loop in the same process. The first reason that holds is the answer.
"""

import contextlib
import io
import pickle
import socket
import sqlite3
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

# A data set's handles are attributes of it, or of a reader that it wraps.
_DEEPEST, _MOST_ITEMS = 4, 64
# Readers whose connection or cursor two processes cannot share. Their packages may not be installed.
_HANDLES = (("h5py", "File"), ("h5py", "Dataset"), ("lmdb", "Environment"), ("zipfile", "ZipFile"))
# A larger data set takes too long to pickle for an answer.
_LARGEST_PICKLED = 64 * 2**20


def refusal(loader: DataLoader[Any], gives_from_device: bool) -> str:
    """Returns why another number of workers is not tried with a loader, as a clause; empty if it may be.

    Args:
        loader: that the code trains from.
        gives_from_device: whether a batch of it was on another device than the processor.
    """
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is iterable, so each worker would give all of it"
    if gives_from_device:
        return "it gives batches that are on the device already, and a worker would need the device"
    held = next(_held(loader.dataset, _DEEPEST, set()), "")
    if held:
        return f"its data set holds {held}, which two processes cannot share"
    if loader.num_workers == 0 and _start_method(loader) != "fork":
        return _unpicklable(loader)
    return ""


def _start_method(loader: DataLoader[Any]) -> str:
    context = loader.multiprocessing_context or torch.multiprocessing
    return str(context.get_start_method())


def _unpicklable(loader: DataLoader[Any]) -> str:
    """Returns why a new interpreter cannot get what it needs; empty if it can, or if that is too large to find out."""
    try:
        pickle.dump((loader.dataset, loader.collate_fn, loader.worker_init_fn), _Limited())
    except _TooLargeError:
        return ""
    except Exception as error:  # noqa: BLE001 - the data set's own code may raise anything
        return f"its data set cannot be pickled ({type(error).__name__}: {error})"
    return ""


class _TooLargeError(Exception):
    """More was pickled than an answer is worth."""


class _Limited:
    """A file that forgets all that is written, and raises when it is too much."""

    def __init__(self) -> None:
        self._size = 0

    def write(self, data: Any) -> int:
        """Counts the bytes."""
        self._size += len(data)
        if self._size > _LARGEST_PICKLED:
            raise _TooLargeError
        return len(data)


def _held(value: Any, depth: int, seen: set[int]) -> Iterator[str]:
    """Yields, in words, what a value holds that another process cannot use as well."""
    if id(value) in seen or isinstance(value, (str, bytes, int, float, bool, type(None), type)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.device.type not in ("cpu", "meta"):
            yield f"a tensor on {value.device.type}"
        return
    if _is_handle(value):
        yield f"an open {type(value).__name__}"
        return
    if depth > 0:
        for inner in _inside(value):
            yield from _held(inner, depth - 1, seen)


def _is_handle(value: Any) -> bool:
    if isinstance(value, io.IOBase):
        # A file in memory is copied. An offset is shared.
        with contextlib.suppress(OSError, ValueError):
            return not value.closed and value.fileno() >= 0
        return False
    if isinstance(value, (socket.socket, sqlite3.Connection)):
        return True
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__}
    return not kinds.isdisjoint(_HANDLES)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from islice(value.values(), _MOST_ITEMS)
    elif isinstance(value, (list, tuple)):
        yield from islice(value, _MOST_ITEMS)
    else:
        yield from islice(getattr(value, "__dict__", {}).values(), _MOST_ITEMS)
