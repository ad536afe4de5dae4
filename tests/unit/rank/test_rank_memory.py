"""What a rank notes of its memory, on a device whose figures the test makes up."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerotune.trial_lib.rank.device import CpuDevice
from zerotune.trial_lib.rank.memory import RankMemory, in_force


class Gpu:
    """A device of 100 bytes, of which 8 are nobody's of PyTorch."""

    def __init__(self) -> None:
        self.used = self.peak = self.reserved = self.most_reserved = self.retries = 0
        self.limit = 100

    def take(self, used: int, for_a_moment: int = 0) -> None:
        self.used = used
        self.peak = max(self.peak, used + for_a_moment)
        self.reserved = max(self.reserved, used + for_a_moment)
        self.most_reserved = max(self.most_reserved, self.reserved)

    def peak_bytes(self) -> int:
        return self.peak

    def used_bytes(self) -> int:
        return self.used

    def left_bytes(self) -> dict[str, int]:
        return {"free": 92 - self.reserved, "total": 100, "reserved": self.reserved, "allocated": self.used}

    def available_bytes(self) -> int:
        return min(92, self.limit) - self.used

    def total_bytes(self) -> int:
        return self.limit

    def allocator_figures(self) -> dict[str, int]:
        return {"peak_reserved": self.most_reserved, "allocator_retries": self.retries}

    def forget_peak(self) -> None:
        self.peak, self.most_reserved = self.used, self.reserved


@pytest.fixture
def gpu() -> Any:
    return Gpu()


def built(gpu: Any) -> RankMemory:
    """Returns the memory of an engine that has 20 bytes and took 70 for a moment."""
    gpu.take(20, for_a_moment=50)
    memory = RankMemory()
    memory.engine_built(gpu)
    return memory


def test_what_initialisation_took_for_a_moment_is_no_part_of_what_the_steps_take(gpu: Any) -> None:
    memory = built(gpu)
    gpu.take(30, for_a_moment=10)
    memory.step_ended(gpu, counts=True)
    figures = memory.figures(gpu)
    assert figures.after_initialize == [20]
    assert figures.steps_peak == [40]
    assert figures.peak == [70]


def test_only_retries_in_counted_steps_say_that_memory_is_short(gpu: Any) -> None:
    gpu.retries = 1
    memory = built(gpu)
    gpu.retries = 3  # as kernels are chosen
    memory.step_ended(gpu, counts=False)
    memory.step_ended(gpu, counts=True)
    assert memory.figures(gpu).counted_retries == [0]
    gpu.retries = 5
    memory.step_ended(gpu, counts=True)
    figures = memory.figures(gpu)
    assert (figures.counted_retries, figures.allocator_retries) == ([2], [5])


def test_what_nobody_had_at_the_peak_leaves_out_what_the_allocator_holds_and_what_is_not_pytorchs(gpu: Any) -> None:
    memory = built(gpu)
    gpu.take(30, for_a_moment=50)
    assert memory.figures(gpu).least_free == [100 - 8 - 80]
    gpu.limit = 85
    assert memory.figures(gpu).least_free == [5]


def test_a_cpu_has_none_of_these_figures() -> None:
    memory = RankMemory()
    memory.engine_built(CpuDevice())
    memory.step_ended(CpuDevice(), counts=True)
    found = {name for name, figures in asdict(memory.figures(CpuDevice())).items() if figures}
    assert {"peak", "after_initialize"} <= found <= {"peak", "after_initialize", "available"}


def test_what_comes_after_the_end_is_in_no_figure(gpu: Any) -> None:
    memory = built(gpu)
    gpu.take(30, for_a_moment=10)
    memory.step_ended(gpu, counts=True)
    figures = memory.figures(gpu)
    memory.end(gpu)
    gpu.take(30, for_a_moment=60)
    gpu.retries = 3
    memory.step_ended(gpu, counts=True)
    assert memory.figures(gpu) == figures


def test_an_engines_configuration_is_plain_whatever_its_user_put_there() -> None:
    class Groups:
        def __init__(self) -> None:
            self.me = self

    engine = SimpleNamespace(_config=SimpleNamespace(zero={"stage": 2}, mpu=Groups(), dtype=torch.bfloat16))
    assert in_force(engine) == {"zero": {"stage": 2}, "mpu": "Groups", "dtype": "torch.bfloat16"}
