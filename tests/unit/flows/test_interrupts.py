"""A signal is heard once in good order, whatever Python is doing when it comes."""

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from flows.interrupts import Interrupts


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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_that_came_within_a_finalizer_which_python_drops_is_heard_later(interrupts: Interrupts) -> None:
    class Dropping:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    Dropping()
    with pytest.raises(KeyboardInterrupt):
        interrupts.hear_again()


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
