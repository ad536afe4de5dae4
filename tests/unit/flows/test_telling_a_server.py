"""Telling Prefect: when its server counts as away, and how long one that hangs may hold up a study."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pytest
from prefect.settings import PREFECT_API_REQUEST_TIMEOUT, PREFECT_CLIENT_MAX_RETRIES

from zerotune.tasks import results, telling
from zerotune.tasks.results import Progress
from zerotune.tasks.telling import is_of_server, say_once, told_if_possible

LOG = logging.getLogger("telling")


@pytest.fixture
def away() -> Iterator[None]:
    """A server that nobody has told anything yet; afterwards it is there again."""
    yield
    telling._Server.is_away, telling._Server.patient_at, telling._Server.is_said = False, 0.0, False


def tell() -> tuple[int, float]:
    """Tells a server that hangs; returns the retries and the seconds that the client had for it."""
    with told_if_possible(LOG):
        given = PREFECT_CLIENT_MAX_RETRIES.value(), PREFECT_API_REQUEST_TIMEOUT.value()
        raise httpx.ReadTimeout("")
    return given


def answered(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("", request=httpx.Request("GET", "http://x"), response=httpx.Response(status))


def test_a_server_is_away_where_a_proxy_says_so_and_not_where_it_refuses() -> None:
    assert is_of_server(httpx.ConnectError(""))
    assert is_of_server(answered(502))
    assert not is_of_server(answered(422))
    assert not is_of_server(ValueError())


def test_a_server_that_hangs_is_given_its_time_only_now_and_then(away: None, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(telling.time, "monotonic", lambda: now)
    assert tell() == (1, 10.0)
    assert tell() == (0, 0.5)
    now += 31
    assert tell() == (0, 10.0)
    assert tell() == (0, 0.5)


def test_people_are_told_once_that_a_server_is_away_until_it_answers_again(
    away: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    tell()
    tell()
    say_once(LOG, "not recorded")
    with told_if_possible(LOG):
        pass
    tell()
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 2
    assert all("does not answer" in sentence for sentence in warned)
    assert "not recorded" in caplog.text


def test_a_search_that_began_while_the_server_was_away_has_its_bar_when_it_is_back(
    away: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    errors: list[Exception] = [httpx.ConnectError(""), answered(422)]

    def tables() -> None:
        told.append("table")

    def creates() -> Any:
        if errors:
            raise errors.pop(0)
        told.append("bar")
        return SimpleNamespace(id=uuid4())

    def updates(*_: Any, **__: Any) -> None:
        told.append("update")

    monkeypatch.setattr(results, "_begin_search", lambda: None)
    monkeypatch.setattr(results, "TableArtifact", lambda **_: SimpleNamespace(create=tables))
    monkeypatch.setattr(results, "ProgressArtifact", lambda **_: SimpleNamespace(create=creates))
    monkeypatch.setattr(results, "update_progress_artifact", updates)
    state = SimpleNamespace(results={}, candidates={}, searched=1)
    setup = SimpleNamespace(arguments=SimpleNamespace(max_trials=8))
    driver: Any = SimpleNamespace(log=LOG, state=state, setup=setup, metric="throughput")
    shown = Progress(driver)
    for _ in range(4):
        shown.finish()
    assert told == ["table", "table", "table", "bar", "table", "update"]
