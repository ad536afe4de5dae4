"""A trial's ranks keep their place, whatever the program's code says: where they meet, and on which devices they train.

A program may have a port or the number of a GPU in its code. That works for one training on a host. Two trials at once
need two ports, and other GPUs.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import torch

from trial_lib.intercept.rank_place import ADDRESS, DEVICES, NUMBERING, PORT
from trial_lib.intercept.stand_in import stand_in

# Not the numbers of ranks: `own_ranks` refuses a program that changes them to what cannot be.
_KEPT = (ADDRESS, PORT, *DEVICES, *NUMBERING)
_HIDES_ALL = ("", "-1")


def install(note_devices: Callable[[str], None]) -> None:
    """Makes the environment keep the rank's place. Call it before the program runs.

    Args:
        note_devices: called with an assignment by which the program's code names devices.
    """
    own = {name: os.environ[name] for name in _KEPT if name in os.environ}
    os.environ.__class__ = _keeping(own, note_devices)
    if ADDRESS in own and PORT in own:
        _meet_at(own)


def _keeping(own: Mapping[str, str], note_devices: Callable[[str], None]) -> type:
    base: Any = type(os.environ)

    class Environment(base):  # type: ignore[misc]
        """The environment of a rank. A variable of its place is neither changed nor removed."""

        def __setitem__(self, name: str, value: str) -> None:
            if name not in own:
                super().__setitem__(name, value)
            elif name in DEVICES and value != own[name]:
                note_devices(f"{name}={value}")
                for each in DEVICES:
                    if each in own:
                        super().__setitem__(each, own_devices(value, own[each]))
            else:
                super().__setitem__(name, own[name])

        def __delitem__(self, name: str) -> None:
            if name not in own:
                super().__delitem__(name)

        def _others(self) -> Iterator[str]:
            return (name for name in self if name not in own)

        def popitem(self) -> tuple[str, str]:
            name = next(self._others(), None)
            if name is None:
                raise KeyError("the environment is empty")
            return name, self.pop(name)

        def clear(self) -> None:
            for name in self._others():
                del self[name]

    return Environment


def own_devices(named: str, own: str) -> str:
    """Returns the devices that a program means, among those of its rank.

    Args:
        named: the program's value of CUDA_VISIBLE_DEVICES. Its numbers count the trial's devices from 0, as on a host
            that has no others.
        own: the rank's value. It stays as it is if the program names a device that the trial has not.

    Example:
        >>> own_devices("1", "6,7"), own_devices("0,1,2,3", "6,7"), own_devices("", "6,7")
        ('7', '6,7', '')
    """
    if named.strip() in _HIDES_ALL:
        return named
    devices = own.split(",")
    chosen = [_device(each.strip(), devices) for each in named.split(",")]
    return own if None in chosen else ",".join(filter(None, chosen))


def _device(named: str, devices: list[str]) -> str | None:
    if named.isdecimal():
        return devices[int(named)] if int(named) < len(devices) else None
    return named if named in devices else None


def _meet_at(own: Mapping[str, str]) -> None:
    original = torch.distributed.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        """Replaces `torch.distributed.init_process_group`."""
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("store") is None:
            bound.arguments["init_method"] = own_method(bound.arguments.get("init_method"), own)
        return original(*bound.args, **bound.kwargs)

    stand_in("init_process_group", original, init_process_group)


def own_method(method: str | None, own: Mapping[str, str]) -> str | None:
    """Returns how the ranks find each other: as the program says, but at their own address.

    Args:
        method: `init_method` of the program. A file, too, may be one that another trial uses.
        own: `MASTER_ADDR` and `MASTERPORT` of the rank.

    Example:
        >>> own_method("tcp://10.0.0.1:23456?rank=0", {"MASTER_ADDR": "127.0.0.1", "MASTERPORT": "29501"})
        'tcp://127.0.0.1:29501?rank=0'
    """
    if method is None or method.startswith("env://"):
        return method
    address = f"[{own[ADDRESS]}]" if ":" in own[ADDRESS] else own[ADDRESS]
    query = urlsplit(method).query
    return f"tcp://{address}:{own[PORT]}" + (f"?{query}" if query else "")
