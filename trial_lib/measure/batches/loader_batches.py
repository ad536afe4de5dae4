"""The batches that torch's data loaders give to the user's code: seen ahead of it, and made longer for it.

A batch is whole where its loader gives it: labels that never reach the engine are as long as the tokens that do. Every
loop over a `torch.utils.data.DataLoader` takes its batches by `next`, with and without workers: scripts, the Trainer,
Accelerate, DeepSpeed's own loader and that of a trial class.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trial_lib.measure.batches.batch_shape import tokens_per_row
from trial_lib.measure.batches.stretched_batch import stretched

# Of those seen ahead, which the code still gets: enough to train on for some steps.
_MOST_KEPT = 64
# A program that counts its steps, and not its epochs, reads a loader without a batch for ever.
_MOST_EMPTY = 100


class LoaderBatches:
    """Stands between the data loaders of this process and the code that reads them."""

    def __init__(self) -> None:
        self._next = _BaseDataLoaderIter.__next__
        self._length = 0
        self._to_stretch = 0
        # By iterator, so that the batches of two loaders that are read side by side still fit to each other.
        self._stretched: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._ahead: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
        self._source: weakref.ref[Any] | None = None
        self._last: weakref.ref[Any] | None = None
        self._came_empty = 0
        self._ran_empty: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Puts itself in the way; once for a process, and before the user's code runs."""

        def taken(iterator: Any) -> Any:
            return self._taken(iterator)

        _BaseDataLoaderIter.__next__ = taken  # type: ignore[method-assign, assignment]

    @property
    def came_empty(self) -> bool:
        """Whether the last loader that was read to train on had no batch at all."""
        return self._came_empty > 0

    def start_over(self, ran_empty: Callable[[], None]) -> None:
        """Begins with another run of the program.

        Args:
            ran_empty: called when the code has read loaders that have no batch again and again.
        """
        self._came_empty, self._ran_empty = 0, ran_empty

    @property
    def has_source(self) -> bool:
        """Whether a loader has given sequences to train on, and may give more."""
        return self._source is not None and self._source() is not None

    @property
    def has_fixed_size(self) -> bool:
        """Whether the loader that gave the last batch has torch's own sampler, of a fixed batch size."""
        iterator = self._last() if self._last is not None else None
        sampler: Any = getattr(iterator, "_index_sampler", None)
        # Accelerate's shards hold the sampler that they divide.
        while type(sampler) is not BatchSampler and hasattr(sampler, "batch_sampler"):
            sampler = sampler.batch_sampler
        return type(sampler) is BatchSampler

    def stretch(self, length: int, batches: int) -> None:
        """Makes the next batches longer.

        Args:
            length: tokens that their samples are to have.
            batches: how many of each loader's; 0 for none any more.
        """
        self._length, self._to_stretch = length, batches
        self._stretched.clear()

    def lengths_ahead(self, most: int, at_first: int, seconds: float) -> list[int]:
        """Returns the tokens in a sample of the next batches; the code gets the first of them as if nobody had looked.

        Args:
            most: batches to look at.
            at_first: batches after which it ends if all are of one length.
            seconds: after which it ends.
        """
        iterator = self._source() if self._source is not None else None
        lengths: list[int] = []
        if iterator is None:
            return lengths
        kept = self._ahead.setdefault(iterator, deque())
        started = time.monotonic()
        for count in range(most):
            if time.monotonic() - started > seconds:
                break
            if count >= at_first and len(set(lengths)) <= 1:
                break
            try:
                batch = self._next(iterator)
            except StopIteration:
                break
            if len(kept) < _MOST_KEPT:
                kept.append(batch)
            length = tokens_per_row(batch)
            if length is not None:
                lengths.append(length)
        return lengths

    def _taken(self, iterator: Any) -> Any:
        kept = self._ahead.get(iterator)
        try:
            batch = kept.popleft() if kept else self._next(iterator)
        except StopIteration:
            self._note_end(iterator)
            raise
        self._came_empty = 0
        # Validation data are read without gradients.
        if torch.is_grad_enabled():
            self._last = weakref.ref(iterator)
        if torch.is_grad_enabled() and tokens_per_row(batch) is not None:
            self._source = weakref.ref(iterator)
            count = self._stretched.get(iterator, 0)
            if count < self._to_stretch:
                self._stretched[iterator] = count + 1
                batch = stretched(batch, self._length)
        return batch

    def _note_end(self, iterator: Any) -> None:
        # Validation data are read without gradients.
        if torch.is_grad_enabled() and iterator._num_yielded == 0:
            self._came_empty += 1
            if self._came_empty == _MOST_EMPTY:
                self._ran_empty()


loader_batches = LoaderBatches()
"""Those of this process."""
