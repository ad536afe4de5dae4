from collections import UserDict

import pytest
import torch

from trial_lib.measure.batch_shape import arrived_rows, batch_dimension, tensors_in, tokens_per_row

TOKENS = torch.zeros(8, 64, dtype=torch.long)


def rows(inputs, asked):
    return arrived_rows(inputs, batch_dimension(inputs, asked))


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
@pytest.mark.parametrize("asked", [1, 8])
def test_the_batch_is_the_first_dimension_of_the_first_tensor_that_has_one(inputs, asked):
    assert rows(inputs, asked) == 8


def test_sequences_first_are_known_by_their_second_dimension():
    assert rows([torch.zeros(64, 8, dtype=torch.long)], asked=8) == 8
    assert rows([torch.zeros(64, 8, 512)], asked=8) == 8
    assert rows([torch.zeros(64, 1, dtype=torch.long)], asked=1) == 1


def test_as_many_features_as_samples_were_asked_for_do_not_make_sequences():
    assert rows([torch.zeros(8, 16)], asked=16) == 8
    assert rows([torch.zeros(8, 1)], asked=1) == 8


def test_inputs_without_a_batch_have_no_size():
    assert rows([(), {"text": ["a", "b"]}], asked=2) is None
    assert rows([torch.tensor(1.0)], asked=1) is None


def test_tokens_are_the_length_of_the_first_matrix_of_integers():
    assert tokens_per_row([torch.zeros(8, 3), TOKENS, torch.zeros(8, 9, dtype=torch.long)]) == 64
    assert tokens_per_row([torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)]) is None


def test_tensors_are_found_in_order_at_any_depth():
    first, second, third = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [len(tensor) for tensor in tensors_in({"a": [first, (second,)], "b": {"c": third}, "d": None})] == [1, 2, 3]
