import itertools
import os
import random
import time
import warnings

import numpy as np
import psutil
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from zerotune.trial_lib.training.data import DataLoader
from zerotune.trial_lib.training.distributed import InvalidTrialError


class Recorded(Dataset):
    """Numbers from 0; counts how often each is read, in all processes."""

    def __init__(self, length):
        self.reads = torch.zeros(length, dtype=torch.long).share_memory_()

    def __len__(self):
        return len(self.reads)

    def __getitem__(self, index):
        self.reads[index] += 1
        return index


class Augmented(Dataset):
    """Draws from every global generator for each sample."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(1).item()], dtype=torch.float64)


class Pids(Dataset):
    """The process that reads."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.getpid()


def noisy_collate(samples):
    return torch.stack(samples) + torch.rand(1, dtype=torch.float64)


def stream(loader, count, *, first=0, seed=0, num_replicas=1, rank=0):
    iterator = loader.training_iterator(seed, num_replicas, rank, first)
    return [as_list(batch) for batch in itertools.islice(iterator, count)]


def validation(loader, num_replicas=1, rank=0):
    return [as_list(batch) for batch in loader.validation_batches(num_replicas, rank)]


def as_list(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


# -- which samples, in which order -----------------------------------------------------------------------------------


SIZES = {
    "samples": st.integers(1, 40),
    "batch_size": st.integers(1, 12),
    "num_replicas": st.integers(1, 5),
    "shuffle": st.booleans(),
    "drop_last": st.booleans(),
    "source": st.sampled_from(["plain", "sampler", "batch_sampler"]),
}


def build(samples, batch_size, shuffle, drop_last, source):
    """A loader over the numbers, with samplers of torch's or as a user gives them."""
    if source == "plain":
        return DataLoader(Recorded(samples), batch_size, shuffle, drop_last=drop_last)
    order = RandomSampler(range(samples)) if shuffle else list(reversed(range(samples)))
    if source == "sampler":
        return DataLoader(Recorded(samples), batch_size, sampler=order, drop_last=drop_last)
    return DataLoader(Recorded(samples), batch_sampler=BatchSampler(order, batch_size, drop_last=False))


def is_empty(num_replicas, samples, batch_size, drop_last, source, **_):
    return drop_last and source != "batch_sampler" and samples // num_replicas < batch_size


@given(**SIZES, first=st.integers(0, 50), data=st.data())
def test_the_stream_from_anywhere_is_the_stream_from_the_start_without_its_head(first, data, num_replicas, **arguments):
    rank = data.draw(st.integers(0, num_replicas - 1))
    if is_empty(num_replicas, **arguments):
        with pytest.raises(InvalidTrialError, match="an epoch would be empty"):
            build(**arguments).training_iterator(0, num_replicas, rank, first)
        return
    whole = stream(build(**arguments), first + 6, num_replicas=num_replicas, rank=rank)
    assert stream(build(**arguments), 6, first=first, num_replicas=num_replicas, rank=rank) == whole[first:]


@given(**SIZES, seed=st.integers(-(2**31), 2**31))
def test_in_every_epoch_the_replicas_read_all_samples_in_equally_many_batches(num_replicas, seed, **arguments):
    assume(not is_empty(num_replicas, **arguments))
    samples, batch_size, drop_last = arguments["samples"], arguments["batch_size"], arguments["drop_last"]
    count = build(**arguments).micro_batches_per_epoch(num_replicas)
    replicas = [
        stream(build(**arguments), 2 * count, seed=seed, num_replicas=num_replicas, rank=rank)
        for rank in range(num_replicas)
    ]
    for epoch in (0, 1):
        batches = [replica[epoch * count : (epoch + 1) * count] for replica in replicas]
        read = sorted(sample for replica in batches for batch in replica for sample in batch)
        if arguments["source"] == "batch_sampler":
            assert set(read) == set(range(samples))
        elif drop_last:
            assert len(set(read)) == len(read) == count * batch_size * num_replicas
            assert all(len(batch) == batch_size for replica in batches for batch in replica)
        else:
            assert set(read) == set(range(samples))
            assert len(read) - samples < num_replicas
            assert len({tuple(len(batch) for batch in replica) for replica in batches}) == 1


def test_every_epoch_is_shuffled_anew_from_the_seed():
    loader = DataLoader(Recorded(20), batch_size=20, shuffle=True)
    first, second = stream(loader, 2)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))
    assert stream(loader, 2) == [first, second]
    assert stream(loader, 1, seed=17) != [first]


def test_without_shuffle_replicas_take_turns():
    loader = DataLoader(Recorded(8), batch_size=2)
    assert stream(loader, 3, num_replicas=2, rank=0) == [[0, 2], [4, 6], [0, 2]]
    assert stream(loader, 3, num_replicas=2, rank=1) == [[1, 3], [5, 7], [1, 3]]


def test_a_batch_that_is_larger_than_the_data_holds_all_of_it():
    assert stream(DataLoader(Recorded(3), batch_size=8), 2) == [[0, 1, 2], [0, 1, 2]]


def test_fewer_samples_than_replicas_are_repeated():
    loader = DataLoader(Recorded(1), batch_size=2)
    assert [stream(loader, 2, num_replicas=3, rank=rank) for rank in range(3)] == [[[0], [0]]] * 3


def test_a_loader_is_as_long_as_an_epoch_of_a_single_replica():
    loader = DataLoader(Recorded(10), batch_size=3)
    assert len(loader) == 4
    assert loader.micro_batches_per_epoch(2) == 2
    assert len(DataLoader(Recorded(10), batch_size=3, drop_last=True)) == 3


def test_a_users_sampler_draws_anew_in_every_epoch_and_the_same_after_a_resume():
    def loader():
        return DataLoader(Recorded(9), batch_size=3, sampler=RandomSampler(range(9)))

    whole = stream(loader(), 9)
    assert len({str(whole[start : start + 3]) for start in (0, 3, 6)}) == 3
    torch.rand(100)
    assert stream(loader(), 5, first=4) == whole[4:]


def test_a_sampler_whose_order_cannot_be_repeated_is_refused_before_anything_is_read():
    class Unrepeatable:
        calls = itertools.count()

        def __iter__(self):
            return iter([next(self.calls), 0])

        def __len__(self):
            return 2

    loader = DataLoader(Recorded(10), sampler=Unrepeatable())
    with pytest.raises(InvalidTrialError, match="two different orders"):
        loader.training_iterator(0, 1, 0, 0)
    with pytest.raises(InvalidTrialError, match="two different orders"):
        loader.validation_batches(1, 0)


def test_validations_are_all_alike():
    loader = DataLoader(Augmented(), batch_size=5, shuffle=True)
    first = validation(loader)
    assert [len(batch) for batch in first] == [5, 5, 2]
    assert [sample[0] for batch in first for sample in batch] != list(range(12))
    torch.rand(3)
    assert validation(loader) == first
    assert validation(DataLoader(Augmented(), batch_size=5, shuffle=True)) == first


def test_every_replica_validates_the_same_number_of_batches():
    loader = DataLoader(Recorded(7), batch_size=2)
    passes = [validation(loader, 2, rank) for rank in range(2)]
    assert passes == [[[0, 2], [4, 6]], [[1, 3], [5, 0]]]


# -- what is read, and when ------------------------------------------------------------------------------------------


def test_nothing_is_read_until_the_loop_takes_a_batch():
    dataset = Recorded(8)
    loader = DataLoader(dataset, batch_size=2, shuffle=True)
    len(loader)
    loader.training_iterator(0, 1, 0, 0)
    loader.validation_batches(1, 0)
    assert dataset.reads.sum() == 0


@given(**{**SIZES, "drop_last": st.just(False)}, first=st.integers(0, 50))
def test_no_sample_of_a_skipped_batch_is_read(first, num_replicas, **arguments):
    loader = build(**arguments)
    read = [sample for batch in stream(loader, 2, first=first, num_replicas=num_replicas) for sample in batch]
    assert loader.dataset.reads.tolist() == [read.count(sample) for sample in range(arguments["samples"])]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_read_what_is_skipped(workers):
    dataset = Recorded(100)
    loader = DataLoader(dataset, batch_size=2, num_workers=workers, prefetch_factor=2)
    assert stream(loader, 2, first=30) == [[60, 61], [62, 63]]
    assert dataset.reads[:60].sum() == 0


@pytest.mark.parametrize("shuffle", [False, True])
def test_workers_deliver_what_no_workers_do_over_the_ends_of_epochs(shuffle):
    arguments = {"batch_size": 3, "shuffle": shuffle}
    alone = stream(DataLoader(Recorded(10), **arguments), 14, first=2)
    assert stream(DataLoader(Recorded(10), **arguments, num_workers=2), 14, first=2) == alone


def test_workers_read_ahead_into_the_next_epoch():
    dataset = Recorded(4)
    iterator = DataLoader(dataset, batch_size=2, num_workers=2, prefetch_factor=3).training_iterator(0, 1, 0, 0)
    deadline = time.monotonic() + 60
    while dataset.reads.sum() < 12 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert dataset.reads.tolist() == [3, 3, 3, 3]
    del iterator


@pytest.mark.parametrize("persistent", [False, True])
def test_training_workers_live_on_over_epochs(persistent):
    loader = DataLoader(Pids(), batch_size=2, num_workers=2, persistent_workers=persistent)
    pids = {pid for batch in stream(loader, 12) for pid in batch}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_workers_end_with_their_iterator():
    iterator = DataLoader(Pids(), num_workers=2).training_iterator(0, 1, 0, 0)
    pids = {int(next(iterator)) for _ in range(4)}
    assert all(psutil.pid_exists(pid) for pid in pids)
    del iterator
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("persistent", [False, True])
def test_persistent_workers_stay_from_one_validation_to_the_next(persistent):
    loader = DataLoader(Pids(), num_workers=2, persistent_workers=persistent)
    first, second = ({pid for batch in validation(loader) for pid in batch} for _ in range(2))
    assert (first == second) is persistent


def test_a_validation_that_was_left_early_starts_again():
    loader = DataLoader(Recorded(8), batch_size=2, num_workers=2, persistent_workers=True)
    next(iter(loader.validation_batches(1, 0)))
    assert validation(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.long
def test_spawned_workers_deliver_the_same():
    arguments = {"batch_size": 3, "shuffle": True, "collate_fn": noisy_collate}
    spawned = DataLoader(Augmented(), **arguments, num_workers=1, multiprocessing_context="spawn")
    assert stream(spawned, 6) == stream(DataLoader(Augmented(), **arguments), 6)


def test_worker_init_functions_find_the_dataset_itself():
    def initialise(worker):
        torch.utils.data.get_worker_info().dataset.reads[worker] += 10

    dataset = Recorded(2)
    stream(DataLoader(dataset, num_workers=2, worker_init_fn=initialise), 4)
    assert dataset.reads.min() >= 10


def test_datasets_that_read_whole_batches_get_plain_indices():
    class Bulk(Recorded):
        def __getitems__(self, indices):
            assert type(indices) is list
            return [100 + index for index in indices]

    for workers in (0, 2):
        assert stream(DataLoader(Bulk(4), batch_size=2, num_workers=workers), 2) == [[100, 101], [102, 103]]


def test_memory_is_pinned_where_there_is_a_device_and_elsewhere_not_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoader(TensorDataset(torch.arange(2)), batch_size=2, pin_memory=True)
        ((batch,),) = loader.validation_batches(1, 0)
    assert batch.tolist() == [0, 1]
    assert batch.is_pinned() == torch.cuda.is_available()


# -- random states ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", ["plain", "sampler", "batch_sampler"])
def test_reading_leaves_the_random_states_of_the_process_as_they_were(workers, source):
    given = {
        "plain": {"batch_size": 3, "shuffle": True},
        "sampler": {"batch_size": 3, "sampler": RandomSampler(range(12))},
        "batch_sampler": {"batch_sampler": BatchSampler(RandomSampler(range(12)), 3, False)},
    }
    loader = DataLoader(Augmented(), **given[source], num_workers=workers, collate_fn=noisy_collate)
    before = random_states()
    stream(loader, 9, first=2)
    validation(loader)
    assert random_states() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_random_augmentation_is_the_same_after_a_resume_and_with_any_number_of_workers(workers):
    arguments = {"batch_size": 5, "shuffle": True, "collate_fn": noisy_collate}
    whole = stream(DataLoader(Augmented(), **arguments), 8)
    torch.rand(7)
    assert stream(DataLoader(Augmented(), **arguments, num_workers=workers), 5, first=3) == whole[3:]


def test_random_augmentation_differs_between_seeds_replicas_and_epochs():
    loader = DataLoader(Augmented(), batch_size=12)
    noise = [
        [sample[1:] for sample in batch]
        for batch in [*stream(loader, 2), *stream(loader, 1, seed=1), *stream(loader, 1, num_replicas=2, rank=1)]
    ]
    for one, other in itertools.combinations(noise, 2):
        assert one[0] != other[0]


def test_what_workers_draw_at_their_start_follows_from_the_seed_and_is_alike_in_all_validations():
    def shift(worker):
        torch.utils.data.get_worker_info().dataset.reads[:] = torch.randint(2**40, ())

    class Shifted(Recorded):
        def __getitem__(self, index):
            return int(self.reads[index])

    loader = DataLoader(Shifted(2), batch_size=2, num_workers=1, worker_init_fn=shift)
    assert validation(loader) == validation(loader)
    assert stream(loader, 1) == stream(loader, 1) != stream(loader, 1, seed=1)


def test_ranks_that_share_a_replica_draw_the_same():
    # The first and the last stage of a pipeline: one needs the inputs of a masked batch, one its labels.
    loaders = [DataLoader(Augmented(), batch_size=4, shuffle=True) for _ in range(2)]
    first = stream(loaders[0], 5, num_replicas=2, rank=1)
    random.seed(99)
    torch.rand(5)
    assert stream(loaders[1], 5, num_replicas=2, rank=1) == first


# -- what is refused -------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class NoLength(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": Stream()}, "iterable dataset Stream.*disable_dataset_reproducibility_checks"),
        ({"dataset": NoLength()}, "dataset NoLength, which has no length.*__len__"),
        ({"dataset": []}, "empty dataset .list of length 0."),
        ({"sampler": []}, "empty sampler"),
        ({"sampler": (index for index in [1])}, "sampler generator, which has no length"),
        ({"batch_size": None}, "batch_size=None.*train_micro_batch_size_per_gpu"),
        ({"batch_size": None, "sampler": [1, 2]}, "batch_size=None"),
        ({"generator": torch.Generator()}, "generator.*Leave it out"),
        ({"sampler": DistributedSampler(range(4), 2, 0)}, "DistributedSampler, and shards by itself.*shuffle=True"),
        ({"batch_sampler": BatchSampler(DistributedSampler(range(4), 2, 0), 1, False)}, "shards by itself"),
        ({"sampler": [1, 2], "shuffle": True}, "torch refuses: sampler option is mutually exclusive with shuffle"),
        ({"batch_sampler": [[1]], "batch_size": 2}, "torch refuses: batch_sampler option is mutually exclusive"),
        ({"batch_sampler": [[1]], "drop_last": True}, "torch refuses: batch_sampler option is mutually exclusive"),
        ({"batch_size": 0}, "torch refuses: batch_size should be a positive integer"),
        ({"num_workers": -1}, "torch refuses: num_workers"),
        ({"prefetch_factor": 2}, "torch refuses: prefetch_factor"),
        ({"persistent_workers": True}, "torch refuses: persistent_workers"),
        ({"multiprocessing_context": "spawn"}, "torch refuses: multiprocessing_context"),
        ({"timeout": 5}, "timeout=5 without workers"),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_the_remedy(arguments, message):
    with pytest.raises(InvalidTrialError, match=message):
        DataLoader(**{"dataset": range(4), **arguments})


def test_a_distributed_sampler_of_one_replica_does_no_harm():
    assert len(stream(DataLoader(range(4), sampler=DistributedSampler(range(4), 1, 0)), 4)) == 4


def test_data_for_less_than_one_batch_on_each_replica_is_refused_with_the_numbers():
    loader = DataLoader(range(7), batch_size=4, drop_last=True)
    assert loader.micro_batches_per_epoch(1) == 1
    for ask in (
        lambda: loader.micro_batches_per_epoch(2),
        lambda: loader.training_iterator(0, 2, 0, 0),
        lambda: loader.validation_batches(2, 0),
    ):
        with pytest.raises(InvalidTrialError, match=r"7 samples for 2 replicas.*no batch of 4.*drop_last=False"):
            ask()
