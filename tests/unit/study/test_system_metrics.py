"""Watching the host while a training runs."""

import logging
import time
from pathlib import Path

import pytest

from trial_lib.experiment.metrics_file import MetricsReader
from trial_lib.study import system_metrics
from trial_lib.study.system_metrics import SystemMonitor


def test_a_sample_that_fails_costs_itself_alone_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(system_metrics, "_PERIOD_S", 0.01)
    asked: list[int] = []

    def batch() -> int:
        asked.append(0)
        if len(asked) < 4:
            raise OSError("away")
        return len(asked)

    path = tmp_path / "system_metrics.jsonl"
    monitor = SystemMonitor(path, batch, lambda: None, logging.getLogger("test"))
    monitor.start()
    while not path.exists():
        assert len(asked) < 1000
        time.sleep(0.01)
    monitor.close()
    assert [record.batch for record in MetricsReader(path).read()][:1] == [4]
    assert [record.message for record in caplog.records] == ["system metrics are missing: OSError: away"]
