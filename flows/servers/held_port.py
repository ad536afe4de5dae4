"""A port that stays this process's own while its server is starting, or starting again."""

import socket
from types import TracebackType

LOOPBACK = "127.0.0.1"


class HeldPort:
    """A port of loopback at which no process can listen but those that are handed its socket.

    Another user could otherwise listen there while the server is not up. Clients would then send the credential to
    that user's server, and a worker would run what it asks for.

    Args:
        port: its number.

    Attributes:
        number: of the port.
        url: the address of a server there.

    Raises:
        OSError: another process has the port.
    """

    def __init__(self, port: int) -> None:
        self.number, self.url = port, f"http://{LOOPBACK}:{port}"
        self._socket = socket.socket()
        try:
            # Connections of an earlier server may linger. Afterwards nobody may share the port.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((LOOPBACK, port))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError:
            self._socket.close()
            raise

    @property
    def descriptor(self) -> int:
        """The descriptor of the socket, for a server: see `HandedSocket`."""
        return self._socket.fileno()

    @property
    def is_listening(self) -> bool:
        """Whether a server listens at this socket. No other socket of the port can listen meanwhile."""
        return bool(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

    def refuse(self) -> None:
        """Refuses connections until the next server listens. Without this they would wait for it."""
        # First, because others could bind the port while this socket neither listens nor forbids it.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        # A socket that is shut down before it listens would never accept.
        if self.is_listening:
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the port back."""
        self._socket.close()

    def __enter__(self) -> "HeldPort":
        """Returns it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Gives the port back."""
        self.close()


class HandedSocket(socket.socket):
    """The socket of a held port, in the server that has been handed its descriptor."""

    def listen(self, *backlog: int) -> None:
        """Listens, although connections of an earlier server may linger."""
        # Not sooner. While this is set and the socket does not listen, others can bind the port, and listen there.
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        super().listen(*backlog)
