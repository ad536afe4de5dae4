"""What every kind of device promises to the rank that trains on it. A GPU's part is left out where there is none."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from zerotune.trial_lib.rank.device import CpuDevice, CudaDevice, Device, UnknownDeviceError, device_of

BLOCK = 256 * 2**20
KINDS = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="this host has no GPU for PyTorch")
    ),
]
TAKES_TOO_MUCH = """
import sys, torch
from torch.utils import cpp_extension
from zerotune.trial_lib.rank.device import device_of

device = torch.device(sys.argv[1])
torch.ones(8, device=device)
answers = device_of(device)
builds = set()
for _ in range(3):
    left = answers.limit(answers.used_bytes() + (1 << 30))
    assert 0 < left < 2 << 30, left
    builds.add(cpp_extension._run_ninja_build)
assert len(builds) == 1, "builds are spared more than once"
try:
    torch.empty(1 << 31, dtype=torch.uint8, device=device)
except (MemoryError, RuntimeError) as error:
    print(error)
else:
    raise SystemExit("it was given more than its budget")
answers.unlimit()
torch.empty(1 << 31, dtype=torch.uint8, device=device)
"""


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def device(place: torch.device) -> Device:
    torch.ones(8, device=place)
    return device_of(place)


def block(place: torch.device) -> torch.Tensor:
    return torch.ones(BLOCK, dtype=torch.uint8, device=place)


def test_it_says_what_it_is(device: Device, place: torch.device) -> None:
    assert device.kind == place.type
    assert device.is_apart == (place.type != "cpu")


def test_memory_in_use_and_its_peak_are_seen(device: Device, place: torch.device) -> None:
    device.start_over()
    before = device.used_bytes()
    tensor = block(place)
    assert BLOCK <= device.used_bytes() - before < BLOCK * 1.1
    del tensor
    # A CPU looks at its two figures one after the other.
    assert device.peak_bytes() - before >= BLOCK * 0.99
    device.start_over()
    assert device.peak_bytes() - before < BLOCK / 2
    assert device.used_bytes() <= device.peak_bytes()


def test_a_budget_is_kept_however_often_it_is_set_and_lifted(place: torch.device) -> None:
    run = subprocess.run([sys.executable, "-c", TAKES_TOO_MUCH, place.type], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "memory" in run.stdout


def test_the_time_of_work_is_seen_once_it_is_done(device: Device, place: torch.device) -> None:
    matrix = torch.rand(512, 512, device=place)
    device.finish()
    began, start = time.perf_counter(), device.instant()
    for _ in range(20):
        matrix = matrix @ matrix / 512
    end = device.instant()
    device.finish()
    assert not device.is_busy()
    assert 0 < device.seconds_between(start, end) <= (time.perf_counter() - began) * 1.05
    assert not device.is_recording()


def test_a_kernel_that_counts_peaks_from_the_start_of_a_process_ends_no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: Any) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "write_text", refuse)
    CpuDevice().start_over()


class Card:
    """What `torch.cuda` says of a card of 80 GiB, of which 60 are free and this process has reserved 10."""

    GIB = 2**30

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fraction = 1.0
        figures = {"memory_allocated": 4, "max_memory_allocated": 9, "memory_reserved": 10, "max_memory_reserved": 12}
        for name, gib in figures.items():
            monkeypatch.setattr(torch.cuda, name, lambda index, gib=gib: gib * self.GIB)
        card = type("Properties", (), {"total_memory": 80 * self.GIB})
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (60 * self.GIB, 80 * self.GIB))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self._set)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: self.fraction, raising=False)

    def _set(self, fraction: float, index: int) -> None:
        self.fraction = fraction


def test_what_the_allocator_holds_and_nobody_uses_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    assert CudaDevice(0).available_bytes() == (60 + 10 - 4) * card.GIB
    assert CudaDevice(0).total_bytes() == 80 * card.GIB


def test_a_budget_bounds_what_a_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    cuda = CudaDevice(0)
    assert cuda.limit(40 * card.GIB) == 36 * card.GIB
    assert card.fraction == 0.5
    assert (cuda.total_bytes(), cuda.available_bytes()) == (40 * card.GIB, 36 * card.GIB)
    cuda.unlimit()
    assert (card.fraction, cuda.total_bytes()) == (1.0, 80 * card.GIB)


def test_a_bound_that_the_program_sets_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    card.fraction = 0.25
    assert (CudaDevice(0).total_bytes(), CudaDevice(0).available_bytes()) == (20 * card.GIB, 16 * card.GIB)


def test_the_gpu_that_is_asked_is_the_one_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Stream:
        def query(self) -> bool:
            return False

    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: asked.append(index) or Stream())
    assert device_of(torch.device("cuda", 1)).is_busy()
    assert asked == [1]


@pytest.mark.parametrize("kind", ["xpu", "hpu", "mps"])
def test_a_device_that_nobody_can_measure_is_never_taken_for_a_cpu(kind: str) -> None:
    with pytest.raises(UnknownDeviceError, match=rf"trains on `{kind}`.*DS_ACCELERATOR=cpu"):
        device_of(torch.device(kind))
