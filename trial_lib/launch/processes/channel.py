"""Messages between the driver, the fork server and the guards. A message is JSON behind its length, and descriptors.

Runs in the user's environment, so it needs the standard library only.
"""

import json
import os
import socket
import struct
from typing import Any

KEEPER = "keeper"
"""The key of the first message of a trial's processes: the process id of their guard's keeper."""

LEAVINGS = "leavings"
"""A key of their last message: the shared memory that they have left."""

_LENGTH = struct.Struct("!I")
_MOST_DESCRIPTORS = 253  # the most that the kernel transfers at once


def send(channel: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Sends one message. An `OSError` means that the other end is gone."""
    body = json.dumps(message).encode()
    header = _LENGTH.pack(len(body))
    if descriptors:
        socket.send_fds(channel, [header], list(descriptors))
    else:
        channel.sendall(header)
    channel.sendall(body)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Returns the next message and its file descriptors. None if the other end has closed."""
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
