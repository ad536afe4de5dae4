"""One global batch under several layouts."""

from zerotune.trial_lib.search.sizes import BatchPolicy


def test_another_layout_keeps_the_global_batch() -> None:
    own = BatchPolicy(train_batch_size=24, gradient_accumulation_steps=1, data_parallel_size=8)
    assert own.sizes() == (1, 3)
    fewer = own.on(2)
    assert fewer.sizes() == (1, 2, 3, 4, 6, 12)
    assert {size * fewer.accumulation(size) * 2 for size in fewer.sizes()} == {24}


def test_a_layout_whose_replicas_do_not_divide_the_batch_has_no_size() -> None:
    own = BatchPolicy(train_batch_size=6, gradient_accumulation_steps=1, data_parallel_size=2)
    assert own.on(4).sizes() == ()


def test_a_free_batch_keeps_the_accumulation() -> None:
    own = BatchPolicy(train_batch_size=None, gradient_accumulation_steps=3, data_parallel_size=4)
    assert own.on(2).accumulation(8) == 3


def test_fewer_replicas_accumulate_more_batches_of_a_program_that_sets_their_size() -> None:
    own = BatchPolicy(train_batch_size=16, gradient_accumulation_steps=1, data_parallel_size=4, only_micro_batch=4)
    assert own.sizes() == own.on(2).sizes() == (4,)
    assert (own.accumulation(4), own.on(2).accumulation(4)) == (1, 2)
    assert own.on(8).sizes() == ()


def test_another_global_batch_is_accumulated_of_the_one_size_that_a_program_takes() -> None:
    own = BatchPolicy(train_batch_size=32, gradient_accumulation_steps=2, data_parallel_size=2, only_micro_batch=4)
    assert (own.sizes(), own.accumulation(4)) == ((4,), 4)
    assert BatchPolicy(20, 2, 2, only_micro_batch=4).sizes() == ()
