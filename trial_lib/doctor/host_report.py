"""Writes this host's devices and their state as JSON. It is its own process, because a hanging driver blocks it."""

import json
import os

from trial_lib.doctor.devices import DevicesFound
from trial_lib.wire.errors import InputError


def main(arguments: list[str]) -> None:
    """Writes `DevicesFound`, or the parts of an InputError, to a file descriptor."""
    try:
        answer = DevicesFound.here().to_json()
    except InputError as error:
        answer = {"error": {"what": error.what, "where": error.where, "remedy": error.remedy}}
    with os.fdopen(int(arguments[0]), "w") as file:
        file.write(json.dumps(answer))
