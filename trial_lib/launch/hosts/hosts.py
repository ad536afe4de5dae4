"""The hosts that one trial spans, as the experiment names them."""

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import replace

import psutil

from trial_lib.device.host.base import Host
from trial_lib.wire.errors import InputError


def is_this_host(name: str) -> bool:
    """Returns whether a name or an address in a hostfile is this machine's."""
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
    """Returns the slots of all hosts that a trial spans, as one host's.

    The others are taken to have the same devices as this one, as DeepSpeed takes them.

    Args:
        host: this one.
        hosts: the slots of each host by its name, in the order of their ranks.
        where: how an error names the place that names them.

    Raises:
        InputError: the first of them is not this one, or it has fewer slots than it is said to.
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
