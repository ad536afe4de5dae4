from collections import UserDict, namedtuple

import torch

from zerotune.trial_lib.rank.loader_batches import stretched

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def test_tokens_are_repeated_up_to_the_length():
    assert stretched(TOKENS, 7).tolist() == [[1, 2, 3, 1, 2, 3, 1], [4, 5, 6, 4, 5, 6, 4]]


def test_whatever_runs_along_the_sequence_becomes_as_long():
    batch = {
        "input_ids": TOKENS,
        "attention_mask": torch.ones(2, 3, dtype=torch.bool),
        "position_ids": torch.arange(3)[None],
        "square_mask": torch.zeros(2, 1, 3, 3),
        "allowed": torch.ones(2, 3, 3, dtype=torch.bool),
        "features": torch.randn(2, 3, 8),
        "labels": (TOKENS, [TOKENS]),
    }
    longer = stretched(batch, 5)
    assert {name: tuple(value.shape) for name, value in longer.items() if name != "labels"} == {
        "input_ids": (2, 5),
        "attention_mask": (2, 5),
        "position_ids": (1, 5),
        "square_mask": (2, 1, 5, 5),
        "allowed": (2, 5, 5),
        "features": (2, 5, 8),
    }
    assert longer["labels"][0].shape == longer["labels"][1][0].shape == (2, 5)
    assert longer["position_ids"].max() == 2


def test_what_does_not_run_along_the_sequence_stays():
    batch = [TOKENS, torch.tensor([0, 1]), torch.tensor(3.0), torch.randn(2, 4), torch.randn(5, 3), "text", 7]
    longer = stretched(batch, 5)
    assert [each is other for each, other in zip(longer, batch, strict=True)] == [False] + 6 * [True]


def test_as_many_features_as_tokens_are_features():
    assert stretched([TOKENS, torch.randn(2, 3, 3)], 5)[1].shape == (2, 5, 3)


def test_a_batch_that_is_as_long_or_has_no_tokens_is_left_alone():
    for batch in ({"x": TOKENS}, [torch.randn(2, 3)], {"x": torch.zeros(2, 0, dtype=torch.long)}, None):
        assert stretched(batch, 3) is batch


def test_the_kind_of_a_batch_is_kept_and_the_batch_of_the_data_set_is_not_changed():
    Pair = namedtuple("Pair", ["tokens", "label"])
    batches = [Pair(TOKENS, 1), (TOKENS, 1), [TOKENS, 1], UserDict(tokens=TOKENS)]
    for batch in batches:
        assert type(stretched(batch, 5)) is type(batch)
    assert batches[3]["tokens"] is TOKENS
