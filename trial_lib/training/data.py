"""The reproducible `DataLoader`, and how other loaders are read.

The training data of a replica is a function of (seed, data-parallel rank, number of the micro-batch): the samples,
their order, and the random draws of their dataset and `collate_fn`, with and without workers.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, Sampler

from zerotune.trial_lib.training.distributed import InvalidTrialError

# The samples that a replica reads, and their random states: functions of (seed, epoch, place), of nothing else.

OWN_LOADER = (
    "call context.disable_dataset_reproducibility_checks() and return a loader of your own, for example a "
    "torch.utils.data.DataLoader"
)
"""The remedy for data that cannot be read reproducibly."""


def derived_seed(*entropy: object) -> int:
    """A seed of 63 bits that follows from the representations of some values."""
    return int.from_bytes(blake2b(repr(entropy).encode(), digest_size=8).digest(), "big") >> 1


def seed_random_states(seed: int) -> None:
    """Seeds the generators of this process that data are drawn from: Python's, numpy's and torch's on the CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, because it also seeds the devices, which data workers must not touch.
    torch.default_generator.manual_seed(seed)


_numpy: Any = np.random
_SPARE = np.random.MT19937(0)


@contextmanager
def forked_random_states(*entropy: object, generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Runs its body with random states from `entropy`, in further torch generators too, and restores the process's."""
    python_state, numpys_own = random.getstate(), _numpy.get_bit_generator()
    # Swapped instead of read and written back. numpy takes a tenth of a millisecond for that, and each batch does
    # it.
    _numpy.set_bit_generator(np.random.MT19937(0) if numpys_own is _SPARE else _SPARE)
    torch_states = [(generator, generator.get_state()) for generator in (torch.default_generator, *generators)]
    try:
        seed = derived_seed(*entropy)
        seed_random_states(seed)
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        random.setstate(python_state)
        _numpy.set_bit_generator(numpys_own)
        for generator, state in torch_states:
            generator.set_state(state)


def with_wrapped_samplers(sampler: Any) -> Iterator[Any]:
    """Yields a sampler, then the one in its `sampler`, and so on."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def set_epoch(sampler: Any, epoch: int) -> None:
    """Tells the next epoch to a sampler and those it wraps, if they have a method for it."""
    for each in with_wrapped_samplers(sampler):
        if callable(getattr(each, "set_epoch", None)):
            each.set_epoch(epoch)


class ShardedSampler(Sampler[Any]):
    """One replica's share of a user's sampler or batch sampler.

    All replicas draw the whole epoch alike, under random states from (seed, epoch), and take turns. All shares have the
    same length. Missing samples are repeated from the epoch's start (`torch.utils.data.DistributedSampler` does the
    sharing).
    """

    def __init__(self, source: Any, of_batches: bool, seed: int, num_replicas: int, rank: int, drop_last: bool) -> None:
        # `of_batches` says that the source yields batches. `drop_last` leaves incomplete rounds out instead of
        # repeating samples.
        self._source = source
        self._of_batches = of_batches
        self._seed = seed
        self._length = len(source)
        self._places = _places(self._length, num_replicas, rank, drop_last)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def check(self) -> None:
        """Refuses a source that yields two orders for the same epoch."""
        if self._draw() != self._draw():
            raise InvalidTrialError(
                f"The {_name(self._source)} gave two different orders for one epoch, so neither a resumed training nor "
                "another replica would read the same data. Draw from the global generators of torch, random or "
                f"numpy, or from the epoch that set_epoch(epoch) is told; or {OWN_LOADER}."
            )

    def __iter__(self) -> Iterator[Any]:
        drawn = self._draw()
        return iter([drawn[place] for place in self._places])

    def __len__(self) -> int:
        return len(self._places)

    def _draw(self) -> list[Any]:
        own = [getattr(sampler, "generator", None) for sampler in with_wrapped_samplers(self._source)]
        generators = [generator for generator in own if isinstance(generator, torch.Generator)]
        with forked_random_states("sampler", self._seed, self._epoch, generators=generators):
            set_epoch(self._source, self._epoch)
            # One more than promised shows a source that is too long, or endless. Each batch is copied,
            # because some batch samplers fill one list repeatedly.
            promised = itertools.islice(self._source, self._length + 1)
            drawn = [list(batch) for batch in promised] if self._of_batches else list(promised)
        if len(drawn) != self._length:
            count = f"more than {self._length}" if len(drawn) > self._length else str(len(drawn))
            raise InvalidTrialError(
                f"The {_name(self._source)} has a length of {self._length} and gave {count} in epoch {self._epoch}. "
                f"Make its __len__() exact and the same in every epoch, or {OWN_LOADER}."
            )
        return drawn


class EndlessBatches:
    """The batches of indices that a replica reads in training, epoch after epoch, from any micro-batch on."""

    def __init__(self, epoch_batches: Any, first: int) -> None:
        # A batch sampler of at least one batch. It, or the sampler that it wraps, has `set_epoch`.
        self.epoch_batches = epoch_batches
        self._first = first

    def __iter__(self) -> Iterator[list[int]]:
        first_epoch, skipped = divmod(self._first, len(self.epoch_batches))
        for epoch in itertools.count(first_epoch):
            set_epoch(self.epoch_batches, epoch)
            yield from itertools.islice(self.epoch_batches, skipped, None)
            skipped = 0


class BatchesForWorkers:
    """Batches of indices for worker processes, which seed themselves when they unpack one.

    So a batch is the same whichever worker reads it, and after a resume.
    """

    def __init__(self, batches: Iterable[Any], entropy: tuple[object, ...], first: int) -> None:
        self.epoch_batches = batches
        self._entropy = entropy
        self._first = first

    def __iter__(self) -> Iterator["_BatchForWorker"]:
        for number, indices in enumerate(self.epoch_batches, self._first):
            yield _BatchForWorker(indices, derived_seed(*self._entropy, number))


class _BatchForWorker:
    """It is pickled here, and unpickled in the worker as the plain indices, right before they are read."""

    def __init__(self, indices: Any, seed: int) -> None:
        self._indices = indices
        self._seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _seed_and_unpack, (self._indices, self._seed)


def _seed_and_unpack(indices: Any, seed: int) -> Any:
    seed_random_states(seed)
    return indices


def _places(length: int, num_replicas: int, rank: int, drop_last: bool) -> "DistributedSampler[int]":
    things: Any = range(length)
    return DistributedSampler(things, num_replicas, rank, shuffle=False, drop_last=drop_last)


def _name(sampler: Any) -> str:
    return f"sampler {type(sampler).__name__}"


TorchData: TypeAlias = torch.Tensor | Sequence["TorchData"] | Mapping[str, "TorchData"]
"""A batch: a tensor, or nested sequences and mappings of tensors."""


class DataLoader:
    """`torch.utils.data.DataLoader`, read reproducibly and sharded over the data-parallel replicas by the loop.

    It takes the arguments of torch's, with the same meaning and defaults, and reads nothing before the loop asks:

    * `batch_size` is that of one replica. Every replica gets the same number of batches. If the samples do not divide,
      some are repeated from the epoch's start, or left out with `drop_last`, as in
      `torch.utils.data.DistributedSampler`. A `sampler` is shared out by indices, a `batch_sampler` by batches.
    * Every training epoch is shuffled again, from the experiment's seed and the epoch. Validations are all alike. A
      `sampler` that draws from the global generators of torch, random or numpy, or from its `generator`, is seeded in
      the same way. One with `set_epoch` is told the epoch.
    * A batch is read under random states of its own. So random augmentation is the same after a resume, and with any
      number of workers. The process's random states stay unchanged.
    * Training workers live on over epochs, and read ahead into the next one. They keep the dataset as it was when
      they started. `persistent_workers` keeps those of a validation for the next one.
    * `pin_memory` is ignored without an accelerator.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool = False,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
    ) -> None:
        """Takes the arguments of `torch.utils.data.DataLoader`, except `generator`.

        Raises:
            InvalidTrialError: torch would refuse the arguments, or the data cannot be read reproducibly.
        """
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.sampler = sampler
        self.batch_sampler = batch_sampler
        self.drop_last = drop_last
        self.num_workers = num_workers
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
        }
        if generator is not None:
            raise InvalidTrialError(
                "DataLoader was given a generator, whose state a resumed training could not restore. Leave it out: the "
                "order follows from the experiment's seed."
            )
        self._check_data()
        try:
            torch.utils.data.DataLoader(
                dataset, batch_size, shuffle, sampler, batch_sampler, drop_last=drop_last, **self._options
            )
        except (TypeError, ValueError) as error:
            raise InvalidTrialError(f"DataLoader was given arguments that torch refuses: {error}") from error
        if timeout and not num_workers:
            raise InvalidTrialError(
                f"DataLoader was given timeout={timeout} without workers to wait for. Set num_workers, or leave it out."
            )
        # torch.accelerator came with torch 2.6.
        accelerator: Any = getattr(torch, "accelerator", torch.cuda)
        self._options["pin_memory"] = pin_memory and accelerator.is_available()
        self._validation: tuple[tuple[int, int], _SeededLoader] | None = None

    def training_iterator(self, seed: int, num_replicas: int, rank: int, first_micro_batch: int) -> Iterator[Any]:
        """The endless training data of a data-parallel rank, from a micro-batch (from 0 at the start of training) on.

        Skipped data are neither read nor collated. Workers start at once.
        """
        batches = EndlessBatches(self._epoch_batches(seed, num_replicas, rank, checked=True), first_micro_batch)
        return iter(_SeededLoader(self, batches, ("training", seed, rank), first_micro_batch))

    def validation_batches(self, num_replicas: int, rank: int) -> Iterable[Any]:
        """The validation data of a data-parallel rank. Each pass over it is the same."""
        if self._validation is None or self._validation[0] != (num_replicas, rank):
            batches = self._epoch_batches(0, num_replicas, rank, checked=True)
            self._validation = (num_replicas, rank), _SeededLoader(self, batches, ("validation", rank), 0)
        return self._validation[1]

    def micro_batches_per_epoch(self, num_replicas: int) -> int:
        """The batches in an epoch of each replica, the same on all; at least 1."""
        return len(self._epoch_batches(0, num_replicas, rank=0))

    def has_short_batch(self, num_replicas: int) -> bool:
        """Whether the last batch of an epoch is smaller than the others; never for a batch sampler."""
        if self.batch_sampler is not None or self.drop_last:
            return False
        assert self.batch_size is not None
        samples = len(self.dataset if self.sampler is None else self.sampler)
        return -(-samples // num_replicas) % self.batch_size != 0

    def __len__(self) -> int:
        """The batches in an epoch of a single replica."""
        return self.micro_batches_per_epoch(1)

    def _check_data(self) -> None:
        if isinstance(self.dataset, IterableDataset):
            raise InvalidTrialError(
                f"DataLoader was given the iterable dataset {type(self.dataset).__name__}, which can be neither "
                f"sharded nor started in the middle. Use a dataset with indices, or {OWN_LOADER}."
            )
        own = self.batch_sampler if self.batch_sampler is not None else self.sampler
        if self.batch_sampler is None and self.batch_size is None:
            raise InvalidTrialError(
                "DataLoader was given batch_size=None, and the loop counts batches. Give the size of a batch, for "
                f"example context.train_micro_batch_size_per_gpu, or a batch_sampler; or {OWN_LOADER}."
            )
        sized, name = (self.dataset, "dataset") if own is None else (own, "sampler")
        try:
            length = len(sized)
        except (TypeError, NotImplementedError):
            raise InvalidTrialError(
                f"DataLoader was given the {name} {type(sized).__name__}, which has no length. Give it a __len__(), or "
                f"{OWN_LOADER}."
            ) from None
        if length == 0:
            raise InvalidTrialError(
                f"DataLoader was given an empty {name} ({type(sized).__name__} of length 0). Look for where its "
                "samples should come from."
            )
        if any(isinstance(each, DistributedSampler) and each.num_replicas > 1 for each in with_wrapped_samplers(own)):
            raise InvalidTrialError(
                "DataLoader was given a DistributedSampler, and shards by itself: each replica would read a part of "
                "its part. Leave the sampler out; shuffle=True does what it did."
            )

    def _epoch_batches(self, seed: int, num_replicas: int, rank: int, checked: bool = False) -> Any:
        # The batch sampler of one epoch of a replica. It, or the sampler that it wraps, has `set_epoch`.
        place: dict[str, Any] = {"num_replicas": num_replicas, "rank": rank, "seed": seed, "drop_last": self.drop_last}
        own = self.batch_sampler if self.batch_sampler is not None else self.sampler
        samples: Any
        if own is None:
            samples = DistributedSampler(self.dataset, shuffle=self.shuffle, **place)
        else:
            samples = ShardedSampler(own, of_batches=self.batch_sampler is not None, **place)
            if checked:
                samples.check()
        if self.batch_sampler is not None:
            return samples
        assert self.batch_size is not None
        batches = BatchSampler(samples, self.batch_size, self.drop_last)
        if len(batches) == 0:
            raise InvalidTrialError(
                f"The data loader has {len(self.dataset if own is None else own)} samples for {num_replicas} replicas: "
                f"with drop_last=True that is no batch of {self.batch_size} for each, and an epoch would be empty. Use "
                "more data, a smaller batch or drop_last=False."
            )
        return batches


class _SeededLoader:
    """torch's loader over given batches. Each is read under random states that follow from its number."""

    def __init__(self, loader: DataLoader, batches: Iterable[Any], entropy: tuple[object, ...], first: int) -> None:
        self._entropy = entropy
        self._first = first
        # torch draws a seed for the workers at each pass. Without this generator it would be the process's.
        self._generator = torch.Generator()
        self._in_workers = loader.num_workers > 0
        packed: Any = BatchesForWorkers(batches, entropy, first) if self._in_workers else batches
        options = {**loader._options, "generator": self._generator}
        self._loader = torch.utils.data.DataLoader(loader.dataset, batch_sampler=packed, **options)

    def __iter__(self) -> Iterator[Any]:
        self._generator.manual_seed(derived_seed("workers", *self._entropy))
        batches = iter(self._loader)
        return batches if self._in_workers else _BatchesInProcess(batches, self._entropy, self._first)


class _BatchesInProcess:
    """Reads batches in this process, under the random states that workers would have."""

    def __init__(self, batches: Iterator[Any], entropy: tuple[object, ...], first: int) -> None:
        self._batches = batches
        self._entropy = entropy
        self._numbers = itertools.count(first)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with forked_random_states(*self._entropy, next(self._numbers)):
            return next(self._batches)


def custom_iterator(loader: Any, first_micro_batch: int) -> Iterator[Any]:
    """The endless data of a loader that is no `DataLoader`, pass after pass, from a micro-batch on.

    A sampler with `set_epoch` is told the epoch before each pass. To start in the middle of a pass, that pass is read
    from its beginning and the first part is dropped. Earlier passes are left out if the loader has a length, and read
    if not.

    A pass starts under random states that follow from this process's seed (`torch.initial_seed()`) and the epoch. So
    the shuffling of a torch loader repeats after a resume. Starting the pass and dropping from it leave the process's
    random states unchanged.
    """
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        length = 0
    epoch, dropped = divmod(first_micro_batch, length) if length else (0, first_micro_batch)
    return _passes(loader, epoch, dropped)


def _passes(loader: Any, first_epoch: int, to_drop: int) -> Iterator[Any]:
    for epoch in itertools.count(first_epoch):
        with forked_random_states("pass", torch.initial_seed(), epoch):
            for name in ("batch_sampler", "sampler", "data_sampler"):
                set_epoch(getattr(loader, name, None), epoch)
            # Only next is called, because iter() of the iterator starts DeepSpeed's loader again.
            batches = map(next, itertools.repeat(iter(loader)))
            # torch's samplers draw the order of a pass at its first batch, and not again.
            head = list(itertools.islice(batches, 0 if to_drop else 1))
            dropped = sum(1 for _ in itertools.islice(batches, to_drop))
        to_drop -= dropped
        if not head and not dropped:
            raise InvalidTrialError(
                f"The training loader ({type(loader).__name__}) gave no batch in epoch {epoch}. Return a loader that "
                "has data, and that can be iterated over again: a generator ends after one pass."
            )
        yield from head
        yield from batches


# The states of all random number generators of a rank. A resumed training draws as an uninterrupted one.


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    """The states of Python's `random`, numpy's global generator, and torch's on the CPU and this rank's device.

    A rank draws on one device, the current one. `cuda` is None if none is in use.
    """
    version, internal, next_gauss = random.getstate()
    return {
        "python": [version, list(internal), next_gauss],
        "numpy": _plain(np.random.get_state(legacy=False)),
        "torch": torch.get_rng_state(),
        # Asking an unused device for its state would create a context on it.
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def restore(states: dict[str, Any]) -> None:
    """The next draws are those that followed `capture`."""
    version, internal, next_gauss = states["python"]
    random.setstate((version, tuple(internal), next_gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return value
