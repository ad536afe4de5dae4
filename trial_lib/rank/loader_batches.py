"""The batches that torch's data loaders give to the user's code. The rank looks ahead at them, and stretches them.

A loader's batch is complete: labels that never reach the engine are as long as the tokens that do. Every loop over a
`torch.utils.data.DataLoader` takes its batches by `next`, with and without workers. That holds for scripts, the
Trainer, Accelerate, DeepSpeed's own loader and the loader of a trial class.
"""

import contextlib
import copy
import io
import math
import pickle
import socket
import sqlite3
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from zerotune.trial_lib.rank.data_offset import data_offset
from zerotune.trial_lib.rank.patching import put


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """Yields the tensors in nested mappings, sequences and (Hugging Face) model inputs, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def batch_sizes(inputs: Any) -> tuple[int, ...]:
    """Sizes of the first tensor in the dimensions that may be the batch's; empty without a tensor.

    These are the first dimension, and the second for inputs such as `(sequence, batch, ...)`. In a matrix of
    floating-point numbers the second dimension has the features.
    """
    first = next((tensor for tensor in tensors_in(inputs) if tensor.dim() > 0), None)
    if first is None:
        return ()
    has_features = first.dim() == 2 and first.is_floating_point()
    return tuple(int(size) for size in first.shape[: 1 if has_features else 2])


def shapes_of(inputs: Any) -> list[torch.Tensor]:
    """Tensors with the shapes and types of those in the inputs, without their data."""
    return [tensor.detach().to("meta") for tensor in tensors_in(inputs)]


def elements_in(inputs: Any) -> int:
    """How many numbers all tensors have together."""
    return sum(tensor.numel() for tensor in tensors_in(inputs))


def tokens_per_row(inputs: Any) -> int | None:
    """The length of the first 2-D integer tensor; None without one."""
    tokens = _tokens(inputs)
    return None if tokens is None else int(tokens.shape[1])


def tokens_in(inputs: Any) -> int | None:
    """The tokens in all rows; None if the inputs show none."""
    tokens = _tokens(inputs)
    return None if tokens is None else tokens.numel()


def tokens_attended(inputs: Any) -> torch.Tensor | None:
    """The tokens that an attention mask of 2 dimensions leaves, without padding; None if no mapping has one."""
    if isinstance(inputs, Mapping):
        mask = inputs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            return mask.count_nonzero()
        inputs = tuple(inputs.values())
    found = map(tokens_attended, inputs) if isinstance(inputs, (list, tuple)) else ()
    return next((each for each in found if each is not None), None)


def _tokens(inputs: Any) -> torch.Tensor | None:
    return next(
        (each for each in tensors_in(inputs) if each.dim() == 2 and each.dtype in (torch.int64, torch.int32)), None
    )


def stretched(batch: Any, length: int) -> Any:
    """A batch with sequences of `length` tokens; itself if it is as long, or shows no sequence.

    The sequence is the second dimension of the first 2-D integer tensor. All other tensors that run along it become as
    long: attention masks, square ones too, labels and position numbers. All values are the data's own, so the model has
    a place for each position number and token.
    """
    current = tokens_per_row(batch)
    if current is None or not 0 < current < length:
        return batch
    samples = next(int(tensor.shape[0]) for tensor in tensors_in(batch) if tokens_per_row(tensor) is not None)

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        places = torch.arange(length, device=tensor.device) % current
        for axis in _sequence_axes(tensor, samples, current):
            tensor = tensor.index_select(axis, places)
        return tensor

    return with_tensors(batch, longer)


def _sequence_axes(tensor: torch.Tensor, samples: int, length: int) -> list[int]:
    if tensor.dim() < 2 or tensor.shape[0] not in (1, samples):
        return []
    axes = [1] if tensor.shape[1] == length else []
    is_square = tensor.dim() > 2 and tuple(tensor.shape[-2:]) == (length, length)
    # Floating-point numbers of three dimensions are features. There may be as many features as tokens by chance.
    if is_square and (tensor.dim() > 3 or not tensor.is_floating_point()):
        axes += [axis for axis in (tensor.dim() - 2, tensor.dim() - 1) if axis not in axes]
    return axes


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of nested mappings and sequences with other tensors, in the order of `tensors_in`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = with_tensors(item, change)
        return copied
    if isinstance(value, Mapping):
        return {key: with_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [with_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


# Enough batches to train on for some steps. The code still gets all batches that were looked at.
_MOST_KEPT = 64
# A program that counts its steps, and not its epochs, reads an empty loader forever.
_MOST_EMPTY = 100


@dataclass(frozen=True)
class WorkersRead:
    """The batches of a step that the workers of one iterator have made."""

    read: int  # their number
    place: int  # of the last one, among all batches of the iterator. Each epoch begins with the first worker.
    workers: int  # worker processes, which make the batches in turn


@dataclass(frozen=True)
class StepLoading:
    """How a step got its batches from data loaders."""

    waited_s: float = 0.0  # seconds for which the code has waited for them
    by_workers: tuple[WorkersRead, ...] = ()  # of each iterator with workers, in the order of reading
    # Whether workers have made the first batch of an iterator. The step then has waited for them to start.
    begins: bool = False

    @property
    def cycle(self) -> int:
        """Steps after which the same workers make the last batches of a step again."""
        return math.lcm(*(each.workers // math.gcd(each.workers, each.read) for each in self.by_workers))

    def phase(self, first: "StepLoading") -> float:
        """Where the step is in its cycle: a number that the steps of a cycle do not share, the same on all ranks.

        It is relative to `first`, as ranks may have read more batches before. It is infinite if workers have started in
        the step, and -1 if none of its batches is a worker's. Such a step is in no cycle.
        """
        if self.begins or not self.by_workers:
            return math.inf if self.begins else -1.0
        phase, radix = 0, 1
        for number, each in enumerate(self.by_workers):
            start = first.by_workers[number].place if number < len(first.by_workers) else 0
            phase += (each.place - start) % each.workers * radix
            radix *= each.workers
        return phase


class LoaderBatches:
    """Wraps the data loaders of this process, between them and the code that reads them.

    `gives_from_device` says that a batch was on another device while `is_surveyed`.
    """

    def __init__(self) -> None:
        self._next = _BaseDataLoaderIter.__next__
        self._length = 0
        self._to_stretch = 0
        # By iterator, so that the batches of two loaders that are read side by side still match.
        self._stretched: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._ahead: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
        # The iterators of the last batch with sequences and of the last batch to train on; None if it is gone
        self._source: Callable[[], Any] = lambda: None
        self._last: Callable[[], Any] = lambda: None
        self._came_empty = 0
        self._ran_empty: Callable[[], None] = lambda: None
        self._loaders: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._offsets: weakref.WeakKeyDictionary[Any, tuple[int | None, int | None]] = weakref.WeakKeyDictionary()
        self.waited_s = 0.0  # for batches to train on
        # Batches that the code has taken from iterators with workers: of each iterator, and in this step.
        self._places: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._read: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._begins = False
        # The seconds that earlier steps have waited.
        self._waited_before = 0.0
        self.is_surveyed = self.gives_from_device = False

    def install(self) -> None:
        """Wraps the loaders, once for a process, and before the user's code runs."""

        def taken(iterator: Any) -> Any:
            return self._taken(iterator)

        original_init = _BaseDataLoaderIter.__init__

        def init(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            offset = data_offset.move(loader)
            original_init(iterator, loader, *args, **kwargs)
            self._offsets[iterator] = offset
            self._loaders[iterator] = weakref.ref(loader)

        put(_BaseDataLoaderIter, "__init__", init)
        put(_BaseDataLoaderIter, "__next__", taken)
        data_offset.install()

    @property
    def came_empty(self) -> bool:
        """Whether the last loader that was read to train on had no batch at all."""
        return self._came_empty > 0

    def start_over(self, ran_empty: Callable[[], None], share: float = 0.0, of_stream: int = 0, step: int = 0) -> None:
        """Begins another run of the program, with its data at an offset as `DataOffset` has it.

        `ran_empty` is called when the program has read empty loaders again and again.
        """
        self._came_empty, self._ran_empty = 0, ran_empty
        data_offset.share, data_offset.of_stream, data_offset.step = share, of_stream, step

    @property
    def has_source(self) -> bool:
        """Whether a loader has given sequences to train on, and may give more."""
        return self._source() is not None

    @property
    def training_loader(self) -> Any:
        iterator = self._last()
        loader = None if iterator is None else self._loaders.get(iterator)
        return None if loader is None else loader()

    @property
    def offset(self) -> tuple[int | None, int | None]:
        """As `DataOffset.move` returns it, of the iterator that is read to train on."""
        iterator = self._last()
        return (None, None) if iterator is None else self._offsets.get(iterator, (None, None))

    @property
    def has_fixed_size(self) -> bool:
        """Whether the loader of the last batch has torch's own sampler, with a fixed batch size."""
        return _torchs_sampler(self._last())[0] is not None

    @property
    def samples_per_epoch(self) -> int | None:
        return samples_of(self._last())

    def take_loading(self) -> StepLoading:
        reads = [WorkersRead(read, self._places[each], each._num_workers) for each, read in self._read.items()]
        loading = StepLoading(self.waited_s - self._waited_before, tuple(reads), self._begins)
        self._waited_before, self._begins = self.waited_s, False
        self._read.clear()
        return loading

    def stretch(self, length: int, batches: int) -> None:
        """Stretches the next batches of each loader to `length` tokens; 0 batches end it."""
        self._length, self._to_stretch = length, batches
        self._stretched.clear()

    def lengths_ahead(self, most: int, at_first: int, seconds: float) -> list[int]:
        """Tokens in a sample of each of the next `most` batches, all of which the code still gets.

        It ends after `seconds`, or after `at_first` batches of one length.
        """
        iterator = self._source()
        lengths: list[int] = []
        if iterator is None:
            return lengths
        kept = self._ahead.setdefault(iterator, deque())
        started = time.monotonic()
        for count in range(most):
            if time.monotonic() - started > seconds or (count >= at_first and len(set(lengths)) <= 1):
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
        is_first = not kept and iterator._num_yielded == 0
        started = time.monotonic()
        try:
            batch = kept.popleft() if kept else self._next(iterator)
        except StopIteration:
            self._note_end(iterator)
            raise
        self._came_empty = 0
        # Programs read validation data without gradients.
        if torch.is_grad_enabled():
            self.waited_s += time.monotonic() - started
            self._note_place(iterator, is_first)
            if self.is_surveyed:
                self.gives_from_device |= any(not tensor.is_cpu for tensor in tensors_in(batch))
            self._last = weakref.ref(iterator)
        if torch.is_grad_enabled() and tokens_per_row(batch) is not None:
            self._source = weakref.ref(iterator)
            count = self._stretched.get(iterator, 0)
            if count < self._to_stretch:
                self._stretched[iterator] = count + 1
                batch = stretched(batch, self._length)
        return batch

    def _note_place(self, iterator: Any, is_first: bool) -> None:
        # Counts a batch that was read to train on, if a worker has made it.
        if not iterator._num_workers:
            return
        # Workers that stay keep their iterator for the next epoch.
        self._places[iterator] = 1 if is_first else self._places.get(iterator, 0) + 1
        self._read[iterator] = self._read.get(iterator, 0) + 1
        self._begins |= is_first

    def _note_end(self, iterator: Any) -> None:
        # Programs read validation data without gradients.
        if torch.is_grad_enabled() and iterator._num_yielded == 0:
            self._came_empty += 1
            if self._came_empty == _MOST_EMPTY:
                self._ran_empty()


def _torchs_sampler(iterator: Any) -> tuple[BatchSampler | None, int]:
    # Torch's own sampler of an iterator, None if it has another, and the ranks that share its batches.
    sampler: Any = getattr(iterator, "_index_sampler", None)
    ranks = 1
    # Accelerate's shards have the sampler that they divide.
    while type(sampler) is not BatchSampler and hasattr(sampler, "batch_sampler"):
        ranks *= getattr(sampler, "num_processes", 1)
        sampler = sampler.batch_sampler
    return (sampler if type(sampler) is BatchSampler else None), ranks


def samples_of(iterator: Any) -> int | None:
    """Samples that an iterator of a data loader gives this rank; None if they cannot be counted."""
    batches, ranks = _torchs_sampler(iterator)
    try:
        return None if batches is None else math.ceil(len(batches.sampler) / ranks) or None  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a stream has no length, and a sampler of the user's may raise anything
        return None


loader_batches = LoaderBatches()  # the wrapper of this process


# Whether torch's data loader gives the same batches with other workers

# A data set's handles are attributes of it, or of a reader that it wraps.
_DEEPEST, _MOST_ITEMS = 4, 64
# Readers whose connection or cursor two processes cannot share. Their packages may not be installed.
_HANDLES = (("h5py", "File"), ("h5py", "Dataset"), ("lmdb", "Environment"), ("zipfile", "ZipFile"))
# A larger data set takes too long to pickle for an answer.
_LARGEST_PICKLED = 64 * 2**20


def refusal(loader: DataLoader[Any], gives_from_device: bool) -> str:
    """Why another number of workers is not tried with a loader, as a clause; empty if it may be."""
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is iterable, so each worker would give all of it"
    if gives_from_device:
        return "it gives batches that are on the device already, and a worker would need the device"
    held = next(_held(loader.dataset, _DEEPEST, set()), "")
    if held:
        return f"its data set holds {held}, which two processes cannot share"
    context: Any = loader.multiprocessing_context or torch.multiprocessing
    return _unpicklable(loader) if loader.num_workers == 0 and context.get_start_method() != "fork" else ""


def _unpicklable(loader: DataLoader[Any]) -> str:
    # Why a new interpreter cannot get what it needs; empty if it can, or if that is too large to find out.
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
    # A file that forgets all that is written, and raises when it is too much.

    def __init__(self) -> None:
        self._size = 0

    def write(self, data: Any) -> int:
        self._size += len(data)
        if self._size > _LARGEST_PICKLED:
            raise _TooLargeError
        return len(data)


def _held(value: Any, depth: int, seen: set[int]) -> Iterator[str]:
    # Yields, in words, what a value holds that another process cannot use as well.
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
