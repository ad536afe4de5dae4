"""What devices this host has, and how they are, as JSON. In a process of its own: a driver that hangs holds it up."""

import json
import os

from trial_lib.doctor.devices import DevicesFound
from trial_lib.wire.errors import InputError


def main(arguments: list[str]) -> None:
    """Writes to the file descriptor that is named: `DevicesFound`, or the parts of an InputError."""
    try:
        answer = DevicesFound.here().to_json()
    except InputError as error:
        answer = {"error": {"what": error.what, "where": error.where, "remedy": error.remedy}}
    with os.fdopen(int(arguments[0]), "w") as file:
        file.write(json.dumps(answer))
