"""Asks the user's DeepSpeed about a configuration before any trial. The fork server has imported DeepSpeed anyway.

A fork judges the configuration, or a process of its own.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
from dataclasses import asdict
from typing import Any

from trial_lib.launch.processes import channel, rank_process

CHECK, CHECKED = "check", "checked"
"""The keys of a request and of its answer."""

# A judgement takes milliseconds. The import of DeepSpeed, if it comes first, takes seconds.
_DEADLINE_S = 120

Judgement = dict[str, Any]
"""The version as `deepspeed`, and `refusals` with the fields of `deepspeed_refusals.Refusal`."""


def judge(request: dict[str, Any]) -> Judgement:
    import deepspeed

    from trial_lib.deepspeed_config.refusals import refusals_of

    refusals = refusals_of(request["ds_config"], request["slots"])
    return {"deepspeed": deepspeed.__version__, "refusals": [asdict(refusal) for refusal in refusals]}


def answer_waiting(driver: socket.socket, is_fit_to_fork: bool) -> None:
    """Answers a request that came while DeepSpeed was imported. Does nothing without a request."""
    if not select.select([driver], [], [], 0)[0]:
        return
    received = channel.receive(driver)
    if received is None:
        raise ConnectionError("the driver is gone")
    answer(driver, received[0][CHECK], is_fit_to_fork)


def answer(driver: socket.socket, request: dict[str, Any], is_fit_to_fork: bool) -> None:
    """Sends the driver a judgement. It is None if this process must not fork, or if the fork has failed."""
    channel.send(driver, {CHECKED: _judged_in_a_fork(request) if is_fit_to_fork else None})


def _judged_in_a_fork(request: dict[str, Any]) -> Judgement | None:
    read, write = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _end_in_time(parent)
        try:
            os.close(read)
            with open(write, "w", encoding="utf-8") as pipe:  # noqa: PTH123 - a pipe
                json.dump(judge(request), pipe, default=str)
        finally:
            os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as pipe:  # noqa: PTH123 - a pipe
        judged = pipe.read()
    # The server's housekeeping may have waited for it already.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    return json.loads(judged) if judged else None


def _end_in_time(parent: int) -> None:
    rank_process.die_with_parent(parent)
    signal.alarm(_DEADLINE_S)


def main(arguments: list[str]) -> None:
    """Entry: reads a request from standard input, and writes the judgement to a descriptor."""
    _end_in_time(os.getppid())
    judgement = judge(json.load(sys.stdin))
    with open(int(arguments[0]), "w", encoding="utf-8") as pipe:  # noqa: PTH123 - a pipe
        json.dump(judgement, pipe, default=str)
