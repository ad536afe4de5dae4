"""Which tests a host runs, by the devices that it has, and what is said of the others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from device_fixtures import lacking

from zerotune.trial_lib.device.base import Host

ROOT = Path(__file__).parents[2]
CORES = Host("cpu", ["0", "1"], 2**30)
ONE_GPU = Host("cuda", ["0"], 2**30)

FILE = """
import pytest

@pytest.fixture
def two():
    from device_fixtures import need
    need(4096)

@pytest.mark.devices(4096)
def test_marked(): raise AssertionError

def test_asks_by_its_fixture(two): raise AssertionError

@pytest.mark.skip("its author says so")
def test_skipped(): raise AssertionError

@pytest.mark.devices(1)
def test_runs(): print("it runs")
"""


@pytest.mark.parametrize(
    ("count", "kind", "host", "lack"),
    [
        (2, None, CORES, None),
        (1, None, ONE_GPU, None),
        (1, "cpu", CORES, None),
        (1, "cuda", ONE_GPU, None),
        (3, None, CORES, "needs 3 devices, and this host has 2 cores"),
        (2, None, ONE_GPU, "needs 2 devices, and this host has 1 CUDA device"),
        (2, "cuda", ONE_GPU, "needs 2 CUDA devices, and this host has 1 CUDA device"),
        (1, "cpu", ONE_GPU, "needs 1 core for its trials, and this host trains on 1 CUDA device"),
        (1, "cuda", CORES, "needs 1 CUDA device for its trials, and this host trains on 2 cores"),
    ],
)
def test_a_host_runs_what_it_has_devices_for(count: int, kind: str | None, host: Host, lack: str | None) -> None:
    assert lacking(count, kind, host) == lack


def test_a_kind_of_device_that_there_is_not_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="cuda or cpu, not 'gpu'"):
        lacking(1, "gpu", CORES)


def test_the_end_of_a_run_says_what_was_left_out_and_why(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(FILE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    run = subprocess.run(
        [*command, "-p", "device_fixtures", "-p", "no:cacheprovider", "-s", str(file)],
        env=environment,
        cwd=tmp_path,
        text=True,
        capture_output=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "it runs" in run.stdout
    _, left_out = run.stdout.split(" left out ")
    assert "2 tests: needs 4096 devices, and this host has " in left_out
    assert "1 test: its author says so" in left_out
    assert "1 passed, 3 skipped" in left_out
