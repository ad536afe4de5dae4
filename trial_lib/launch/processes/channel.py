"""Messages between the driver, the fork server and the guards: JSON with a length before it, and file descriptors.

Standard library only: it runs in the user's environment.
"""

import json
import os
import socket
import struct
from typing import Any

KEEPER = "keeper"
"""What the first message of a trial's processes names: the process id of their guard's keeper."""

LEAVINGS = "leavings"
"""What their last message names, beside how they ended: the shared memory that they have left."""

_LENGTH = struct.Struct("!I")
_MOST_DESCRIPTORS = 253  # that the kernel lets travel at once


def send(channel: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Sends one message.

    Raises:
        OSError: the other end is gone.
    """
    body = json.dumps(message).encode()
    header = _LENGTH.pack(len(body))
    if descriptors:
        socket.send_fds(channel, [header], list(descriptors))
    else:
        channel.sendall(header)
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Returns the next message and its file descriptors; None when the other end has closed."""
    header, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, _MOST_DESCRIPTORS)
    try:
        while 0 < len(header) < _LENGTH.size:
            header = header + _some(channel, _LENGTH.size - len(header))
        if not header:
            return None
        body = bytearray()
        (length,) = _LENGTH.unpack(header)
        while len(body) < length:
            body += _some(channel, length - len(body))
    except EOFError:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    return json.loads(body), list(descriptors)


def _some(channel: socket.socket, most: int) -> bytes:
    data = channel.recv(most)
    if not data:
        raise EOFError
    return data
