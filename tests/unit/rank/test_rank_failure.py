"""What a rank that fails leaves behind besides its exception."""

import json
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from zerotune.trial_lib.rank import device, records


class Ended(Exception):  # noqa: N818 - stands in for the end of a process
    pass


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Has a rank fail in this process, and returns its record."""

    def end(code: int) -> NoReturn:
        raise Ended

    monkeypatch.setattr(records, "end_now", end)
    monkeypatch.setattr(records, "say", lambda error: None)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def run() -> dict[str, Any]:
        record = tmp_path / "failure.json"
        with pytest.raises(Ended):
            records.fail(record, {}, ValueError("wrong"), engine_built=True)
        found: dict[str, Any] = json.loads(record.read_text())
        return found

    yield run
    resource.setrlimit(resource.RLIMIT_DATA, limits)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def test_a_rank_says_what_its_slot_still_had(fail: Any) -> None:
    budget = device.status_bytes("VmData") + 2**30
    device.CpuDevice().limit(budget)
    left = fail()["memory"]
    assert left["total"] == budget
    # A thread that has ended gives its stack back, so what is left is counted now.
    assert left["free"] == pytest.approx(budget - device.status_bytes("VmData"), abs=2**26)


def test_without_a_budget_there_is_nothing_to_say(fail: Any) -> None:
    assert fail()["memory"] == {}


def test_a_rank_on_a_gpu_says_what_nobody_has_and_what_the_allocator_holds(
    fail: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 60)
    assert fail()["memory"] == {"free": 3, "total": 80, "reserved": 70, "allocated": 60}


def test_a_device_that_does_not_answer_any_more_costs_no_record(fail: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int) -> tuple[int, int]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    found = fail()
    assert found["type"] == "ValueError"
    assert found["memory"] == {}
