"""Data loaders whose number of workers stays as it is, and the reason."""

import io
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from zerotune.trial_lib.rank.loader_batches import refusal


class Numbers(Dataset[int]):
    """Eight numbers, and something that a real data set would read them from."""

    def __init__(self, reader: Any = None) -> None:
        self.reader = {"parts": [reader]}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> int:
        return place


class Stream(IterableDataset[int]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_a_plain_data_set_may_have_workers() -> None:
    assert refusal(DataLoader(Numbers()), gives_from_device=False) == ""


def test_a_stream_would_come_once_from_each_worker() -> None:
    assert "iterable" in refusal(DataLoader(Stream()), gives_from_device=False)


def test_batches_on_a_device_need_that_in_the_worker() -> None:
    assert "device" in refusal(DataLoader(Numbers()), gives_from_device=True)


def test_an_open_file_has_one_offset_for_all_processes() -> None:
    with tempfile.TemporaryFile() as file:
        assert "an open" in refusal(DataLoader(Numbers(file)), gives_from_device=False)
    assert refusal(DataLoader(Numbers(file)), gives_from_device=False) == ""  # it is closed
    assert refusal(DataLoader(Numbers(io.BytesIO(b"in memory"))), gives_from_device=False) == ""


def test_a_connection_belongs_to_one_process() -> None:
    connection = sqlite3.connect(":memory:")
    assert "an open Connection" in refusal(DataLoader(Numbers(connection)), gives_from_device=False)
    connection.close()


def test_a_tensor_of_a_device_is_found_within_the_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice(torch.Tensor):
        device = torch.device("cuda")

    data = torch.zeros(1).as_subclass(OnDevice)
    assert "a tensor on cuda" in refusal(DataLoader(Numbers(data)), gives_from_device=False)


def test_a_data_set_that_refers_to_itself_is_looked_at_once() -> None:
    data = Numbers()
    data.reader["parts"].append(data)
    assert refusal(DataLoader(data), gives_from_device=False) == ""


def test_new_interpreters_need_a_data_set_that_can_be_pickled() -> None:
    cannot = Numbers(threading.Lock())
    assert refusal(DataLoader(cannot), gives_from_device=False) == ""  # a fork needs no pickle
    spawns = DataLoader(cannot, num_workers=1, multiprocessing_context="spawn")
    spawns.num_workers = 0
    assert "cannot be pickled (TypeError" in refusal(spawns, gives_from_device=False)
