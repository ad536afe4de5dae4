"""A signal is heard from the first moment on, is never raised in the middle of something, and ends in one sentence."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest

from zerotune.flows.interrupts import interrupts

ROOT = Path(__file__).parents[3]

_BEGIN = """
import os, signal, sys, threading, time
from zerotune.flows.interrupts import interrupts

def told(*words):
    print(*words, flush=True)

def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)

interrupts.listen()
"""

_ENDING = """
import atexit, sys, threading, time
from zerotune.flows.interrupts import interrupts

class Late:
    def __del__(self):
        print("taken apart")

def work():
    time.sleep(0.2)
    print("thread")

interrupts.listen()
late = Late()
atexit.register(print, "handler")
threading.Thread(target=work).start()
interrupts.end(3)
"""


def _ended(program: str) -> subprocess.CompletedProcess[str]:
    # Under nohup, or in the background of a script, these tests themselves may ignore a signal.
    heard = "import signal\nfor number in (signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_DFL)\n"
    words = [sys.executable, "-c", heard + program]
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)


def _interrupted(command: str) -> subprocess.CompletedProcess[str]:
    indented = command.strip().replace("\n", "\n    ")
    return _ended(f"{_BEGIN}def command():\n    {indented}\n    return 0\n\ninterrupts.end(interrupts.run(command))")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_first_signal_ends_a_command_at_once_that_has_nothing_to_end(number: str) -> None:
    began = time.monotonic()
    ended = _interrupted(f"interrupt(signal.{number}); time.sleep(60)")
    assert time.monotonic() - began < 20
    assert (ended.returncode, ended.stderr) == (130, "zerotune: interrupted before anything was started.\n")


def test_it_is_heard_while_modules_are_imported() -> None:
    ended = _ended(f"{_BEGIN}\ninterrupt()\nimport pydantic\ntold('imported')")
    assert (ended.returncode, ended.stdout) == (130, "")
    assert ended.stderr == "zerotune: interrupted before anything was started.\n"


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    begin = _BEGIN.replace("interrupts.listen()", "signal.signal(signal.SIGHUP, signal.SIG_IGN)\ninterrupts.listen()")
    ended = _ended(f"{begin}\ninterrupt(signal.SIGHUP)\ntold('goes on')")
    assert (ended.returncode, ended.stdout) == (0, "goes on\n")


_OPEN = """
with interrupts.opening():
    {opening}
interrupts.resume_command = "zerotune resume s"
with interrupts.noting(lambda: told("noted"), patience_s={patience}):
    {body}
"""


def test_what_is_being_opened_is_opened_and_then_ended_in_good_order() -> None:
    ended = _interrupted(
        _OPEN.format(opening="interrupt(); time.sleep(0.3); told('open')", patience=20, body="told(1)")
    )
    assert (ended.returncode, ended.stdout.split()) == (130, ["open"])
    assert ended.stderr == "Interrupted. Resume with: zerotune resume s\n"


def test_what_runs_is_noted_at_once_and_ends_where_it_looks_for_an_interrupt() -> None:
    body = "interrupt(); time.sleep(0.3); told('worked'); interrupts.check(); told('went on')"
    ended = _interrupted(_OPEN.format(opening="pass", patience=20, body=body))
    assert (ended.returncode, ended.stdout.split()) == (130, ["noted", "worked"])
    assert ended.stderr == "Interrupted. Resume with: zerotune resume s\n"


@pytest.mark.parametrize(("patience", "signals"), [(0.2, 1), (20, 2)])
def test_what_does_not_end_is_ended_after_a_while_or_by_another_signal(patience: float, signals: int) -> None:
    began = time.monotonic()
    body = f"[(interrupt(), time.sleep(0.2)) for _ in range({signals})]; time.sleep(60)"
    ended = _interrupted(_OPEN.format(opening="pass", patience=patience, body=body))
    assert time.monotonic() - began < 15
    assert (ended.returncode, ended.stdout) == (130, "noted\n")
    assert ended.stderr == "Interrupted. Resume with: zerotune resume s\n"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("", "Interrupted. Nothing of it is left. Start again with: zerotune plan p"),
        ("interrupts.ended = lambda: 'It is in p.'", "It is in p."),
        ("interrupts.resume_command = 'zerotune resume r'", "Interrupted. Resume with: zerotune resume r"),
    ],
)
def test_what_is_begun_anew_is_not_said_to_be_resumed(state: str, said: str) -> None:
    ended = _interrupted(
        f"with interrupts.opening(): pass\ninterrupts.again_command = 'zerotune plan p'\n{state}\n"
        "interrupt(); time.sleep(0.1); interrupts.check()"
    )
    assert (ended.returncode, ended.stderr) == (130, f"{said}\n")


def test_whatever_an_interrupt_makes_of_a_command_it_is_an_interrupt() -> None:
    ended = _interrupted(
        "with interrupts.opening(): pass\ninterrupt(); time.sleep(0.1); raise ValueError('of a validator')"
    )
    assert ended.returncode == 130
    assert len(ended.stderr.splitlines()) == 1


def test_an_import_that_takes_its_time_is_left_to_itself() -> None:
    body = "interrupts.aside(lambda: (interrupt(), time.sleep(60)))"
    began = time.monotonic()
    ended = _interrupted(_OPEN.format(opening="pass", patience=20, body=body))
    assert time.monotonic() - began < 15
    assert ended.returncode == 130


def test_a_command_that_is_meant_to_be_ended_by_a_signal_has_its_own_exit_code() -> None:
    ended = _interrupted("with interrupts.opening(): interrupts.is_heeded = True\ninterrupt(); time.sleep(0.3)")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_little_is_imported_before_signals_are_heard() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import zerotune.flows.cli; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert not {"threading", "typing", "re", "logging", "click", "pathlib"} & set(ended.stdout.split())


def test_a_command_ends_with_its_exit_code_when_all_is_said_and_takes_nothing_apart() -> None:
    ended = _ended(_ENDING)
    assert (ended.returncode, ended.stdout.split()) == (3, ["thread", "handler"])


def test_whoever_only_listens_ends_as_python_does() -> None:
    ended = _ended(_ENDING.replace("interrupts.end(3)", "sys.exit(4)"))
    assert (ended.returncode, ended.stdout.split()) == (4, ["thread", "handler", "taken", "apart"])


def test_a_flow_that_names_the_interrupts_can_be_sent_to_another_process_while_a_command_runs() -> None:
    def command() -> int:
        with interrupts.noting(threading.Lock().acquire):
            return int(cloudpickle.loads(cloudpickle.dumps(lambda: interrupts))() is not interrupts)

    assert command() == 0


@pytest.mark.parametrize("opened", ["", "with interrupts.opening(): pass"])
def test_a_signal_that_ends_a_command_at_once_leaves_no_scratch_folder(opened: str) -> None:
    ended = _interrupted(f"""
from zerotune.trial_lib.tracking.runs import scratch_folder
{opened}
with scratch_folder() as folder:
    (folder / "copy").touch()
    told(folder)
    interrupt()
    time.sleep(0.3)
    interrupt()
    time.sleep(20)
""")
    assert ended.returncode == 130, ended.stderr
    assert not Path(ended.stdout.strip()).exists()
