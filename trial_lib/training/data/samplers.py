"""The samples that a replica reads, and their random states: functions of (seed, epoch, place), of nothing else.

Samplers hold only indices, so a training can start anywhere without reading earlier data.
"""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, Sampler

from trial_lib.training.invalid_trial import InvalidTrialError

OWN_LOADER = (
    "call context.disable_dataset_reproducibility_checks() and return a loader of your own, for example a "
    "torch.utils.data.DataLoader"
)
"""The remedy for data that cannot be read reproducibly."""


def derived_seed(*entropy: object) -> int:
    """Returns a seed of 63 bits that follows from the representations of some values."""
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
    """Runs its body with random states from `entropy`, and then restores the process's random states.

    Args:
        entropy: the source of the draws.
        generators: further torch generators to treat so.
    """
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
    """Yields a sampler, then the one in its `sampler`, and so on; nothing for None."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def set_epoch(sampler: Any, epoch: int) -> None:
    """Tells a sampler, and those it wraps, the next epoch, if they have a method for it."""
    for each in with_wrapped_samplers(sampler):
        if callable(getattr(each, "set_epoch", None)):
            each.set_epoch(epoch)


class ShardedSampler(Sampler[Any]):
    """One replica's share of a user's sampler or batch sampler.

    All replicas draw the whole epoch alike, under random states from (seed, epoch), and take turns. All shares have the
    same length. Missing samples are repeated from the epoch's start (`torch.utils.data.DistributedSampler` does the
    sharing).
    """

    def __init__(
        self,
        source: Any,
        of_batches: bool,
        seed: int,
        num_replicas: int,
        rank: int,
        drop_last: bool,
    ) -> None:
        """Reads the length of the source, and nothing else.

        Args:
            source: the user's, with a length.
            of_batches: whether it yields batches of indices.
            seed: of the draws.
            num_replicas: the number of shares.
            rank: this replica.
            drop_last: leaves incomplete rounds out instead of repeating samples.
        """
        self._source = source
        self._of_batches = of_batches
        self._seed = seed
        self._length = len(source)
        self._places = _places(self._length, num_replicas, rank, drop_last)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass."""
        self._epoch = epoch

    def check(self) -> None:
        """Checks that the source yields the same twice for the same epoch.

        Raises:
            InvalidTrialError: it does not, or its length is wrong.
        """
        if self._draw() != self._draw():
            raise InvalidTrialError(
                f"The {_name(self._source)} gave two different orders for one epoch, so neither a resumed training nor "
                "another replica would read the same data. Draw from the global generators of torch, random or "
                f"numpy, or from the epoch that set_epoch(epoch) is told; or {OWN_LOADER}."
            )

    def __iter__(self) -> Iterator[Any]:
        """Yields this replica's share of the epoch that was set."""
        drawn = self._draw()
        return iter([drawn[place] for place in self._places])

    def __len__(self) -> int:
        """Returns the length of a replica's share."""
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
        """Takes the batches of an epoch.

        Args:
            epoch_batches: a batch sampler with a length of at least 1. It, or the sampler that it wraps, has
                `set_epoch`.
            first: the first micro-batch, from 0 at the start of training.
        """
        self._epoch_batches = epoch_batches
        self._first = first

    def __iter__(self) -> Iterator[list[int]]:
        """Yields without an end."""
        first_epoch, skipped = divmod(self._first, len(self._epoch_batches))
        for epoch in itertools.count(first_epoch):
            set_epoch(self._epoch_batches, epoch)
            yield from itertools.islice(self._epoch_batches, skipped, None)
            skipped = 0


class BatchesForWorkers:
    """Batches of indices for worker processes, which seed themselves when they unpack one.

    So a batch is the same whichever worker reads it, and after a resume.
    """

    def __init__(self, batches: Iterable[Any], entropy: tuple[object, ...], first: int) -> None:
        """Takes the batches, the source of their random draws, and the first one's number."""
        self._batches = batches
        self._entropy = entropy
        self._first = first

    def __iter__(self) -> Iterator["_BatchForWorker"]:
        """Yields the batches, packed."""
        for number, indices in enumerate(self._batches, self._first):
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
