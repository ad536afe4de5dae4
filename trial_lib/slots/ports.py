"""Ports for trials that run at the same time on one host."""

import contextlib
import secrets
import socket
from collections.abc import Iterator

# Below the kernel's range for outgoing connections (32768 and up).
_PORTS = range(21000, 31000)
# A name that one socket at a time can have, of any user in this network namespace. The kernel frees it with the socket.
_NAME = "\0zerotune-port-{}"


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a free port that no other trial of any user on this host gets meanwhile.

    Raises:
        OSError: none of ten thousand is free.
    """
    first = secrets.randbelow(len(_PORTS))
    for port in (*_PORTS[first:], *_PORTS[:first]):
        with socket.socket(socket.AF_UNIX) as name:
            if _binds(name, _NAME.format(port)) and _is_free(port):
                yield port
                return
    raise OSError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def _binds(name: socket.socket, address: str) -> bool:
    with contextlib.suppress(OSError):
        name.bind(address)
        return True
    return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
