import fcntl
import os
import signal
import subprocess
import sys

import pytest

from trial_lib.launch.jit_builds import clear_stale_lock

HOLD = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print('held', flush=True); time.sleep(600)"


@pytest.fixture
def holder(tmp_path):
    """A process that holds a build's lock as torch does: a file that it has created and keeps open."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "lock"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_lock_of_a_running_build_is_left_alone(tmp_path, holder):
    assert not clear_stale_lock(tmp_path)
    assert (tmp_path / "lock").exists()


def test_the_lock_of_a_killed_build_is_cleared(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert clear_stale_lock(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_a_lock_whose_builder_cannot_be_seen_is_left_alone_while_zerotune_builds_there(tmp_path):
    build_dir = tmp_path / "cpu_adam"
    build_dir.mkdir()
    # As on another host that shares the folder: nobody here has it open.
    (build_dir / "lock").touch()
    with (tmp_path / ".cpu_adam.zerotune.lock").open("w") as around:
        fcntl.flock(around, fcntl.LOCK_EX)
        assert not clear_stale_lock(build_dir)
    assert clear_stale_lock(build_dir)


def test_without_a_lock_there_is_nothing_to_clear(tmp_path):
    assert not clear_stale_lock(tmp_path)
