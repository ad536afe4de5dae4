"""Moving data to a device, whatever holds it. The device `meta` is told apart from the CPU on every machine."""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from zerotune.trial_lib.training.distributed import move_to

META = torch.device("meta")


class Pair(NamedTuple):
    first: Any
    second: Any


def test_tensors_move_in_containers_of_any_depth() -> None:
    moved = move_to(META, {"a": [torch.zeros(2), (torch.zeros(1), "text")], "b": Pair(torch.zeros(3), {"c": None})})
    assert moved["a"][0].device == META
    assert moved["a"][1][0].device == META
    assert moved["b"].first.device == META


def test_containers_keep_their_kind_and_what_is_no_tensor_stays() -> None:
    moved = move_to(META, OrderedDict(a=(1, "x"), b=Pair(torch.zeros(1), 2.0)))
    assert type(moved) is OrderedDict
    assert moved["a"] == (1, "x")
    assert type(moved["b"]) is Pair
    assert moved["b"].second == 2.0


def test_what_knows_how_to_move_is_asked() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(2)])
    assert move_to(META, packed).data.device == META
