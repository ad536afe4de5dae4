"""What a command says: whole and harmless; and streams that nobody reads, or that were closed."""

import json
import os
import subprocess
import sys
import time

import pytest

from zerotune.flows.terminal import print_document, say, say_ways, telling_still


def test_the_owner_is_told_all_and_a_terminal_obeys_none_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DB_KEY", "status")
    monkeypatch.setenv("API_TOKEN", "hunter-two-22")
    say("\x1b[2Jit said hunter-two-22: cd /home/hunter-two-22")
    document = {"status": "it said hunter-two-22", "ds_config": {"api_key": "abc"}}
    print_document(document)
    told = capsys.readouterr()
    assert told.err == "it said hunter-two-22: cd /home/hunter-two-22\n"
    assert json.loads(told.out) == {"version": 1, **document}


def test_what_has_to_be_typed_before_a_page_opens_stands_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    say_ways("All trials:", ("http://host:5000/#/a",))
    say_ways("All trials:", ("mlflow ui", "http://127.0.0.1:5000/#/a"))
    assert capsys.readouterr().err.splitlines() == [
        "All trials:    http://host:5000/#/a",
        "All trials:    mlflow ui",
        "  then open:   http://127.0.0.1:5000/#/a",
    ]


def test_long_work_is_told_until_it_ends() -> None:
    told: list[str] = []
    with telling_still("writing the page", told.append, every_s=0.01):
        while not told:
            time.sleep(0.005)
    assert told[0] == "still writing the page (0 s)"
    count = len(told)
    time.sleep(0.05)
    assert len(told) == count


def test_short_work_is_not_told() -> None:
    told: list[str] = []
    with telling_still("writing the page", told.append, every_s=60):
        pass
    assert told == []


PRINTED = '{"version": 1, "number": 1}'
SAYS = """
import sys
from zerotune.flows.terminal import open_streams
open_streams()
from zerotune.flows.terminal import print_document, say
held = open({held!r}, "w")
for number in range(3):
    say("a note")
print_document({{"number": 1}})
import subprocess
subprocess.run(["sh", "-c", "echo of a child >&2"], check=True)
sys.exit(4)
"""


@pytest.mark.parametrize(
    ("redirected", "printed"),
    [("2>&-", PRINTED), ("2>&- <&-", PRINTED), (">&-", ""), ("2>&1 >/dev/null | true", "")],
)
def test_a_stream_that_is_closed_or_not_read_changes_nothing_else(
    redirected: str, printed: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    held = tmp_path_factory.mktemp("held") / "held"
    script = held.with_suffix(".py")
    script.write_text(SAYS.format(held=str(held)))
    command = f"set -o pipefail; {sys.executable} {script} {redirected}"
    ended = subprocess.run(["bash", "-c", command], text=True, capture_output=True, env={**os.environ})
    assert ended.returncode == 4, ended.stderr
    assert "".join(ended.stdout.split()) == "".join(printed.split())
    # A stream that was closed is not the next file that is opened.
    assert held.read_text() == ""


def test_a_terminal_that_goes_away_without_a_signal_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    held = tmp_path_factory.mktemp("held") / "held"
    ours, theirs = os.openpty()
    waits = "import os, sys\nos.read(0, 1)\n"
    command = [sys.executable, "-c", waits + SAYS.format(held=str(held))]
    # In a session of its own, it has no controlling terminal that sends SIGHUP.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, start_new_session=True)
    for descriptor in (ours, theirs):
        os.close(descriptor)
    assert process.stdin is not None
    process.stdin.write(b"x")
    process.stdin.close()
    assert process.wait(30) == 4
