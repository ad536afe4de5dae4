"""A signal is heard once in good order, whatever Python is doing when it comes."""

import os
import signal
from collections.abc import Iterator

import pytest

from flows.interrupts import Interrupts


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    listening = Interrupts()
    listening.listen()
    yield listening
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
