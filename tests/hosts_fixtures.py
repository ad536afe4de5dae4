"""Loopback addresses that stand for hosts: what the tests of trials over several hosts share."""

import psutil
from study_fixtures import words_of

HOSTS = {"127.0.0.1": 1, "127.0.0.2": 1}


def part_of(host_number: int) -> list[psutil.Process]:
    """Returns all that one of the hosts runs below this process: its guard, DeepSpeed's launcher there, its ranks."""
    parts: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        command = words_of(process)
        if "deepspeed.launcher.runner" in command and command[command.index("--node_rank") + 1] == str(host_number):
            parts += [process, *process.children(recursive=True), *_guards_above(process)]
    return parts


def _guards_above(process: psutil.Process) -> list[psutil.Process]:
    return [above for above in process.parents() if "host-part" in words_of(above)]
