"""Slots and ports: one holder each, on the whole host."""

import fcntl
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.launch import locks as ports
from zerotune.trial_lib.launch.locks import own_folder, reserved_port
from zerotune.trial_lib.launch.slots import held_slots
from zerotune.trial_lib.messages.errors import InputError

SPAWN = multiprocessing.get_context("spawn")
SLOTS = ["0", "1", "2"]
HOST = Host("cpu", SLOTS, 2**30)


def never():
    return False


def hold_often(lock_dir, claims, count, rounds):
    """Takes slots again and again; a claim is a file that must not exist yet."""
    for _ in range(rounds):
        with held_slots(lock_dir, HOST, count, never) as held:
            assert len(set(held.names)) == count
            for slot in held.names:
                (claims / slot).touch(exist_ok=False)
            time.sleep(0.002)
            for slot in held.names:
                (claims / slot).unlink()
    (claims / f"done-{os.getpid()}-{threading.get_ident()}").touch()


@pytest.mark.parametrize("kind", [threading.Thread, SPAWN.Process])
def test_no_slot_is_ever_held_twice(tmp_path, kind):
    claims = tmp_path / "claims"
    claims.mkdir()
    workers = [kind(target=hold_often, args=(tmp_path / "locks", claims, count, 10)) for count in (1, 2, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    # A worker that found a slot claimed has not come to its end.
    assert len(list(claims.glob("done-*"))) == 4


def hold(lock_dir, ready):
    with held_slots(lock_dir, HOST, 3, never, lambda wait: ready.send("waits")):
        ready.send("held")
        time.sleep(600)


@pytest.mark.alone
def test_a_killed_holders_slots_are_free_at_once(tmp_path):
    ours, theirs = SPAWN.Pipe()
    holder = SPAWN.Process(target=hold, args=(tmp_path, theirs))
    holder.start()
    ours.recv()
    with held_slots(tmp_path, HOST, 1, lambda: True) as held:
        assert held is None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    started = time.monotonic()
    with held_slots(tmp_path, HOST, 3, never) as held:
        assert held.names == SLOTS
    assert time.monotonic() - started < 0.5


def test_more_slots_than_there_are_are_refused_and_not_waited_for(tmp_path):
    with pytest.raises(InputError) as refused, held_slots(tmp_path, HOST, 4, lambda: pytest.fail("it waits")):
        pass
    assert str(refused.value) == (
        "resources.slots_per_trial: 4 slots are wanted at once, and this host has 3 of kind cpu. "
        "Ask for at most 3, or run on a host that has more."
    )
    with held_slots(tmp_path, HOST, 3, never) as held:
        assert held.names == SLOTS


def test_slots_are_given_back_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), held_slots(tmp_path, HOST, 3, never):
        1 / 0  # noqa: B018
    with held_slots(tmp_path, HOST, 3, never) as held:
        assert held.names == SLOTS


class Waiting:
    """Wants slots in a thread of its own, until it has them or gives up."""

    def __init__(self, lock_dir, count, host=HOST):
        self._gave_up, self._may_end, self._has, self._waits = (threading.Event() for _ in range(4))
        self._thread = threading.Thread(target=self._run, args=(lock_dir, host, count))
        self._thread.start()
        assert self._waits.wait(timeout=10)

    def _run(self, lock_dir, host, count):
        with held_slots(lock_dir, host, count, self._gave_up.is_set, lambda wait: self._waits.set()) as held:
            self.held = held
            self._has.set()
            self._may_end.wait()

    def has(self, timeout_s):
        return self._has.wait(timeout_s) and self.held is not None

    def end(self):
        self._gave_up.set()
        self._may_end.set()
        self._thread.join()


def free(lock_dir, host=HOST):
    """Returns the slot that somebody who comes now, and does not wait, is given."""
    with held_slots(lock_dir, host, 1, lambda: True) as held:
        return None if held is None else held.names[0]


def test_the_first_to_wait_keeps_what_it_has_got_until_it_gives_up(tmp_path):
    with held_slots(tmp_path, HOST, 1, never), held_slots(tmp_path, HOST, 1, never):
        waiting = Waiting(tmp_path, 2)
        assert free(tmp_path) is None
        waiting.end()
        assert free(tmp_path) == "2"


def test_a_slot_that_the_first_to_wait_cannot_need_is_given_to_others(tmp_path):
    # Both slots come free together, and then there are three for two.
    with held_slots(tmp_path, HOST, 2, never):
        waiting = Waiting(tmp_path, 2)
        assert free(tmp_path) == "2"
    assert waiting.has(timeout_s=2)
    waiting.end()


def test_only_the_first_to_wait_keeps_slots_so_that_two_never_wait_for_each_other(tmp_path):
    with held_slots(tmp_path, HOST, 1, never):
        first, second = Waiting(tmp_path, 3), Waiting(tmp_path, 3)
    assert first.has(timeout_s=2)
    assert first.held.names == SLOTS
    assert not second.has(timeout_s=0.2)
    first.end()
    assert second.has(timeout_s=2)
    second.end()


def test_who_waits_for_some_devices_keeps_nobody_from_others(tmp_path):
    with held_slots(tmp_path, HOST, 1, never):
        waiting = Waiting(tmp_path, 2, Host("cpu", ["0", "1"], 2**30))
        assert free(tmp_path) == "2"
        assert free(tmp_path, Host("cpu", ["1"], 2**30)) is None
        waiting.end()


def come_and_go(lock_dir, host):
    while True:
        with held_slots(lock_dir, host, 1, never):
            time.sleep(0.02)


@pytest.mark.alone
def test_who_wants_all_slots_gets_them_beside_many_that_come_and_go(tmp_path):
    host = Host("cpu", [str(number) for number in range(8)], 2**30)
    small = [SPAWN.Process(target=come_and_go, args=(tmp_path, host), daemon=True) for _ in range(8)]
    for process in small:
        process.start()
    try:
        deadline = time.monotonic() + 60
        while free(tmp_path, host) is not None:
            assert time.monotonic() < deadline, "they do not hold all"
        for _ in range(3):
            started = time.monotonic()
            with held_slots(tmp_path, host, 8, never) as held:
                assert held.names == host.slots
            assert time.monotonic() - started < 3
    finally:
        for process in small:
            process.kill()
            process.join()


def test_a_killed_waiter_s_slots_are_free_again_and_another_waits_first(tmp_path):
    ours, theirs = SPAWN.Pipe()
    with held_slots(tmp_path, HOST, 1, never):
        waiter = SPAWN.Process(target=hold, args=(tmp_path, theirs))
        waiter.start()
        assert ours.recv() == "waits"
        assert free(tmp_path) is None
        waiter.kill()
        waiter.join()
        assert free(tmp_path) == "1"
        waiting = Waiting(tmp_path, 3)
    assert waiting.has(timeout_s=2)
    waiting.end()


def is_left_alone(lock_dir):
    """Returns whether a cleaner passes a user's folder by: `systemd-tmpfiles` does where it cannot have its lock."""
    descriptor = os.open(own_folder(lock_dir), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def test_cleaners_leave_the_locks_alone_while_a_slot_is_held(tmp_path):
    with held_slots(tmp_path, HOST, 1, never):
        assert is_left_alone(tmp_path)
        with held_slots(tmp_path, HOST, 1, never):
            assert is_left_alone(tmp_path)
        assert is_left_alone(tmp_path)
    assert not is_left_alone(tmp_path)


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="nothing cleans /tmp by systemd's rules here")
def test_a_held_slot_outlives_systemd_s_cleaner(tmp_path):
    locks = tmp_path / "tmp" / "locks"
    (tmp_path / "clean.conf").write_text(f"d {tmp_path}/tmp - - - 1s\n")

    def clean():
        time.sleep(1.1)
        subprocess.run(["systemd-tmpfiles", "--clean", tmp_path / "clean.conf"], check=True)

    with held_slots(locks, HOST, 2, never) as held:
        assert held.names == ["0", "1"]
        clean()
        with held_slots(locks, HOST, 2, lambda: True) as another:
            assert another is None
    clean()
    # It would have removed them.
    assert not list(locks.glob("*/claims/*"))
    with held_slots(locks, HOST, 3, never) as held:
        assert held.names == SLOTS


def hold_with_a_child(lock_dir, ready):
    with held_slots(lock_dir, HOST, 3, never) as held:
        ready.send(subprocess.Popen(["sleep", "600"], pass_fds=held.descriptors).pid)
        time.sleep(600)


def test_slots_are_held_and_left_alone_as_long_as_anybody_has_their_descriptors(tmp_path):
    ours, theirs = SPAWN.Pipe()
    holder = SPAWN.Process(target=hold_with_a_child, args=(tmp_path, theirs))
    holder.start()
    child = ours.recv()
    holder.kill()
    holder.join()
    try:
        assert is_left_alone(tmp_path)
        with held_slots(tmp_path, HOST, 1, lambda: True) as held:
            assert held is None
    finally:
        os.kill(child, signal.SIGKILL)
    with held_slots(tmp_path, HOST, 3, never) as held:
        assert held.names == SLOTS
    assert not is_left_alone(tmp_path)


@pytest.fixture
def few_ports(monkeypatch):
    """Three ports that are free now, where neither trials nor outgoing connections look for theirs."""
    threes = (range(first, first + 3) for first in range(31000, 32766, 3))
    three = next(three for three in threes if all(ports._is_free(port) for port in three))
    monkeypatch.setattr(ports, "_PORTS", three)
    return three


def test_ports_that_are_held_at_once_differ(few_ports):
    with reserved_port() as first, reserved_port() as second, reserved_port() as third:
        assert {first, second, third} == set(few_ports)
        with pytest.raises(OSError, match="no free port"), reserved_port():
            pass
    with reserved_port() as again:
        assert again in few_ports


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "127.0.0.2"])
def test_a_port_that_another_program_listens_on_is_not_given_out(few_ports, address):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((address, few_ports[1]))
        other.listen()
        with reserved_port() as first, reserved_port() as second:
            assert {first, second} == {few_ports[0], few_ports[2]}


@pytest.mark.devices(2, "cpu")
def test_concurrent_trials_take_different_slots_and_ports(trials):
    both = [trials.start(trials.plan("inspects.py", "--steps", "40")) for _ in range(2)]
    for running in both:
        running.result()
    found = [running.log() for running in both]
    assert '"cores": [0]' in found[0] + found[1]
    assert found[0].split('"cores": ')[1][:3] != found[1].split('"cores": ')[1][:3]
    assert found[0].split('"MASTER_PORT": ')[1][:7] != found[1].split('"MASTER_PORT": ')[1][:7]
