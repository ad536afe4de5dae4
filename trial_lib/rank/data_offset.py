"""Where the program's data begin: a confirming trial trains on other samples than the first ones.

A data loader's order is turned: it begins at a later place and ends before it, so an epoch has the samples that it had.
Nothing that is passed over is loaded. A stream has no places, so its first samples are read and dropped.
"""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher
from torch.utils.weak import WeakIdKeyDictionary

from zerotune.trial_lib.rank.patching import put


class Turned:
    """A sampler whose order begins at a place, and goes round to it. All else is the sampler's own."""

    def __init__(self, sampler: Any, offset: "DataOffset", places: int | None, samples: int = 0) -> None:
        self.sampler = sampler
        self.share, self.step = offset.share, offset.step
        self.first = offset.of_stream if places is None else int(offset.share * places)  # in samples without places
        self.places = places
        self.samples = samples  # of the data set; 0 if it has no length

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if type(self.sampler) is SequentialSampler:
            # Millions of numbers that nobody has made yet.
            places = range(len(self.sampler))
            yield from places[self.first :]
            yield from places[: self.first]
            return
        # Some batch samplers fill one list again and again.
        order = (copy.copy(each) for each in self.sampler)
        passed_over = list(itertools.islice(order, 1))
        size = len(passed_over[0]) if passed_over and isinstance(passed_over[0], list | tuple) else 0
        first = self._first_of(size, self.places)
        if self.places is not None and 0 < self.samples < 2 * size * self.places:
            # The length of a batch sampler may be that of its samples, as in Megatron, or of many epochs.
            passed_over += itertools.islice(order, self.samples // size - 1)
            first = self._first_of(size, len(passed_over))
        else:
            passed_over += itertools.islice(order, max(0, first - 1))
            if self.places is not None and len(passed_over) < first:
                first = self._first_of(size, len(passed_over))
        yield from passed_over[first:]
        yield from order
        yield from passed_over[:first]

    def _first_of(self, size: int, places: int | None) -> int:
        # The place of the first batch of so many samples, or of the first sample if `size` is 0.
        if places is None:
            return self.first // max(1, size)
        if not size or not self.step:
            return int(self.share * places)
        # Whole steps, because larger batches have fewer places. A data set's last batch may not be full.
        total = places * size
        total = min(total, self.samples // max(1, round(self.samples / total))) if self.samples else total
        return int(self.share * (total // self.step)) * self.step // size


class DataOffset:
    """Where the loaders of this process begin that are read to train on.

    Every rank and every configuration of a round begins at the same sample: the offset is a share of a sampler's order,
    or a number of a stream's samples, and no number of batches.
    """

    def __init__(self) -> None:
        self.share = 0.0  # of an epoch, for data with a length
        self.of_stream = 0  # samples of a rank, for data without
        self.step = 0  # samples of a rank in an optimizer step, for batch samplers. 0 if unknown.
        # By identity: a data set that is a dataclass has no hash.
        self._streams: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def install(self) -> None:
        """Makes streams begin later, in this process and in the loaders' workers that it forks."""
        original = _IterableDatasetFetcher.__init__

        def init(fetcher: Any, dataset: Any, *args: Any, **kwargs: Any) -> None:
            original(fetcher, dataset, *args, **kwargs)
            worker = get_worker_info()
            left = self._streams.get(dataset, 0) // (1 if worker is None else worker.num_workers)
            while left:
                passed = sum(1 for _ in itertools.islice(fetcher.dataset_iter, left))
                if passed < left:
                    # It was shorter than that.
                    fetcher.dataset_iter = iter(dataset)
                left = left - passed if passed else 0

        put(_IterableDatasetFetcher, "__init__", init)

    def move(self, loader: DataLoader[Any]) -> tuple[int | None, int | None]:
        """Moves a loader that is about to be read. Returns `data_offset` and `data_places` as `Measured` has them.

        Programs read validation data without gradients.
        """
        if not self.share or not torch.is_grad_enabled():
            return None, None
        if isinstance(loader.dataset, IterableDataset):
            context: Any = loader.multiprocessing_context or torch.multiprocessing
            # Without a batch size the stream gives batches, of which nobody knows how many samples they have.
            if loader.batch_size is None or (loader.num_workers and context.get_start_method() != "fork"):
                return None, None
            self._streams[loader.dataset] = self.of_stream
            return self.of_stream, None
        owner, name = _drawn_from(loader)
        sampler = getattr(owner, name)
        if not isinstance(sampler, Turned):
            # torch's loader forbids to set it once it is made.
            turned = Turned(sampler, self, _length(sampler), _length(loader.dataset) or 0)
            sampler = vars(owner)[name] = turned
        return sampler.first, sampler.places


def _length(of: Any) -> int | None:
    # None if it never ends.
    try:
        return len(of)
    except Exception:  # noqa: BLE001 - a class of the user's own may raise anything
        return None


def _drawn_from(loader: DataLoader[Any]) -> tuple[Any, str]:
    # Who has the order of a loader's samples, and in which attribute. In torch's own batch sampler that is a sampler of
    # samples. A batch sampler of the program's may sort what it draws, so its batches are turned.
    owner: Any = loader
    name = "batch_sampler" if loader._auto_collation else "sampler"
    while type(owner) is not BatchSampler and not isinstance(sampler := getattr(owner, name), Turned):
        # Accelerate has the sampler that it divides, `zerotune.DataLoader` has that of an epoch, and some samplers
        # repeat torch's own for ever.
        is_torchs = BatchSampler in (type(sampler), type(getattr(sampler, "sampler", None)))
        inner = "sampler" if is_torchs else "batch_sampler"
        inner = "epoch_batches" if hasattr(sampler, "epoch_batches") else inner
        if not hasattr(sampler, inner):
            break
        owner, name = sampler, inner
    return owner, name


data_offset = DataOffset()  # that of this process
