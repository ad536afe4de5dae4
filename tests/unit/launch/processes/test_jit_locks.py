import fcntl
import os
import signal
import subprocess
import sys
import threading

import pytest

from zerotune.trial_lib.launch.processes import jit_builds
from zerotune.trial_lib.launch.processes.jit_builds import clear_stale_lock

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


def test_a_lock_that_is_given_back_while_it_is_looked_at_is_nobodys_who_died(tmp_path, monkeypatch):
    (tmp_path / "lock").touch()

    def holds_open(path):
        # Its holder has closed it, and is about to remove it.
        threading.Timer(0.02, path.unlink, [True]).start()
        return False

    monkeypatch.setattr(jit_builds, "holds_open", holds_open)
    assert not clear_stale_lock(tmp_path)


def test_what_a_killed_builder_has_left_is_built_by_the_one_that_waited(tmp_path, monkeypatch):
    cpp_extension = pytest.importorskip("torch.utils.cpp_extension")
    file_baton = pytest.importorskip("torch.utils.file_baton")
    monkeypatch.setattr(file_baton.FileBaton, "wait", file_baton.FileBaton.wait)
    tries = []

    def compiled(folder):
        baton = file_baton.FileBaton(str(folder / "lock"))
        tries.append(baton.try_acquire())
        if not tries[-1]:
            baton.wait()
            return "half built"
        baton.release()
        return "built"

    monkeypatch.setattr(cpp_extension, "_jit_compile", compiled)
    jit_builds.wait_for_the_living()
    (tmp_path / "lock").touch()  # a killed builder's
    assert cpp_extension._jit_compile(tmp_path) == "built"
    assert tries == [False, True]
