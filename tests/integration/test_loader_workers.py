"""Data loaders with workers that the code does not ask for: the same samples, the same random numbers, other speed."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

from zerotune.trial_lib.rank import torch_functions
from zerotune.trial_lib.rank.torch_functions import PERSISTENT, PREFETCH, WORKERS

WORKS = {WORKERS: 2, PREFETCH: 3}


class Placed(Dataset[torch.Tensor]):
    """Samples that show the process that has made them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.tensor([place, os.getpid()])


class Backwards(Sampler[int]):
    """A sampler of the user's own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(11, -1, -1))

    def __len__(self) -> int:
        return 12


class Stream(IterableDataset[torch.Tensor]):
    """A stream of six samples."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([place, os.getpid()]) for place in range(6))


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Returns the settings that the loaders follow."""
    for name in ("__init__", "__iter__"):
        monkeypatch.setattr(DataLoader, name, getattr(DataLoader, name))
    settings: dict[str, Any] = {}
    torch_functions.install_loaders(lambda: settings)
    return settings


def read(loader: DataLoader[Any], epochs: int = 2) -> tuple[list[int], set[int], float]:
    """Returns the places of the samples, the processes that made them, and the training's next random number."""
    torch.manual_seed(7)
    rows = [row for _ in range(epochs) for batch in loader for row in batch.tolist()]
    return [place for place, _ in rows], {process for _, process in rows}, float(torch.rand(()))


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        pytest.param({"sampler": Backwards()}, marks=pytest.mark.long),
        {"sampler": RandomSampler(Placed())},
    ],
)
def test_workers_change_neither_the_order_nor_the_training_s_numbers(
    options: dict[str, Any], wanted: dict[str, Any]
) -> None:
    without = read(DataLoader(Placed(), batch_size=3, **options))
    wanted.update(WORKS)
    places, processes, number = read(DataLoader(Placed(), batch_size=3, **options))
    assert without[1] == {os.getpid()}
    assert os.getpid() not in processes
    assert len(processes) == 4
    assert (places, number) == (without[0], without[2])


def test_a_loader_with_workers_of_its_own_can_do_without(wanted: dict[str, Any]) -> None:
    own = DataLoader(Placed(), batch_size=3, num_workers=1, persistent_workers=True, prefetch_factor=4, timeout=60)
    assert os.getpid() not in read(own)[1]
    wanted[WORKERS] = 0
    assert read(own)[1] == {os.getpid()}
    wanted[WORKERS] = 2
    assert len(read(own, epochs=1)[1]) == 2


def test_workers_that_stay_are_the_same_in_each_epoch(wanted: dict[str, Any]) -> None:
    wanted.update({WORKERS: 1, PERSISTENT: True})
    assert len(read(DataLoader(Placed(), batch_size=3))[1]) == 1


def test_a_stream_stays_with_the_rank(wanted: dict[str, Any]) -> None:
    wanted.update(WORKS)
    places, processes, _ = read(DataLoader(Stream(), batch_size=2), epochs=1)
    assert places == list(range(6))
    assert processes == {os.getpid()}


def test_an_evaluation_keeps_its_own(wanted: dict[str, Any]) -> None:
    wanted.update(WORKS)
    loader = DataLoader(Placed(), batch_size=3)
    with torch.no_grad():
        assert read(loader)[1] == {os.getpid()}


def test_random_numbers_of_the_data_set_differ_from_worker_to_worker(wanted: dict[str, Any]) -> None:
    class Noise(TensorDataset):
        def __getitem__(self, place: int) -> torch.Tensor:
            return torch.tensor([float(torch.rand(())), float(os.getpid())], dtype=torch.float64)

    wanted.update(WORKS)
    noise = [row for batch in DataLoader(Noise(torch.zeros(8)), batch_size=1) for row in batch.tolist()]
    assert len({drawn for drawn, _ in noise}) == 8


def test_a_loader_that_nobody_has_noted_has_no_line() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(4)))
    assert torch_functions.LoaderOrigins().of(loader) == ("", False)


def test_the_line_that_made_a_loader_is_its_user_s(wanted: dict[str, Any]) -> None:
    loader = DataLoader(TensorDataset(torch.zeros(4)))
    line, by_trainer = torch_functions.origins.of(loader)
    assert line.startswith("tests/integration/test_loader_workers.py:")
    assert not by_trainer
    again = DataLoader(loader.dataset)
    assert torch_functions.origins.of(again)[0] == line
