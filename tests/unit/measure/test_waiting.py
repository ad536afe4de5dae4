"""What is looked at of a rank that does not move."""

import threading
from types import SimpleNamespace

import psutil
import pytest
import torch

from trial_lib.measure import waiting


def test_a_kernel_that_keeps_no_account_of_bytes_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psutil.Process, "io_counters")
    assert waiting._bytes_of(psutil.Process()) == 0
    activity = waiting.Activity()
    assert activity.was(threading.main_thread()) in (True, False)


def test_the_device_that_is_asked_is_the_one_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device | None] = []

    def current_stream(device: torch.device | None = None) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(query=lambda: False)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    assert waiting._is_busy(torch.device("cuda", 1))
    assert not waiting._is_busy(torch.device("cpu"))
    assert not waiting._is_busy(None)
    assert asked == [torch.device("cuda", 1)]
