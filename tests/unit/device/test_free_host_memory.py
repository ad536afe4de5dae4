"""What the host's memory still has, by the machine's files and by those of the control groups around a process."""

from pathlib import Path

import pytest

from zerotune.trial_lib.device.base import available_bytes, kernel_kills

GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with 64 GiB that are free, on which the kernel has killed three processes."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {128 << 20} kB\nMemFree: {9 << 20} kB\nMemAvailable: {64 << 20} kB\n")
    write(tmp_path / "proc/vmstat", "pgfault 7\noom_kill 3\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group(folder: Path, limit: object, used: int, files: int, kills: int) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon {used}\ninactive_file {files}\n")
    write(folder / "memory.events", f"low 0\noom {kills}\noom_kill {kills}\n")


def here(machine: Path) -> int | None:
    return available_bytes(machine / "proc", machine / "cgroups")


def kills(machine: Path) -> int:
    return kernel_kills(machine / "proc", machine / "cgroups")


def test_without_control_groups_it_is_the_machines(machine: Path) -> None:
    assert here(machine) == 64 * GIB
    assert kills(machine) == 3


def test_the_tightest_control_group_counts_without_the_files_it_can_drop(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/pod/container\n")
    group(machine / "cgroups/pod", 40 * GIB, used=30 * GIB, files=10 * GIB, kills=2)
    group(machine / "cgroups/pod/container", "max", used=30 * GIB, files=10 * GIB, kills=1)
    assert here(machine) == 20 * GIB
    assert kills(machine) == 6


def test_a_path_that_is_the_hosts_leads_to_the_containers_own_group(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/docker/abc\n")
    group(machine / "cgroups", 8 * GIB, used=3 * GIB, files=0, kills=4)
    assert here(machine) == 5 * GIB


def test_the_first_version_of_control_groups_is_read_as_well(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "11:pids:/job\n5:memory:/job\n0::/\n")
    folder = machine / "cgroups/memory/job"
    write(folder / "memory.limit_in_bytes", f"{10 * GIB}\n")
    write(folder / "memory.usage_in_bytes", f"{6 * GIB}\n")
    write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {1 * GIB}\n")
    write(folder / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert here(machine) == 5 * GIB
    assert kills(machine) == 8


def test_a_kernel_that_says_nothing_leaves_it_open(tmp_path: Path) -> None:
    assert here(tmp_path) is None
    assert kills(tmp_path) is None


def test_this_host_has_memory_left() -> None:
    assert (available_bytes() or 0) > 0
