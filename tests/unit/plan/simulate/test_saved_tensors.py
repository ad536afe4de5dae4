"""Where a foreseen run puts the tensors of a file: as `torch.load` documents `map_location`."""

import weakref
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch

from zerotune.trial_lib.plan.simulate.checkpoint_headers import lands_on_device, with_tensors


@pytest.mark.parametrize(
    ("saved_on", "map_location", "lands"),
    [
        ("cpu", None, False),
        ("cuda:3", None, True),
        ("cpu", "cuda", True),
        ("cpu", torch.device("cuda", 1), True),
        ("cuda:0", "cpu", False),
        ("cuda:0", {"cuda:0": "cpu"}, False),
        ("cuda:0", {"cuda:1": "cpu"}, True),
        ("cpu", {"cpu": "cuda:0"}, True),
        ("cuda:0", lambda storage, location: storage, False),
    ],
)
def test_a_tensor_lands_where_map_location_says(saved_on: str, map_location: Any, lands: bool) -> None:
    assert lands_on_device(saved_on, map_location) == lands


def test_tensors_are_replaced_wherever_they_lie_and_one_that_occurs_twice_stays_one() -> None:
    shared = torch.zeros(2)
    value = {"state": [shared, (shared, 3)], "name": "text"}
    changed = with_tensors(value, lambda tensor: tensor + 1)
    assert changed["state"][0] is changed["state"][1][0]
    assert changed["state"][0].tolist() == [1, 1]
    assert (changed["state"][1][1], changed["name"]) == (3, "text")
    assert shared.tolist() == [0, 0]


def test_a_mapping_keeps_its_class_and_what_else_it_has() -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    value = {"model": state, "counts": Counter(steps=3), "lists": defaultdict(list, rows=[torch.zeros(1)])}
    changed = with_tensors(value, lambda tensor: tensor + 1)
    assert changed["model"]._metadata == state._metadata  # type: ignore[attr-defined]
    assert (changed["counts"], changed["lists"]["none"]) == (Counter(steps=3), [])
    assert changed["lists"]["rows"][0].tolist() == [1]


def test_no_tensor_lives_on_in_what_has_replaced_it() -> None:
    gone = weakref.ref(with_tensors([torch.zeros(2)], lambda tensor: tensor + 1)[0])
    assert gone() is None
