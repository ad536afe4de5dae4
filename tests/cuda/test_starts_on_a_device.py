"""Trials on a GPU start as forks of a process that leaves the GPU alone."""

import os
from typing import Any

import psutil
import pynvml
import pytest
from device_fixtures import host_of_tests

from zerotune.trial_lib.messages.orders import StepWindow

pytestmark = [pytest.mark.alone, pytest.mark.devices(1, "cuda")]

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)


def processes_on_the_card() -> set[int]:
    """Returns who has memory of the first slot's card, as NVML sees it: within a container it may see nobody."""
    host = host_of_tests()
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(host.device_of(host.slots[0]))
        return {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    finally:
        pynvml.nvmlShutdown()


def opened_by(process: psutil.Process) -> set[str]:
    found = set()
    for descriptor in os.listdir(f"/proc/{process.pid}/fd"):  # noqa: PTH208 - as the kernel names them
        try:
            found.add(os.readlink(f"/proc/{process.pid}/fd/{descriptor}"))  # noqa: PTH115
        except OSError:
            continue
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_starts_warm(trials: Any, stage: int) -> None:
    result = trials.run("plain.py", zero={"stage": stage}, window=SHORT)
    assert result.outcome == "completed", result.reason
    assert not [note for note in trials.notes if note.startswith("starting cold")]


def test_the_fork_server_opens_no_gpu(trials: Any) -> None:
    result = trials.run("plain.py", window=SHORT)
    assert result.outcome == "completed", result.reason
    servers = [
        process
        for process in psutil.Process().children(recursive=True)
        if "zerotune.trial_lib.launch.processes.fork_server" in process.cmdline()
    ]
    assert servers
    assert not processes_on_the_card() & {server.pid for server in servers}
    assert not [file for server in servers for file in opened_by(server) if file.startswith("/dev/nvidia-uvm")]


def test_a_cold_trial_reads_what_a_warm_one_does(trials: Any) -> None:
    warm, cold = (trials.run("plain.py", starter=starter, window=SHORT) for starter in ("warm", "cold"))
    assert (warm.outcome, cold.outcome) == ("completed", "completed"), warm.reason + cold.reason
    assert warm.memory.peak == cold.memory.peak
    assert warm.losses == pytest.approx(cold.losses, rel=1e-5)


def test_trials_one_after_the_other_leave_nobody_on_the_card(trials: Any) -> None:
    before = processes_on_the_card()
    for _ in range(3):
        assert trials.run("plain.py", window=SHORT).outcome == "completed"
    assert processes_on_the_card() <= before
