"""A signal is heard once in good order, whatever Python is doing when it comes."""

import atexit
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.command import run_flow
from flows.interrupts import Interrupts
from flows.service import Service

DROPPED = "ignore::pytest.PytestUnraisableExceptionWarning"


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    listening = Interrupts()
    listening.listen()
    yield listening
    atexit.unregister(listening._leave)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_first_signal_is_an_interrupt(interrupts: Interrupts) -> None:
    interrupts.hear_again()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


class _Dropping:
    """Signals this process where Python drops what a handler raises."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def _import_a_flow() -> Any:
    _Dropping()


@pytest.mark.filterwarnings(DROPPED)
def test_one_that_came_within_a_finalizer_which_python_drops_is_heard_later(interrupts: Interrupts) -> None:
    _Dropping()
    with pytest.raises(KeyboardInterrupt):
        interrupts.hear_again()


@pytest.mark.filterwarnings(DROPPED)
def test_one_that_was_dropped_is_heard_while_a_server_comes_up(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("flows.service.interrupts", interrupts)
    service = Service("It", ["sleep", "60"], dict(os.environ), tmp_path / "log", "http://127.0.0.1:9/")
    service.start()
    try:
        _Dropping()
        with pytest.raises(KeyboardInterrupt):
            service.wait_until_ready()
    finally:
        service.close()


@pytest.mark.filterwarnings(DROPPED)
def test_one_that_was_dropped_while_the_flow_was_imported_begins_no_run(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.command.interrupts", interrupts)
    with pytest.raises(KeyboardInterrupt):
        run_flow(None, _import_a_flow, ["a-run"], logging.getLogger("of-the-run"))


_ENDING = """
import atexit, sys, threading, time
from flows.interrupts import interrupts

class Late:
    def __del__(self):
        print("taken apart")

def work():
    time.sleep(0.2)
    print("thread")

interrupts.listen()
late = Late()
atexit.register(print, "handler")
threading.Thread(target=work).start()
interrupts.end(3)
"""


def _ended(program: str) -> tuple[int, list[str]]:
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=30, check=False)
    return ended.returncode, ended.stdout.split()


def test_a_command_ends_with_its_exit_code_when_all_is_said_and_takes_nothing_apart() -> None:
    assert _ended(_ENDING) == (3, ["thread", "handler"])


def test_whoever_only_listens_ends_as_python_does() -> None:
    listening = _ENDING.replace("interrupts.end(3)", "sys.exit(4)")
    assert _ended(listening) == (4, ["thread", "handler", "taken", "apart"])
