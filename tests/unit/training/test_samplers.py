import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from zerotune.trial_lib.training.data import (
    BatchesForWorkers,
    EndlessBatches,
    ShardedSampler,
    derived_seed,
    forked_random_states,
    set_epoch,
)
from zerotune.trial_lib.training.distributed import InvalidTrialError


def draws():
    return random.random(), np.random.rand(), torch.rand(1).item()


def random_states():
    return random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().tolist()


class Shuffled:
    """A user's sampler that shuffles with Python's global generator."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        yield from random.sample(range(self.length), self.length)

    def __len__(self):
        return self.length


class ShuffledByEpoch(Shuffled):
    """A user's sampler with `set_epoch`, and a generator of its own that follows from it."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from random.Random(self.epoch).sample(range(self.length), self.length)


def share(source, *, epoch=0, of_batches=False, seed=1, num_replicas=1, rank=0, drop_last=False):
    sampler = ShardedSampler(source, of_batches, seed, num_replicas, rank, drop_last)
    sampler.set_epoch(epoch)
    shared = list(sampler)
    assert len(shared) == len(sampler)
    return shared


# -- random states -----------------------------------------------------------------------------------------------


def test_forked_draws_follow_from_their_entropy_alone():
    with forked_random_states("a", 1):
        first = draws()
    draws()
    with forked_random_states("a", 1):
        again = draws()
    with forked_random_states("a", 2):
        other = draws()
    assert first == again
    assert all(one != two for one, two in zip(first, other, strict=True))


def test_a_fork_leaves_the_random_states_as_they_were_even_after_an_error():
    generator = torch.Generator()
    before, own = random_states(), generator.get_state().tolist()
    with pytest.raises(KeyError), forked_random_states("a", generators=[generator]):  # noqa: PT012
        draws()
        torch.rand(1, generator=generator)
        raise KeyError
    assert random_states() == before
    assert generator.get_state().tolist() == own


def test_forks_can_be_nested():
    with forked_random_states("outer"):
        plain = draws(), draws()
    with forked_random_states("outer"):
        first = draws()
        with forked_random_states("inner"):
            draws()
        assert (first, draws()) == plain


def test_derived_seeds_fit_every_generator_and_differ():
    seeds = {derived_seed(*entropy) for entropy in itertools.product(("a", "b"), range(-5, 5), range(10))}
    assert len(seeds) == 200
    assert all(0 <= seed < 2**63 for seed in seeds)


# -- a user's sampler, shared out ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        Shuffled(10),
        ShuffledByEpoch(10),
        RandomSampler(range(10)),
        SubsetRandomSampler(range(10)),
        RandomSampler(range(10), generator=torch.Generator()),
    ],
    ids=["python", "set_epoch", "torch", "subset", "own generator"],
)
def test_replicas_draw_one_order_whatever_their_random_states_are_and_another_in_the_next_epoch(source):
    torch.manual_seed(1)
    random.seed(1)
    first = share(source, num_replicas=2, rank=0)
    next_epoch = share(source, num_replicas=2, rank=0, epoch=1)
    torch.manual_seed(2)
    random.seed(2)
    second = share(source, num_replicas=2, rank=1)
    assert sorted(first + second) == list(range(10))
    assert first == share(source, num_replicas=2, rank=0)
    assert first != next_epoch


def test_the_order_follows_from_the_seed():
    assert share(Shuffled(50), seed=1) == share(Shuffled(50), seed=1) != share(Shuffled(50), seed=2)


def test_a_weighted_sampler_draws_alike_on_all_replicas():
    def drawn(rank, num_replicas):
        source = WeightedRandomSampler([0.1, 0.2, 0.7], num_samples=40)
        return share(source, num_replicas=num_replicas, rank=rank)

    whole = drawn(0, 1)
    assert drawn(0, 2) == whole[0::2]
    assert drawn(1, 2) == whole[1::2]


def test_drawing_touches_neither_the_random_states_nor_the_samplers_own_generator():
    generator = torch.Generator()
    before, own = random_states(), generator.get_state().tolist()
    share(Shuffled(10))
    share(RandomSampler(range(10), generator=generator))
    share(BatchSampler(RandomSampler(range(10), generator=generator), 2, False), of_batches=True)
    assert random_states() == before
    assert generator.get_state().tolist() == own


def test_what_is_missing_is_repeated_from_the_epochs_start():
    shares = [share([7, 8, 9, 10], num_replicas=3, rank=rank) for rank in range(3)]
    assert shares == [[7, 10], [8, 7], [9, 8]]


def test_with_drop_last_what_is_too_little_for_all_is_left_out():
    shares = [share([7, 8, 9, 10], num_replicas=3, rank=rank, drop_last=True) for rank in range(3)]
    assert shares == [[7], [8], [9]]


def test_batches_are_shared_out_whole():
    source = BatchSampler(range(7), batch_size=2, drop_last=False)
    assert share(source, of_batches=True, num_replicas=2, rank=0) == [[0, 1], [4, 5]]
    assert share(source, of_batches=True, num_replicas=2, rank=1) == [[2, 3], [6]]


def test_a_batch_sampler_may_fill_one_list_again_and_again():
    class Reusing:
        def __iter__(self):
            batch = []
            for start in (0, 2, 4):
                batch[:] = [start, start + 1]
                yield batch

        def __len__(self):
            return 3

    assert share(Reusing(), of_batches=True) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(("given", "said"), [(3, "gave 3 in epoch 5"), (9, "gave more than 4 in epoch 5")])
def test_a_sampler_that_is_not_as_long_as_it_says_is_named(given, said):
    class Lying(Shuffled):
        def __iter__(self):
            yield from range(given)

    with pytest.raises(InvalidTrialError, match=f"sampler Lying has a length of 4 and {said}.*__len__") as raised:
        share(Lying(4), epoch=5)
    assert "disable_dataset_reproducibility_checks" in str(raised.value)


def test_a_sampler_without_an_end_is_named():
    class Endless(Shuffled):
        def __iter__(self):
            return itertools.count()

    with pytest.raises(InvalidTrialError, match="gave more than 4"):
        share(Endless(4))


def test_a_sampler_with_random_states_that_nobody_can_restore_is_named():
    class Unrepeatable(Shuffled):
        own = random.Random(0)

        def __iter__(self):
            yield from self.own.sample(range(self.length), self.length)

    with pytest.raises(InvalidTrialError, match="sampler Unrepeatable gave two different orders for one epoch"):
        ShardedSampler(Unrepeatable(20), False, 0, 1, 0, False).check()
    ShardedSampler(ShuffledByEpoch(20), False, 0, 1, 0, False).check()


def test_the_epoch_is_told_to_wrapped_samplers_too():
    source = ShuffledByEpoch(4)
    set_epoch(BatchSampler(source, 2, False), 7)
    assert source.epoch == 7


# -- an endless training -------------------------------------------------------------------------------------------


@given(
    samples=st.integers(1, 30),
    batch_size=st.integers(1, 8),
    num_replicas=st.integers(1, 4),
    first=st.integers(0, 60),
    data=st.data(),
)
def test_endless_batches_start_anywhere(samples, batch_size, num_replicas, first, data):
    rank = data.draw(st.integers(0, num_replicas - 1))

    def batches(start, count):
        sharded = ShardedSampler(Shuffled(samples), False, 0, num_replicas, rank, False)
        endless = EndlessBatches(BatchSampler(sharded, batch_size, False), start)
        return list(itertools.islice(endless, count))

    assert batches(first, 9) == batches(0, first + 9)[first:]


def test_unpacking_a_batch_seeds_the_worker_and_gives_the_plain_indices():
    with forked_random_states("worker"):
        packed = list(BatchesForWorkers([[1, 2], [3]], ("seed", 5), first=10))
        assert pickle.loads(pickle.dumps(packed[0])) == [1, 2]
        first = draws()
        assert pickle.loads(pickle.dumps(packed[1])) == [3]
        second = draws()
        resumed = list(BatchesForWorkers([[3]], ("seed", 5), first=11))
        assert pickle.loads(pickle.dumps(resumed[0])) == [3]
        assert first != second == draws()
