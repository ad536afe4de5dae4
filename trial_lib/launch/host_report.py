"""What devices this host has, and which driver, as JSON. In a process of its own: a driver that hangs holds it up."""

import dataclasses
import json
import os

from trial_lib.device.host.nvml import driver_version
from trial_lib.device.host.this_host import this_host
from trial_lib.experiment.errors import InputError


def main(arguments: list[str]) -> None:
    """Writes to the file descriptor that is named: `host` and `driver`, or the parts of an InputError."""
    try:
        answer = {"host": dataclasses.asdict(this_host()), "driver": driver_version()}
    except InputError as error:
        answer = {"error": {"what": error.what, "where": error.where, "remedy": error.remedy}}
    with os.fdopen(int(arguments[0]), "w") as file:
        file.write(json.dumps(answer))
