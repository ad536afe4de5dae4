"""What the kernel shows of a process is read whatever the process is called."""

import ctypes
import threading
from collections.abc import Iterator

import pytest

from zerotune.trial_lib.launch.processes import watchdog
from zerotune.trial_lib.rank import device, early_finish

_SET_NAME, _GET_NAME = 15, 16
# As long as a name may be: in the middle of a character.
_CUT = "mein-größter-Lauf".encode()[:15].replace(b"t", b"\xc3")


@pytest.fixture(autouse=True)
def named() -> Iterator[None]:
    """Has this thread, which the process is called by, go by a name that is no text."""
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(16)
    libc.prctl(_GET_NAME, before)
    libc.prctl(_SET_NAME, _CUT)
    yield
    libc.prctl(_SET_NAME, before)


def test_memory_is_measured() -> None:
    assert device.own_bytes("VmRSS") > 0


def test_the_sleeps_of_a_thread_are_counted() -> None:
    assert early_finish._sleeps(threading.main_thread()) > 0


def test_a_process_is_seen_to_run() -> None:
    assert not watchdog.is_stopped(threading.main_thread().native_id or 0)
