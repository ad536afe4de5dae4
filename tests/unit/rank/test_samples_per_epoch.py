"""The samples that a training's data loader gives a rank."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from zerotune.trial_lib.rank.loader_batches import samples_of


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Shard:
    """Divides batches among processes as Accelerate's `BatchSamplerShard` does."""

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self.batch_sampler, self.num_processes = batch_sampler, 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batch_sampler)


class NoLength(SequentialSampler):
    def __len__(self) -> int:
        raise ValueError("not known yet")


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 16])
def test_it_is_the_rank_s_share_whatever_the_batches_are(size: int, drop_last: bool) -> None:
    numbers = Numbers()
    assert samples_of(iter(DataLoader(numbers, size, drop_last=drop_last))) == 101
    share = DistributedSampler(numbers, num_replicas=2, rank=1)
    assert samples_of(iter(DataLoader(numbers, size, sampler=share, drop_last=drop_last))) == 51
    shard = Shard(BatchSampler(SequentialSampler(numbers), size, drop_last))
    assert samples_of(iter(DataLoader(numbers, batch_sampler=shard))) == 26  # type: ignore[arg-type]


def test_where_it_cannot_be_counted_nothing_is_said() -> None:
    assert samples_of(None) is None
    assert samples_of(iter(DataLoader(Stream(), 2))) is None
    assert samples_of(iter(DataLoader(Numbers(), 2, sampler=NoLength(Numbers())))) is None
    tokens = [[0, 1, 2], [3]]
    assert samples_of(iter(DataLoader(Numbers(), batch_sampler=tokens, collate_fn=torch.tensor))) is None
