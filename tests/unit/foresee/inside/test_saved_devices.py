"""Where a foreseen run puts the tensors of a file: as `torch.load` documents `map_location`."""

from typing import Any

import pytest
import torch

from trial_lib.foresee.inside.libraries.saved_devices import lands_on_device, with_tensors


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
    shared, module = torch.zeros(2), torch.nn.Linear(2, 2)
    value = {"state": [shared, (shared, 3)], "model": module, "name": "text"}
    changed = with_tensors(value, lambda tensor: tensor + 1)
    assert changed["state"][0] is changed["state"][1][0]
    assert changed["state"][0].tolist() == [1, 1]
    assert (changed["state"][1][1], changed["name"], changed["model"]) == (3, "text", module)
    assert shared.tolist() == [0, 0]
