"""A flow's run against a server: how long its end may take, and where Prefect's own lines go."""

import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerotune.flows.flow_run import _Kept, ended_in_time, keep_lines_of_prefect


def test_what_is_left_when_all_is_done_is_waited_for_no_longer_than_the_limit() -> None:
    hangs = threading.Event()
    began = time.monotonic()
    try:
        assert not ended_in_time(lambda: void(hangs.wait(60)), lambda: time.monotonic() > began + 0.3, limit_s=0.2)
    finally:
        hangs.set()
    assert 0.5 <= time.monotonic() - began < 5


def test_work_that_goes_on_is_waited_for_and_one_that_is_opened_anew_has_all_its_time_again() -> None:
    began = time.monotonic()

    def is_down() -> bool:
        return int((time.monotonic() - began) / 0.15) % 2 == 1

    assert ended_in_time(lambda: time.sleep(1.0), is_down, limit_s=0.5)


def test_what_the_work_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        ended_in_time(lambda: void(1 / 0), lambda: True, limit_s=10)


def void(_: object) -> None:
    """For work that returns nothing."""


@pytest.fixture
def loggers_as_before() -> Iterator[None]:
    before = {name: list(logging.getLogger(name).handlers) for name in ("", *logging.root.manager.loggerDict)}
    raises = logging.raiseExceptions
    yield
    logging.raiseExceptions = raises
    for name in ("", *logging.root.manager.loggerDict):
        logging.getLogger(name).handlers = before.get(name, [])


def test_prefect_s_own_lines_go_to_the_log_and_none_to_the_terminal(
    loggers_as_before: None, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.Logger("study", logging.DEBUG)
    log.addHandler(caplog.handler)
    keep_lines_of_prefect(log)
    for _ in range(3):
        logging.getLogger("prefect.events.clients").warning("Unable to connect to %r", "ws://x")
    logging.getLogger("prefect._internal.concurrency").error("Service failed to process item %s", "x" * 10_000)
    logging.getLogger("urllib3.pool").warning("what another package says")
    logging.getLogger("prefect.flow_runs").warning("said by the study itself", extra={"send_to_api": False})
    said = capfd.readouterr()
    assert said.out + said.err == ""
    kept = [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "study"]
    assert [level for level, _ in kept] == [logging.DEBUG] * 3
    assert kept[0][1] == "prefect.events.clients: Unable to connect to 'ws://x'"
    assert len(kept[1][1]) < 1000


def test_a_line_whose_words_do_not_fit_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.Logger("study", logging.DEBUG)
    log.addHandler(caplog.handler)
    kept = _Kept(log)
    for words, arguments in (("%d of them", ("two",)), ("%s and %s", ("one",)), ("%(name)s", ({"other": 1},))):
        kept.handle(logging.LogRecord("package", logging.WARNING, __file__, 1, words, arguments, None))
    assert caplog.messages == ["package: %d of them", "package: %s and %s", "package: %(name)s"]


def test_a_benchmark_finds_the_lines_that_it_reads_in_a_log() -> None:
    root = Path(__file__).parents[3]
    read = re.findall(r'clock\["(.+?)"\]', (root / "benchmarks/peer_deepspeed_autotuner/run.py").read_text())
    assert read
    written = "".join(file.read_text() for file in (root / "flows").rglob("*.py"))
    assert [line for line in read if f'"{line}"' not in written] == []
