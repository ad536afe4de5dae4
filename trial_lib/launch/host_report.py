"""What devices this host has, and which driver, as JSON. In a process of its own: a driver that hangs holds it up."""

import dataclasses
import json
import os

import pynvml

from trial_lib.device.host.this_host import this_host
from trial_lib.experiment.errors import InputError


def nvidia_driver() -> str | None:
    """Returns the version of the NVIDIA driver; None without one."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def main(arguments: list[str]) -> None:
    """Writes to the file descriptor that is named: `host` and `driver`, or the parts of an InputError."""
    try:
        answer = {"host": dataclasses.asdict(this_host()), "driver": nvidia_driver()}
    except InputError as error:
        answer = {"error": {"what": error.what, "where": error.where, "remedy": error.remedy}}
    with os.fdopen(int(arguments[0]), "w") as file:
        file.write(json.dumps(answer))
