"""A confirming trial trains on other samples than the first ones, whatever gives them, and loads none of those."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler
from torch.utils.data._utils.fetch import _IterableDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from zerotune.trial_lib.rank import loader_batches as module
from zerotune.trial_lib.rank.data_offset import DataOffset
from zerotune.trial_lib.rank.loader_batches import LoaderBatches
from zerotune.trial_lib.training.data import DataLoader as TrialDataLoader


class Numbers(Dataset[int]):
    def __init__(self, count: int = 20) -> None:
        self.count = count
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


class Pairs:
    """A batch sampler of the program's own, which fills one list again and again."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[list[int]]:
        pair: list[int] = []
        for first in range(0, 20, 2):
            pair[:] = first, first + 1
            yield pair


class ByRank:
    """A batch sampler as Megatron has it: one rank of two, and its length is that of all samples."""

    def __init__(self, size: int, total: int = 64) -> None:
        self.size, self.total = size, total

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, self.total, 2 * self.size):
            yield list(range(first, first + self.size))


class Endless:
    """A batch sampler of the program's own that neither ends nor has a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        for first in itertools.count(0, self.size):
            yield [place % 20 for place in range(first, first + self.size)]


class Forever:
    """Repeats a batch sampler, as some keep their workers alive."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from self.sampler


@pytest.fixture
def offset(monkeypatch: pytest.MonkeyPatch) -> DataOffset:
    """Moves by a quarter of an epoch, and by six samples of a stream."""
    for name in ("__next__", "__init__"):
        monkeypatch.setattr(_BaseDataLoaderIter, name, getattr(_BaseDataLoaderIter, name))
    monkeypatch.setattr(_IterableDatasetFetcher, "__init__", _IterableDatasetFetcher.__init__)
    found = DataOffset()
    monkeypatch.setattr(module, "data_offset", found)
    LoaderBatches().install()
    found.share, found.of_stream = 0.25, 6
    return found


class ShardOfBatches:
    """A batch sampler of a framework's own: the batches of the first of two ranks. The last one may be short."""

    def __init__(self, size: int, total: int) -> None:
        self.size, self.total = size, total

    def __len__(self) -> int:
        return -(-self.total // (2 * self.size))

    def __iter__(self) -> Iterator[list[int]]:
        for first in range(0, self.total, 2 * self.size):
            yield list(range(first, min(first + self.size, self.total)))


def samples(loader: Any) -> list[int]:
    return [int(sample) for batch in loader for sample in batch]


@pytest.mark.parametrize("size", [2, 4])
def test_all_micro_batches_begin_at_the_same_sample_and_an_epoch_has_all_of_them(offset: DataOffset, size: int) -> None:
    numbers = Numbers()
    loader = DataLoader(numbers, size, sampler=DistributedSampler(numbers, 2, 1, shuffle=False))
    # A quarter of this rank's ten.
    assert samples(loader) == samples(loader) == [5, 7, 9, 11, 13, 15, 17, 19, 1, 3]
    assert offset.move(loader) == (2, 10)


def test_no_sample_is_loaded_that_is_passed_over(offset: DataOffset) -> None:
    numbers = Numbers()
    next(iter(DataLoader(numbers, 4)))
    assert numbers.loaded == [5, 6, 7, 8]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_begin_there_too(offset: DataOffset, workers: int) -> None:
    loader = DataLoader(Numbers(), 4, num_workers=workers)
    assert samples(loader)[:6] == [5, 6, 7, 8, 9, 10]


def test_a_shuffled_order_is_turned_and_stays_the_program_s(offset: DataOffset) -> None:
    def order(share: float) -> list[int]:
        offset.share = share
        torch.manual_seed(3)
        return samples(DataLoader(Numbers(), 5, shuffle=True))

    first, moved = order(0.0), order(0.25)
    assert moved == [*first[5:], *first[:5]]


def test_the_batches_of_the_program_s_own_sampler_are_turned(offset: DataOffset) -> None:
    loader = DataLoader(Numbers(), batch_sampler=Pairs())  # type: ignore[arg-type]
    assert samples(loader) == [*range(4, 20), 0, 1, 2, 3]
    assert offset.move(loader) == (2, 10)


@pytest.mark.parametrize("share", [0.01, 0.26, 0.5, 0.9])
def test_a_batch_sampler_whose_length_counts_samples_begins_at_a_share_of_its_batches(
    offset: DataOffset, share: float
) -> None:
    offset.share = share
    for size in (1, 2, 4):
        found = samples(DataLoader(Numbers(64), batch_sampler=ByRank(size)))  # type: ignore[arg-type]
        assert abs(found[0] - share * 64) <= 8
        assert sorted(found) == [place for batch in ByRank(size) for place in batch]


def test_a_batch_sampler_without_an_end_begins_at_the_same_sample_for_all_micro_batches(offset: DataOffset) -> None:
    offset.of_stream = 8
    for size in (1, 2, 4):
        loader = DataLoader(Numbers(), batch_sampler=Endless(size))  # type: ignore[arg-type]
        assert samples(itertools.islice(loader, 1))[0] == 8


def test_a_sampler_that_repeats_torch_s_is_turned_within_each_epoch(offset: DataOffset) -> None:
    loader = DataLoader(Numbers(), batch_sampler=Forever(BatchSampler(SequentialSampler(range(20)), 4, False)))  # type: ignore[arg-type]
    taken = itertools.islice(loader, 10)
    assert samples(taken) == 2 * [*range(5, 20), *range(5)]


def test_the_shards_of_accelerate_divide_the_turned_order(offset: DataOffset) -> None:
    shard = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    ranks = []
    for rank in range(2):
        whole = BatchSampler(SequentialSampler(range(20)), 2, drop_last=False)
        ranks.append(samples(DataLoader(Numbers(), batch_sampler=shard(whole, 2, rank)))[:4])
    assert ranks == [[5, 6, 9, 10], [7, 8, 11, 12]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trial_class_s_loader_begins_there(offset: DataOffset, workers: int) -> None:
    loader = TrialDataLoader(Numbers(), 5, num_workers=workers)
    taken = itertools.islice(loader.training_iterator(0, 1, 0, 0), 8)
    assert samples(taken) == 2 * [*range(5, 20), *range(5)]


@pytest.mark.parametrize(("workers", "expected"), [(0, [6, 7, 8, 9]), (2, [3, 4, 3, 4])])
def test_a_stream_is_read_up_to_there_by_each_worker_its_part(
    offset: DataOffset, workers: int, expected: list[int]
) -> None:
    loader = DataLoader(Stream(), 2, num_workers=workers, multiprocessing_context="fork" if workers else None)
    assert samples(itertools.islice(loader, 2)) == expected
    assert offset.move(loader) == (6, None)


def test_a_stream_may_be_a_dataclass_which_has_no_hash(offset: DataOffset) -> None:
    loader = DataLoader(dataclass(type("Plain", (Stream,), {}))(), 2)
    assert samples(itertools.islice(loader, 1)) == [6, 7]


def test_a_stream_of_batches_stays_because_other_micro_batches_would_begin_elsewhere(offset: DataOffset) -> None:
    loader = DataLoader(Stream(), None)
    assert [int(each) for each in itertools.islice(loader, 2)] == [0, 1]
    assert offset.move(loader) == (None, None)


def test_a_stream_that_is_shorter_begins_anew(offset: DataOffset) -> None:
    offset.of_stream = 26
    assert samples(itertools.islice(DataLoader(Stream(), 2), 1)) == [6, 7]


def test_validation_data_stay_where_they_are(offset: DataOffset) -> None:
    with torch.no_grad():
        loader = DataLoader(Numbers(), 20)
        assert samples(loader) == list(range(20))
        assert offset.move(loader) == (None, None)


def test_a_trial_without_an_offset_is_left_alone(offset: DataOffset) -> None:
    offset.share = 0.0
    loader = DataLoader(Numbers(), 20)
    assert samples(loader) == list(range(20))
    assert type(loader.batch_sampler.sampler) is SequentialSampler  # type: ignore[union-attr]


@pytest.mark.parametrize("total", [64, 70, 78])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
def test_a_larger_micro_batch_begins_with_the_step_of_a_smaller_one(
    offset: DataOffset, share: float, total: int
) -> None:
    offset.share, offset.step = share, 8
    firsts = {
        next(iter(DataLoader(Numbers(total), batch_sampler=ShardOfBatches(size, total))))[0].item()
        for size in (1, 2, 4, 8)
    }
    assert len(firsts) == 1
    assert firsts != {0}
