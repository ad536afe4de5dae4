"""Names of ports: held by one at a time, in any thread, and nothing stays behind."""

import contextlib
import os
import threading

import pytest

from zerotune.trial_lib.launch import locks
from zerotune.trial_lib.launch.locks import reserved_port

# Numbers that no port has, because other trials of this host reserve ports meanwhile.
PORTS = range(100_000 + 20 * os.getpid(), 100_016 + 20 * os.getpid())


def test_threads_at_once_are_given_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_is_free", lambda port: True)
    monkeypatch.setattr(locks, "_PORTS", PORTS)
    everyone, held, given = threading.Barrier(16), set(), []

    def reserve(until: contextlib.ExitStack) -> int:
        while True:
            # A port may become free behind a search, and the next one be taken before it.
            with contextlib.suppress(OSError):
                return until.enter_context(reserved_port())

    def hold() -> None:
        for _ in range(20):
            with contextlib.ExitStack() as until:
                port = reserve(until)
                assert port not in held
                held.add(port)
                given.append(port)
                held.remove(port)
        with contextlib.ExitStack() as until:
            held.add(reserve(until))
            everyone.wait(timeout=20)

    threads = [threading.Thread(target=hold) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A thread that was given another's port has not come to its end.
    assert len(given) == 16 * 20
    assert held == set(PORTS)


def test_a_port_is_free_again_when_its_holder_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_is_free", lambda port: True)
    monkeypatch.setattr(locks, "_PORTS", PORTS[:1])
    with pytest.raises(KeyError), reserved_port() as port:
        raise KeyError(port)
    with reserved_port() as again:
        assert again == PORTS[0]
        with pytest.raises(OSError, match="no free port"), reserved_port():
            pass


def test_a_port_that_something_else_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_PORTS", PORTS[:3])
    monkeypatch.setattr(locks, "_is_free", lambda port: port == PORTS[1])
    with reserved_port() as port:
        assert port == PORTS[1]
