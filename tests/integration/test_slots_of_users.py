"""Users of one host: they share one queue, and none can do more to another than hold slots."""

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.launch.locks import own_folder, reserved_port
from zerotune.trial_lib.launch.slots import QueueWait, held_slots

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")

FORK = multiprocessing.get_context("fork")
HOST = Host("cpu", ["0", "1", "2"], 2**30)
OTHER = 54321


def never() -> bool:
    return False


@pytest.fixture
def lock_dir() -> Iterator[Path]:
    """A folder as /tmp is. Pytest's own are closed to other users."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


class OtherUser:
    """A process of another user, which has told something when this has returned."""

    def __init__(self, does: Callable[[Path, Connection], None], lock_dir: Path) -> None:
        self.told, theirs = FORK.Pipe()
        self.process = FORK.Process(target=self._run, args=(does, lock_dir, theirs), daemon=True)
        self.process.start()
        theirs.close()
        assert self.told.poll(20), "the other user's process says nothing"
        self.first = self.told.recv()

    @staticmethod
    def _run(does: Callable[[Path, Connection], None], lock_dir: Path, told: Connection) -> None:
        os.setgroups([])
        os.setgid(OTHER)
        os.setuid(OTHER)
        does(lock_dir, told)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def hold_two(lock_dir: Path, told: Connection) -> None:
    with held_slots(lock_dir, HOST, 2, never, told.send, what="their study"):
        told.send("has slots")
        time.sleep(600)


def free(lock_dir: Path, count: int = 1) -> bool:
    with held_slots(lock_dir, HOST, count, lambda: True) as held:
        return held is not None


def test_two_users_exclude_each_other_and_wait_in_one_queue(lock_dir: Path) -> None:
    with held_slots(lock_dir, HOST, 2, never, what="our study"):
        other = OtherUser(hold_two, lock_dir)
        assert isinstance(other.first, QueueWait)
        assert other.first.holders[0][0] == f"our study of root (pid {os.getpid()})"
        # The other user has come first.
        assert not free(lock_dir, 2)
    while other.told.poll(20) and other.told.recv() != "has slots":
        pass
    waits: list[QueueWait] = []
    with held_slots(lock_dir, HOST, 2, lambda: bool(waits), waits.append) as held:
        assert held is None
    assert waits[0].holders[0][0] == f"their study of user {OTHER} (pid {other.process.pid})"
    other.end()
    assert free(lock_dir, 3)


def test_a_port_of_another_user_is_not_given_out(lock_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr("zerotune.trial_lib.launch.locks._PORTS", range(port, port + 1))

    def reserve(lock_dir: Path, told: Connection) -> None:
        with reserved_port() as theirs:
            told.send(theirs)
            time.sleep(600)

    other = OtherUser(reserve, lock_dir)
    assert other.first == port
    with pytest.raises(OSError, match="no free port"), reserved_port():
        pass
    other.end()
    with reserved_port() as ours:
        assert ours == port


def lay_traps(lock_dir: Path, told: Connection) -> None:
    """Lays in its folder what could be followed, waited for or misread."""
    claims = own_folder(lock_dir) / "claims"
    claims.mkdir(mode=0o755)
    os.mkfifo(claims / "1-1")
    (claims / "2-1").symlink_to("/etc/passwd")
    (claims / "3-1").mkdir()
    held = {"arrived": 1, "wants": ["cpu 0"], "count": 1, "holds": ["cpu 0", "cpu 1", "cpu 2"], "since": 0.0, "pid": 1}
    (claims / "4-1").write_text(json.dumps({**held, "what": "nobody has this open"}))
    for number, text in enumerate(("", "[" * 60_000, "{}", "[]", '{"arrived": 1e999}', "x" * 10**6), 5):
        file = claims / f"{number}-1"
        file.write_text(text)
        descriptor = os.open(file, os.O_RDWR)
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
    link = lock_dir / "zerotune-link"
    link.symlink_to("/etc")
    (lock_dir / "zerotune-nothing").symlink_to(lock_dir / "none")
    (lock_dir / "zerotune-file").touch()
    told.send("laid")
    time.sleep(600)


def test_what_another_user_lays_in_the_way_neither_holds_nor_harms(lock_dir: Path) -> None:
    other = OtherUser(lay_traps, lock_dir)
    before = {path: path.lstat().st_mtime_ns for path in lock_dir.glob("zerotune-*/claims/*")}
    assert free(lock_dir, 3)
    assert {path: path.lstat().st_mtime_ns for path in before} == before
    assert not (lock_dir / "none").exists()
    other.end()


def take_our_name(lock_dir: Path, told: Connection) -> None:
    (lock_dir / "zerotune-0").mkdir(mode=0o700)
    hold_two(lock_dir, told)


def test_a_user_whose_folder_another_has_made_uses_one_beside_it(lock_dir: Path) -> None:
    other = OtherUser(take_our_name, lock_dir)
    assert free(lock_dir)
    assert not free(lock_dir, 2)
    own = own_folder(lock_dir)
    assert own.name.startswith("zerotune-0.")
    assert (own.stat().st_uid, stat.S_IMODE(own.stat().st_mode)) == (0, 0o711)
    other.end()
    assert free(lock_dir, 3)


def lock_all_that_can_be_read(lock_dir: Path, told: Connection) -> None:
    with contextlib.suppress(PermissionError):
        fcntl.flock(os.open(lock_dir / "zerotune-0", os.O_RDONLY), fcntl.LOCK_EX)
        told.send("the folder can be locked")
    (claim,) = lock_dir.glob("zerotune-0/claims/*")
    descriptor = os.open(claim, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    told.send(claim.name)
    # It gets this lock when the holder has died.
    fcntl.lockf(descriptor, fcntl.LOCK_SH)
    time.sleep(600)


def test_a_claim_ends_with_its_holder_whatever_another_user_locks(lock_dir: Path) -> None:
    ours, theirs = FORK.Pipe()
    holder = FORK.Process(target=hold_two, args=(lock_dir, theirs), daemon=True)
    holder.start()
    assert ours.recv() == "has slots"
    other = OtherUser(lock_all_that_can_be_read, lock_dir)
    assert other.first.endswith(f"-{holder.pid}")
    holder.kill()
    holder.join()
    assert free(lock_dir, 3)
    other.end()


def keep_the_folder(lock_dir: Path, told: Connection) -> None:
    fcntl.flock(os.open(lock_dir, os.O_RDONLY), fcntl.LOCK_EX)
    told.send("kept")
    time.sleep(600)


def test_a_process_that_keeps_all_claims_locked_is_named_and_can_be_waited_out(
    lock_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerotune.trial_lib.launch.slots._PATIENCE_S", 0.2)
    other = OtherUser(keep_the_folder, lock_dir)
    waits: list[QueueWait] = []
    with held_slots(lock_dir, HOST, 1, lambda: len(waits) > 1, waits.append) as held:
        assert held is None
    assert waits[0].holders[0][0] == f"a process that keeps {lock_dir} locked (/proc/locks has its number)"
    other.end()
    assert free(lock_dir)


def test_ctrl_c_ends_the_wait_for_locked_claims_at_once_and_the_wait_is_told_every_few_seconds(
    lock_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = OtherUser(keep_the_folder, lock_dir)
    began = time.monotonic()
    with held_slots(lock_dir, HOST, 1, lambda: True) as held:
        assert held is None
    assert time.monotonic() - began < 2
    monkeypatch.setattr("zerotune.trial_lib.launch.slots._PATIENCE_S", 0.0)
    waits: list[QueueWait] = []
    until = time.monotonic() + 1
    with held_slots(lock_dir, HOST, 1, lambda: time.monotonic() > until, waits.append):
        pass
    assert len(waits) == 1
    other.end()
