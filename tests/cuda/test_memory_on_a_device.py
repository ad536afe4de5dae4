"""What a trial says of a GPU's memory is what the program takes of it, and what the card has left."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from device_fixtures import host_of_tests

from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.messages.orders import StepWindow

pytestmark = [pytest.mark.alone, pytest.mark.devices(1, "cuda")]

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)
MIB, GIB = 2**20, 2**30
HOLDS = """
import sys, time, torch
held = torch.ones(int(sys.argv[1]) // 4, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
time.sleep(600)
"""


def run(trials: Any, micro_batch: int = 8, mib: int = 8, **options: Any) -> Any:
    result = trials.run("memory_use.py", "--mib_per_sample", str(mib), micro_batch=micro_batch, window=SHORT, **options)
    assert result.outcome == "completed", result.reason
    return result


@pytest.fixture
def company() -> Iterator[int]:
    """Another process that holds memory of the first slot; its bytes."""
    size = 2 * GIB
    environment = {**os.environ, **kind_of("cuda").environment(host_of_tests().slots[:1])}
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(size)], env=environment, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield size
        holder.kill()


def test_the_peak_has_what_a_forward_pass_takes(trials: Any) -> None:
    small, large = (run(trials, mib=mib).memory for mib in (8, 32))
    assert large.peak[0] - small.peak[0] == pytest.approx(8 * (32 - 8) * MIB, rel=0.05)


def test_the_figures_of_one_trial_agree(trials: Any) -> None:
    memory, host = run(trials).memory, host_of_tests()
    assert 0 < memory.after_initialize[0] < memory.peak[0] <= memory.peak_reserved[0]
    assert memory.peak[0] - memory.after_initialize[0] >= 8 * 8 * MIB
    total = host.memory[host.device_of(host.slots[0])]
    assert 0 < memory.available[0] < total
    assert memory.allocator_retries == [0]


def test_what_others_hold_of_the_card_is_not_available(trials: Any, company: int) -> None:
    beside = run(trials).memory.available[0]
    assert beside < host_of_tests().memory_per_slot - company


def test_a_limit_is_what_is_available(trials: Any) -> None:
    memory = run(trials, memory_limit=GIB).memory
    assert 0 < memory.available[0] <= GIB - memory.after_initialize[0]


def test_a_program_that_needs_more_than_its_limit_is_out_of_memory(trials: Any) -> None:
    options = {"micro_batch": 64, "memory_limit": GIB, "window": SHORT}
    result = trials.run("memory_use.py", "--mib_per_sample", "32", **options)
    assert result.outcome == "out_of_memory", result.reason
    assert "out of memory" in result.reason


def test_a_limit_holds_for_one_trial_alone(trials: Any) -> None:
    run(trials, memory_limit=GIB)
    assert run(trials, micro_batch=64, mib=32).memory.peak[0] > 2 * GIB
