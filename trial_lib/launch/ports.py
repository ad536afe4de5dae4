"""Ports for trials that run at the same time on one host."""

import contextlib
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

# Below the range that the kernel gives to outgoing connections (32768 and up).
_PORTS = range(21000, 31000)


@contextlib.contextmanager
def reserved_port(lock_dir: Path) -> Iterator[int]:
    """Yields a free port that no other trial on this host is given meanwhile.

    Raises:
        OSError: none of ten thousand is free.
    """
    lock_dir.mkdir(parents=True, exist_ok=True)
    # From a random one on: another user of this host has locks of their own, and asks for ports as well.
    first = secrets.randbelow(len(_PORTS))
    for port in (*_PORTS[first:], *_PORTS[:first]):
        lock = FileLock(lock_dir / f"port-{port}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        try:
            if _is_free(port):
                yield port
                return
        finally:
            lock.release()
    raise OSError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
