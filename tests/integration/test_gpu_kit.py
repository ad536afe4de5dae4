"""The kit for a GPU host, on a processor at toy size: not one of its lines is new when there is a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.run import LIMITS_S

KIT = Path(__file__).parents[2] / "benchmarks" / "gpu"
SECONDS = 1700.0


def run_kit(out: Path, *stages: str, seconds: float = SECONDS, device: str = "cpu") -> tuple[int, dict[str, Any]]:
    """Runs stages; returns the exit status, and what each has written."""
    words = ["--stages", *stages, "--device", device, "--out", str(out), "--seconds", str(seconds)]
    run = subprocess.run(
        [sys.executable, str(KIT / "run.py"), *words], capture_output=True, text=True, timeout=seconds + 60
    )
    written = {stage: json.loads((out / f"{stage}.json").read_text()) for stage in stages}
    assert (out / "table.txt").read_text() in run.stdout
    return run.returncode, written


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.devices(1, "cpu")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", LIMITS_S)
def test_a_stage_runs_to_its_end(tmp_path: Path, stage: str) -> None:
    status, written = run_kit(tmp_path, stage)
    found = written[stage]
    failed = [check for check in found["checks"] if check["outcome"] == "fail"]
    assert not failed, failed
    assert found["ended"] == "by itself", found.get("last_words")
    assert status == 0
    assert any(check["outcome"] == "pass" for check in found["checks"])


@pytest.mark.alone
@pytest.mark.devices(1, "cpu")
@pytest.mark.long
def test_a_stage_beyond_its_limit_is_killed_and_costs_no_other_its_record(tmp_path: Path) -> None:
    status, written = run_kit(tmp_path, "clock", "host", seconds=8.0)
    assert status == 1
    assert written["clock"]["ended"].startswith("at its limit of ")
    assert written["host"]["ended"] == "not started: no time was left"
    assert "not started" in (tmp_path / "table.txt").read_text()


@pytest.mark.devices(1, "cpu")
def test_a_host_without_a_gpu_is_told_so(tmp_path: Path) -> None:
    status, written = run_kit(tmp_path, "host", device="cuda", seconds=100.0)
    (check,) = written["host"]["checks"]
    assert (status, check["outcome"]) == (1, "fail")
    assert check["said"] == "this host trains on cpu, and --device says cuda"
