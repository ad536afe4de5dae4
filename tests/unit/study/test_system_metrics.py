"""Watching the host while a training runs."""

import logging
import time
from pathlib import Path

import pytest
from nvml_fixtures import PretendGpu, pretend_gpus

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.messages.files import MetricsReader
from zerotune.trial_lib.study import full_experiment
from zerotune.trial_lib.study.full_experiment import SystemMonitor

CPU = Host("cpu", ["0"], 2**30)


def test_a_sample_that_fails_costs_itself_alone_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(full_experiment, "_PERIOD_S", 0.01)
    asked: list[int] = []

    def batch() -> int:
        asked.append(0)
        if len(asked) < 4:
            raise OSError("away")
        return len(asked)

    path = tmp_path / "system_metrics.jsonl"
    monitor = SystemMonitor(path, batch, lambda: None, logging.getLogger("test"), CPU)
    monitor.start()
    while not path.exists():
        assert len(asked) < 1000
        time.sleep(0.01)
    monitor.close()
    assert [record.batch for record in MetricsReader(path).read()][:1] == [4]
    assert [record.message for record in caplog.records] == ["system metrics are missing: OSError: away"]


@pytest.mark.parametrize(("slot", "device"), [("1", "GPU-8f3b-2"), ("GPU-8f3b", "GPU-8f3b-2"), ("MIG-1", "MIG-1")])
def test_a_gpu_is_watched_however_its_slot_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slot: str, device: str
) -> None:
    pretend_gpus(
        monkeypatch,
        [
            PretendGpu("GPU-8f3a-1", instances=[PretendGpu("MIG-1", used=5)]),
            PretendGpu("GPU-8f3b-2", used=5),
        ],
    )
    host = Host("cuda", [slot], 80, {slot: device})
    path = tmp_path / "system_metrics.jsonl"
    monitor = SystemMonitor(path, lambda: 1, lambda: None, logging.getLogger("test"), host)
    monitor.watch([slot])
    monitor.start()
    monitor.close()
    (record,) = MetricsReader(path).read()
    assert (record.metrics["gpu0.memory_used"], record.metrics["gpu0.utilization"]) == (5, 87)
