"""The hosts that one trial spans."""

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import replace

import psutil

from trial_lib.device.host.base import Host
from trial_lib.wire.errors import InputError


def is_this_host(name: str) -> bool:
    """Returns whether a name or an address in a hostfile means this machine."""
    own = socket.gethostname()
    if name == "localhost" or name.partition(".")[0] == own.partition(".")[0]:
        return True
    with contextlib.suppress(OSError, ValueError):
        address = ipaddress.ip_address(socket.gethostbyname(name))
        return address.is_loopback or str(address) in _own_addresses()
    return False


def _own_addresses() -> set[str]:
    return {address.address for listed in psutil.net_if_addrs().values() for address in listed}


def spanned(host: Host, hosts: Mapping[str, int], where: str) -> Host:
    """Returns the slots of all hosts that a trial spans, as if one host had them.

    ZeroTune assumes that the other hosts have the devices of this one, as DeepSpeed does.

    Args:
        host: this host.
        hosts: the slots of each host by its name, in the order of the ranks.
        where: the place that errors name.

    Raises:
        InputError: the first host is another one, or this host has fewer slots than the hosts' list gives it.
    """
    first = next(iter(hosts))
    if not is_this_host(first):
        raise InputError(
            f"the first host is {first}, and a search runs on that one; this is {socket.gethostname()}.",
            where=where,
            remedy=f"Run zerotune on {first}, or name this host first.",
        )
    own = sum(slots for name, slots in hosts.items() if is_this_host(name))
    if own > len(host.slots):
        raise InputError(
            f"{own} slots are asked of this host, which has {len(host.slots)} {host.device} slot(s).",
            where=where,
            remedy=f"Name at most {len(host.slots)}.",
        )
    here = iter(host.slots)
    slots = [
        next(here) if is_this_host(name) else f"{name}/{number}"
        for name, count in hosts.items()
        for number in range(count)
    ]
    return replace(host, slots=slots)
