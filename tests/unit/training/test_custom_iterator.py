import itertools
import random

import numpy as np
import pytest
import torch
from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset

from zerotune.trial_lib.training.data import custom_iterator
from zerotune.trial_lib.training.distributed import InvalidTrialError


class Recorded(Dataset):
    def __init__(self, length):
        self.reads = [0] * length

    def __len__(self):
        return len(self.reads)

    def __getitem__(self, index):
        self.reads[index] += 1
        return index


class Unsized:
    """A loader that nobody can ask for its length."""

    def __init__(self, count):
        self.count = count
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        yield from range(self.count)


class Draws(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.tensor([index, *draws()], dtype=torch.float64)


def draws():
    return random.random(), np.random.rand(), torch.rand(1).item()


def taken(loader, count, first=0):
    return [
        batch.tolist() if isinstance(batch, torch.Tensor) else batch
        for batch in itertools.islice(custom_iterator(loader, first), count)
    ]


def deepspeed_loader(length, rank=0, workers=0, batch_size=2):
    return DeepSpeedDataLoader(
        Recorded(length),
        batch_size=batch_size,
        pin_memory=False,
        local_rank=0,
        tput_timer=None,
        num_local_io_workers=workers,
        data_parallel_world_size=2,
        data_parallel_rank=rank,
    )


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_a_loader_is_read_pass_after_pass():
    assert taken(["a", "b", "c"], 7) == list("abcabca")


@pytest.mark.parametrize("loader", [["a", "b", "c"], Unsized(3)], ids=["of known length", "of unknown length"])
@pytest.mark.parametrize("first", range(8))
def test_it_starts_at_any_batch(loader, first):
    assert taken(loader, 5, first) == taken(loader, first + 5)[first:]


def test_whole_passes_are_skipped_unread_where_the_length_is_known():
    dataset = Recorded(6)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2)
    assert taken(loader, 1, first=3 * 1000 + 1) == [[2, 3]]
    assert dataset.reads == [1, 1, 1, 1, 0, 0]


def test_whole_passes_are_read_where_the_length_is_unknown():
    loader = Unsized(3)
    assert taken(loader, 1, first=7) == [1]
    assert loader.passes == 3


def test_an_iterable_dataset_is_read_too():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    assert taken(torch.utils.data.DataLoader(Stream(), batch_size=2), 3, first=1) == [[2, 3], [0, 1], [2, 3]]


@pytest.mark.parametrize("through", ["sampler", "batch_sampler"])
def test_a_distributed_sampler_is_told_the_epoch_before_each_pass(through):
    sampler = DistributedSampler(range(8), num_replicas=2, rank=0, seed=3)
    given = {"sampler": sampler} if through == "sampler" else {"batch_sampler": BatchSampler(sampler, 1, False)}
    loader = torch.utils.data.DataLoader(range(8), **given)

    def order(epoch):
        sampler.set_epoch(epoch)
        return [[index] for index in sampler]

    assert taken(loader, 12) == order(0) + order(1) + order(2)
    assert taken(loader, 4, first=10) == (order(2) + order(3))[2:6]


@pytest.mark.parametrize("workers", [0, 2])
def test_deepspeeds_loader_is_shuffled_anew_in_every_epoch_and_starts_anywhere(workers):
    whole = taken(deepspeed_loader(12), 9)
    epochs = [whole[start : start + 3] for start in (0, 3, 6)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert taken(deepspeed_loader(12, workers=workers), 5, first=4) == whole[4:]


def test_deepspeeds_loaders_share_the_data_out():
    shares = [taken(deepspeed_loader(12, rank), 3) for rank in range(2)]
    assert sorted(index for share in shares for batch in share for index in batch) == list(range(12))


def test_deepspeeds_loader_is_started_once_a_pass():
    loader = deepspeed_loader(12)
    starts = []
    create = loader._create_dataloader
    loader._create_dataloader = lambda: (starts.append(1), create())[1]
    taken(loader, 6)
    assert len(starts) == 2


def test_deepspeeds_repeating_loader_goes_on():
    assert taken(RepeatingLoader(["a", "b"]), 3, first=1) == ["b", "a", "b"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffling_torch_loader_repeats_its_orders_after_a_resume(workers):
    def loader():
        return torch.utils.data.DataLoader(range(8), batch_size=2, shuffle=True, num_workers=workers)

    torch.manual_seed(5)
    whole = taken(loader(), 12)
    states = torch.get_rng_state()
    assert len({str(whole[start : start + 4]) for start in (0, 4, 8)}) == 3
    torch.manual_seed(6)
    assert taken(loader(), 12) != whole
    torch.set_rng_state(states)
    torch.rand(10)
    assert taken(loader(), 6, first=6) == whole[6:]


def test_what_the_datasets_draw_goes_on_after_a_resume_as_if_nothing_had_been_dropped():
    def loader():
        return torch.utils.data.DataLoader(Draws(), batch_size=2, shuffle=True)

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    whole = custom_iterator(loader(), 0)
    for _ in range(4):
        next(whole)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    tail = [next(whole).tolist() for _ in range(6)]
    resumed = custom_iterator(loader(), 4)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    assert [next(resumed).tolist() for _ in range(6)] == tail


def test_starting_a_pass_and_dropping_leave_the_random_states_as_they_were():
    before = random_states()
    taken(torch.utils.data.DataLoader(range(8), batch_size=2, shuffle=True), 9, first=2)
    loader = torch.utils.data.DataLoader(range(8), collate_fn=lambda batch: draws() if batch[0] < 5 else batch)
    assert taken(loader, 3, first=5) == [[5], [6], [7]]
    assert random_states() == before


@pytest.mark.parametrize("first", [0, 5])
def test_a_loader_without_a_batch_is_named(first):
    with pytest.raises(InvalidTrialError, match=r"The training loader \(list\) gave no batch in epoch 0"):
        next(custom_iterator([], first))


def test_a_generator_is_named_when_its_only_pass_is_over():
    iterator = custom_iterator((batch for batch in "ab"), 0)
    assert [next(iterator), next(iterator)] == ["a", "b"]
    with pytest.raises(InvalidTrialError, match=r"generator.*gave no batch in epoch 1.*over again"):
        next(iterator)
