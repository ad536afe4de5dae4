"""The thread that starts the command's own Prefect server again."""

import threading

import pytest

from zerotune.flows import prefect_server
from zerotune.flows.prefect_server import PrefectServer


class _Service:
    """A dead server that a full host does not let start at first."""

    is_running = False
    starts = 0

    def answers(self) -> bool:
        return self.is_running

    def start(self) -> None:
        self.starts += 1
        if self.starts < 3:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.is_running = True


def test_a_start_that_the_host_refuses_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefect_server, "_KEEP_S", 0.001)
    server, service = PrefectServer.__new__(PrefectServer), _Service()
    server._service, server._lock, server._closing = service, threading.Lock(), threading.Event()
    keeper = threading.Thread(target=server._keep, daemon=True)
    keeper.start()
    keeper.join(0.5)
    assert service.starts == 3
    server._closing.set()
    keeper.join(5)
    assert not keeper.is_alive()
