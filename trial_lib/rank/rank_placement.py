"""A trial's ranks keep their place, whatever the program's code says: where they meet, and on which devices they train.

A program may have a port or the number of a GPU in its code. That works for one training on a host. Two trials at once
need two ports, and other GPUs.
"""

import _collections_abc
import functools
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import torch

from zerotune.trial_lib.rank.patching import put, stand_in
from zerotune.trial_lib.rank.user_program import may_be_of_the_user

ADDRESS, PORT = "MASTER_ADDR", "MASTER_PORT"  # where the ranks meet
# The devices that a rank finds. HIP reads both, and its own first.
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
NUMBERING = ("CUDA_DEVICE_ORDER", "ROCR_VISIBLE_DEVICES")  # what decides how CUDA and HIP number the devices
PLACE = (ADDRESS, PORT, *DEVICES, *NUMBERING, "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # all of them


# Not the numbers of ranks: `early_finish` refuses a program that changes them to what cannot be.
_KEPT = (ADDRESS, PORT, *DEVICES, *NUMBERING)
_HIDES_ALL = ("", "-1")
# Code that stands between the environment and who reads it.
_OF_MAPPINGS = (__file__, os.__file__, _collections_abc.__file__, "<frozen os>", "<frozen _collections_abc>")


def install(note_devices: Callable[[str], None]) -> None:
    """Makes the environment keep the rank's place.

    `note_devices` gets an assignment by which the code names devices.
    """
    own = {name: os.environ[name] for name in _KEPT if name in os.environ}
    place = RankPlacement(own, note_devices)
    put(os.environ, "__class__", place.environment())
    if ADDRESS in own and PORT in own:
        _meet_at(place)


class RankPlacement:
    """The place of a rank, which the variables `own` describe."""

    def __init__(self, own: Mapping[str, str], note_devices: Callable[[str], None]) -> None:
        self.own = own
        self._note_devices = note_devices
        self._has_met = False
        # Values of the devices that the program may have read. It may set one of them again.
        self._given = {own[name] for name in DEVICES if name in own}
        self._was_read = False

    def meets(self) -> dict[str, str]:
        """The variables of the place at which the ranks meet. Afterwards the program may change them.

        A child of the program's may form a group of its own then, at another port.
        """
        self._has_met = True
        return {name: self.own[name] for name in (ADDRESS, PORT)}

    def is_kept(self, name: str) -> bool:
        return name in self.own and not (self._has_met and name in (ADDRESS, PORT))

    def note_reading(self, name: str, reader: str) -> None:
        """Notes that code of a file reads a variable, which counts if the file is the program's."""
        self._was_read |= name in DEVICES and may_be_of_the_user(reader)

    def set_to(self, name: str, value: str) -> dict[str, str]:
        if name not in DEVICES:
            return {name: self.own[name]}
        names = [each for each in DEVICES if each in self.own]
        if value == self.own[name]:
            return {each: self.own[each] for each in names}
        if value in self._given:
            return dict.fromkeys(names, value)
        if self.own[name] not in _HIDES_ALL:
            self._note_devices(f"{name}={value}")
        meant = {each: own_devices(value, self.own[each], self._was_read) for each in names}
        self._given.update(meant.values())
        return meant

    def environment(self) -> type:
        place, base = self, type(os.environ)

        class Environment(base):  # type: ignore[misc, valid-type]
            # A variable of the rank's place is neither changed nor removed.

            def __getitem__(self, name: str) -> str:
                if name in DEVICES:
                    place.note_reading(name, _reader())
                return str(super().__getitem__(name))

            def __setitem__(self, name: str, value: str) -> None:
                if not place.is_kept(name) or not isinstance(value, str):
                    super().__setitem__(name, value)
                    return
                for each, kept in place.set_to(name, value).items():
                    super().__setitem__(each, kept)

            def __delitem__(self, name: str) -> None:
                if place.is_kept(name):
                    self[name] = place.own[name]
                else:
                    super().__delitem__(name)

            def _others(self) -> Iterator[str]:
                return (name for name in self if not place.is_kept(name))

            def popitem(self) -> tuple[str, str]:
                name = next(self._others(), None)
                if name is None:
                    raise KeyError("the environment is empty")
                return name, self.pop(name)

            def clear(self) -> None:
                for name in self._others():
                    del self[name]

        return Environment


def _reader() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _OF_MAPPINGS:
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


def own_devices(named: str, own: str, was_read: bool = False) -> str:
    """The devices that a program means by its CUDA_VISIBLE_DEVICES, among its rank's own.

    The numbers count the trial's devices from 0, as on a host that has no others. If the program has read the rank's
    value, names that are in there mean themselves. The value stays if the program names a device that the trial has
    not.

    >>> own_devices("1", "6,7"), own_devices("0,1,2,3", "6,7"), own_devices("", "6,7")
    ('7', '6,7', '')
    >>> own_devices("2", "1,2", was_read=True)
    '2'
    """
    names = [each.strip() for each in named.split(",")]
    # As CUDA reads a list: what is behind a negative number does not count.
    names = list(itertools.takewhile(lambda each: not each.startswith("-"), filter(None, names)))
    if not names:
        return named
    devices = own.split(",")
    if was_read and set(names) <= {*devices}:
        return ",".join(names)
    chosen = [_device(each, devices) for each in names]
    return own if None in chosen else ",".join(filter(None, chosen))


def _device(named: str, devices: list[str]) -> str | None:
    if named.isdecimal():
        return devices[int(named)] if int(named) < len(devices) else None
    return named if named in devices else None


def _meet_at(place: RankPlacement) -> None:
    original = torch.distributed.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get("store") is None:
            os.environ.update(place.meets())
            bound.arguments["init_method"] = own_method(bound.arguments.get("init_method"), place.own)
        return original(*bound.args, **bound.kwargs)

    stand_in("init_process_group", original, init_process_group)


def own_method(method: str | None, own: Mapping[str, str]) -> str | None:
    """The program's `init_method` at the ranks' own address. Its file, too, may be one that another trial uses.

    >>> own_method("tcp://10.0.0.1:23456?rank=0", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"})
    'tcp://127.0.0.1:29501?rank=0'
    """
    if method is None or method.startswith("env://"):
        return method
    address = f"[{own[ADDRESS]}]" if ":" in own[ADDRESS] else own[ADDRESS]
    query = urlsplit(method).query
    return f"tcp://{address}:{own[PORT]}" + (f"?{query}" if query else "")
