"""Ports for trials that run at the same time on one host."""

import contextlib
import fcntl
import os
import secrets
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from trial_lib.slots.lock_files import hold_folder, lock_file

# Below the kernel's range for outgoing connections (32768 and up).
_PORTS = range(21000, 31000)


@contextlib.contextmanager
def reserved_port(lock_dir: Path) -> Iterator[int]:
    """Yields a free port that no other trial on this host gets meanwhile.

    Raises:
        OSError: none of ten thousand is free.
    """
    with contextlib.ExitStack() as held:
        held.callback(os.close, hold_folder(lock_dir))
        # One file for all ports. Its byte N is the lock of port N, because ten thousand files would stay
        # behind.
        descriptor = lock_file(lock_dir / "ports.lock", fcntl.LOCK_SH)
        held.callback(os.close, descriptor)
        # The search starts at a random port. Another user of this host has other locks, but needs ports as
        # well.
        first = secrets.randbelow(len(_PORTS))
        for port in (*_PORTS[first:], *_PORTS[:first]):
            if _lock(descriptor, port) and _is_free(port):
                yield port
                return
    raise OSError(f"no free port between {_PORTS.start} and {_PORTS.stop}")


def _lock(descriptor: int, port: int) -> bool:
    """Returns whether a port's lock was free. It is held until the descriptor is closed, or its process dies."""
    # struct flock: the lock belongs to the open file and not to the process, so that threads exclude each other
    # too.
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, port, 1, 0)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, request)
    except BlockingIOError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
