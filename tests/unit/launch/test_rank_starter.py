"""How the end of a trial's processes is told."""

import socket

import pytest

from zerotune.trial_lib.launch.processes import channel
from zerotune.trial_lib.launch.rank_starter import GUARD, Launched, ProcessesEnd


@pytest.fixture
def ends() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def test_the_last_message_says_how_a_trial_ended(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    channel.send(theirs, {channel.WATCHDOG: 0})
    left = {"removed": {"psm_1": 5}}
    channel.send(theirs, {"ended_by": "ranks", "statuses": [0, 1], "shared_memory": left})
    assert Launched(ours, 2).wait() == ProcessesEnd("ranks", [0, 1], shared_memory=left)
    theirs.close()


def test_processes_that_are_gone_without_a_last_message_were_ended_with_their_guard(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = ends
    channel.send(theirs, {channel.WATCHDOG: 0})
    theirs.close()
    assert Launched(ours, 2).wait() == ProcessesEnd(GUARD, [None, None])


def test_a_connection_that_is_reset_tells_the_same(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    # What the other end has not read when it closes resets the connection.
    ours.sendall(b"unread")
    channel.send(theirs, {channel.WATCHDOG: 0})
    theirs.close()
    assert Launched(ours, 2).wait() == ProcessesEnd(GUARD, [None, None])
