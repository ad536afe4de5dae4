"""The ranks of a trial meet at the trial's own address, whatever the program's code says.

A program may have a port in its code. That works for one training on a host, and not for two trials at once.
"""

import functools
import inspect
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import torch

from trial_lib.intercept.stand_in import stand_in

_ADDRESS, _PORT = "MASTER_ADDR", "MASTER_PORT"


def install() -> None:
    """Makes process groups form at the address in the rank's environment. Call it before the program runs."""
    place = {name: os.environ[name] for name in (_ADDRESS, _PORT) if name in os.environ}
    if len(place) == len((_ADDRESS, _PORT)):
        _replace(place)


def _replace(place: Mapping[str, str]) -> None:
    original = torch.distributed.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        """Replaces `torch.distributed.init_process_group`."""
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("store") is None:
            os.environ.update(place)
            bound.arguments["init_method"] = own_method(bound.arguments.get("init_method"), place)
        return original(*bound.args, **bound.kwargs)

    stand_in("init_process_group", original, init_process_group)


def own_method(method: str | None, place: Mapping[str, str]) -> str | None:
    """Returns how the ranks find each other: as the program says, but at their own address.

    Args:
        method: `init_method` of the program. A file, too, may be one that another trial uses.
        place: `MASTER_ADDR` and `MASTER_PORT` of the trial.

    Example:
        >>> own_method("tcp://10.0.0.1:23456?rank=0", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"})
        'tcp://127.0.0.1:29501?rank=0'
    """
    if method is None or method.startswith("env://"):
        return method
    address = f"[{place[_ADDRESS]}]" if ":" in place[_ADDRESS] else place[_ADDRESS]
    query = urlsplit(method).query
    return f"tcp://{address}:{place[_PORT]}" + (f"?{query}" if query else "")
