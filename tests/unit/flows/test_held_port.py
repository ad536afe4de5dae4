"""A port of `zerotune up` is nobody else's while its server starts, runs, or starts again."""

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from zerotune.flows.own_server import HandedSocket
from zerotune.flows.prefect_server import HeldPort


@pytest.fixture
def port() -> Iterator[HeldPort]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    with contextlib.closing(HeldPort(number)) as port:
        yield port


def another_listens(port: HeldPort, *, options: tuple[int, ...], address: str) -> bool:
    with socket.socket() as other:
        for option in options:
            other.setsockopt(socket.SOL_SOCKET, option, 1)
        with contextlib.suppress(OSError):
            other.bind((address, port.number))
            other.listen()
            return True
    return False


def is_ours(port: HeldPort) -> bool:
    ways = ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT))
    return not any(another_listens(port, options=way, address=address) for way in ways for address in ("127.0.0.1", ""))


def is_refused(port: HeldPort) -> bool:
    with contextlib.suppress(ConnectionRefusedError), connected(port):
        return False
    return True


def connected(port: HeldPort) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port.number), timeout=5)


def test_no_other_process_can_listen_there_before_between_and_after_its_servers(port: HeldPort) -> None:
    assert is_ours(port)
    assert is_refused(port)
    for _ in range(2):
        port.refuse()
        server = HandedSocket(fileno=os.dup(port.descriptor))
        # A server imports and starts for seconds before it listens.
        assert is_ours(port)
        assert not port.is_listening
        server.listen()
        assert port.is_listening
        assert is_ours(port)
        with connected(port) as client, server.accept()[0] as served:
            served.sendall(b"here")
            assert client.recv(4) == b"here"
        # As the kernel closes it when the server is killed. Connections would wait for the next one.
        server.close()
        port.refuse()
        assert is_ours(port)
        assert is_refused(port)
    port.close()
    assert not is_ours(port)


def test_a_port_of_another_process_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(OSError, match="in use"),
    ):
        HeldPort(other.getsockname()[1])
