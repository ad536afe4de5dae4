"""An engine that a program holds on to is found out, wherever its memory is."""

import gc
from typing import Any

import pytest
import torch

from zerotune.trial_lib.rank.device import CpuDevice
from zerotune.trial_lib.rank.session import EndedRun

MIB = 2**20


class Engine:
    """Has what an engine has; its states are elsewhere."""

    def __init__(self) -> None:
        self.module = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.is_destroyed = False

    def destroy(self) -> None:
        self.is_destroyed = True


class Apart(CpuDevice):
    """A device with memory of its own, of which so many bytes are in use."""

    is_apart = True

    def __init__(self, used: int) -> None:
        self._used = used

    def used_bytes(self) -> int:
        return self._used


def ended(kept: str) -> tuple[EndedRun, Any]:
    """Ends a run whose program keeps one part of its engine; returns it with what is kept."""
    engine = Engine()
    part = {"nothing": None, "engine": engine, "optimizer": engine.optimizer, "model": engine.module}[kept]
    run = EndedRun(engine)
    assert engine.is_destroyed
    del engine
    gc.collect()
    return run, part


@pytest.mark.parametrize(
    ("kept", "is_held"), [("nothing", False), ("engine", True), ("optimizer", True), ("model", True)]
)
def test_on_a_device_apart_what_is_held_on_the_host_is_seen(kept: str, is_held: bool) -> None:
    run, part = ended(kept)
    assert run.is_held(Apart(100 * MIB), 100 * MIB, 1000 * MIB) is is_held
    del part


@pytest.mark.parametrize(
    ("used", "available", "is_held"), [(160, 1000, False), (170, 1000, True), (170, 4000, False), (170, None, True)]
)
def test_bytes_that_no_run_has_at_its_beginning_are_seen(used: int, available: int | None, is_held: bool) -> None:
    run, _ = ended("nothing")
    left = None if available is None else available * MIB
    assert run.is_held(Apart(used * MIB), 100 * MIB, left) is is_held


class Here(Apart):
    """The processor's own memory, of which so many bytes are in use."""

    is_apart = False


@pytest.mark.parametrize(("kept", "is_held"), [("nothing", False), ("engine", True), ("model", True)])
def test_the_bytes_of_a_compiler_are_no_engine_that_is_held(kept: str, is_held: bool) -> None:
    run, part = ended(kept)
    assert run.is_held(Here(800 * MIB), 100 * MIB, 1000 * MIB, has_compiled=True) is is_held
    assert run.is_held(Here(800 * MIB), 100 * MIB, 1000 * MIB)
    del part
