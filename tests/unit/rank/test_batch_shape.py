from collections import UserDict

import pytest
import torch

from zerotune.trial_lib.rank.loader_batches import batch_sizes, elements_in, tensors_in, tokens_in, tokens_per_row

TOKENS = torch.zeros(8, 64, dtype=torch.long)


@pytest.mark.parametrize(
    "inputs",
    [
        [(TOKENS,), {}],
        [(), {"input_ids": TOKENS, "labels": TOKENS}],
        [({"input_ids": TOKENS},), {}],
        [(UserDict(input_ids=TOKENS),), {}],
        [([torch.tensor(0.5), TOKENS],), {}],
        [("train", 3, TOKENS), {"flag": True}],
        [(torch.zeros(8, 3, 32, 32),), {}],
        [(torch.zeros(8),), {}],
    ],
)
def test_the_batch_is_first_of_all_the_first_dimension_of_the_first_tensor_that_has_one(inputs):
    assert batch_sizes(inputs)[0] == 8


def test_the_second_dimension_may_be_the_batchs_too():
    assert batch_sizes([torch.zeros(64, 8, dtype=torch.long)]) == (64, 8)
    assert batch_sizes([torch.zeros(64, 8, 512)]) == (64, 8)


def test_the_second_dimension_of_a_matrix_of_features_is_not():
    assert batch_sizes([torch.zeros(8, 16)]) == (8,)
    assert batch_sizes([torch.zeros(8)]) == (8,)


def test_inputs_without_a_batch_have_no_size():
    assert batch_sizes([(), {"text": ["a", "b"]}]) == ()
    assert batch_sizes([torch.tensor(1.0)]) == ()


def test_tokens_are_those_of_the_first_matrix_of_integers():
    inputs = [torch.zeros(8, 3), TOKENS, torch.zeros(8, 9, dtype=torch.long)]
    assert (tokens_per_row(inputs), tokens_in(inputs)) == (64, 8 * 64)
    inputs = [torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)]
    assert (tokens_per_row(inputs), tokens_in(inputs)) == (None, None)


def test_all_numbers_of_the_inputs_are_counted():
    assert elements_in([(torch.zeros(8, 3), 5), {"mask": torch.zeros(8)}]) == 32


def test_tensors_are_found_in_order_at_any_depth():
    first, second, third = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [len(tensor) for tensor in tensors_in({"a": [first, (second,)], "b": {"c": third}, "d": None})] == [1, 2, 3]
