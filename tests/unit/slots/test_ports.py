"""Locks of ports: held by one at a time, in any thread, and nothing but one empty file stays."""

import contextlib
import threading
from pathlib import Path

import pytest

from trial_lib.slots import ports
from trial_lib.slots.ports import reserved_port


def test_threads_at_once_are_given_different_ports_and_only_one_empty_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "_is_free", lambda port: True)
    monkeypatch.setattr(ports, "_PORTS", range(21000, 21016))
    everyone, held, given = threading.Barrier(16), set(), []

    def reserve(until: contextlib.ExitStack) -> int:
        while True:
            # A port may become free behind a search, and the next one be taken before it.
            with contextlib.suppress(OSError):
                return until.enter_context(reserved_port(tmp_path))

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
    assert held == set(range(21000, 21016))
    assert [(file.name, file.stat().st_size) for file in tmp_path.iterdir()] == [("ports.lock", 0)]


def test_a_port_is_free_again_when_its_holder_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_is_free", lambda port: True)
    monkeypatch.setattr(ports, "_PORTS", range(21000, 21001))
    with pytest.raises(KeyError), reserved_port(tmp_path) as port:
        raise KeyError(port)
    with reserved_port(tmp_path) as again:
        assert again == 21000
        with pytest.raises(OSError, match="no free port"), reserved_port(tmp_path):
            pass


def test_a_port_that_something_else_listens_on_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_PORTS", range(21000, 21003))
    monkeypatch.setattr(ports, "_is_free", lambda port: port == 21001)
    with reserved_port(tmp_path) as port:
        assert port == 21001
