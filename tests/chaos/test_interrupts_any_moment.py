"""An interrupt at any moment: exit code 130, one sentence, a record that says so, and nothing left behind."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from report_fixtures import recorded_study
from study_fixtures import BIN, Zerotune

from zerotune.trial_lib.doctor import abandoned_buffers

pytestmark = pytest.mark.alone

MARK = "ZEROTUNE_TEST_OF"
STUDY = ("random", "-mt", "3", "-z", "1", "-mct", "1", "-m", "throughput")
NO_ROOM = "can't allocate memory"
HANDLED_S = 10.0  # until Python is there and has come to the command's first line, on a busy machine


@dataclass(frozen=True)
class Moment:
    """When a command is interrupted, and how.

    Attributes:
        seconds: after it has begun to listen.
        group: whether its whole process group is, as by a terminal.
        signals: one after the other.
    """

    seconds: float
    signals: tuple[signal.Signals, ...] = (signal.SIGINT,)
    group: bool = True

    def __str__(self) -> str:
        names = "+".join(number.name for number in self.signals)
        return f"{names} after {self.seconds:.3f} s"


def moments(seed: int, count: int, start_s: float, end_s: float) -> Iterator[Moment]:
    """Yields moments that are spread evenly at random; some are SIGTERM or SIGHUP, and some come twice."""
    draw = random.Random(seed)
    for position in range(count):
        seconds = start_s + (end_s - start_s) * (position + draw.random()) / count
        kind = draw.choices(["int", "term", "hup", "twice"], [6, 2, 1, 2])[0]
        if kind == "int":
            yield Moment(seconds)
        elif kind == "twice":
            yield Moment(seconds, (signal.SIGINT, signal.SIGINT))
        else:
            yield Moment(seconds, (signal.SIGTERM if kind == "term" else signal.SIGHUP,), group=False)


@dataclass
class Command:
    """A command of zerotune's in a folder of its own, whose processes are known by a variable of theirs."""

    zerotune: Zerotune
    words: tuple[str, ...]
    root: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def interrupted(self, moment: Moment) -> subprocess.CompletedProcess[str] | None:
        """Runs it until the moment, and returns how it ended; None where it had by itself."""
        temporary = self.root / "tmp"
        temporary.mkdir(exist_ok=True)
        environment = {**self.zerotune.environment, MARK: self.mark, "TMPDIR": str(temporary)}
        out, err = self.root / "out", self.root / "err"
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                [str(BIN / "zerotune"), *self.words],
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                # Who runs these tests under nohup has SIGHUP ignored, and so would the command.
                preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
            )
        wait_for(lambda: listens(process.pid) or process.poll() is not None, HANDLED_S)
        time.sleep(moment.seconds)
        if process.poll() is not None:
            return None
        for number in moment.signals:
            if process.poll() is None:
                os.killpg(process.pid, number) if moment.group else os.kill(process.pid, number)
            time.sleep(0.15)
        process.wait(60)
        return subprocess.CompletedProcess(self.words, process.returncode, out.read_text(), err.read_text())

    def left_over(self) -> list[str]:
        """Returns the processes and files that are there five seconds after its end."""
        wait_for(lambda: not self._processes() and not self._files(), 5.0)
        return [*self._processes(), *self._files()]

    def _files(self) -> list[str]:
        # Torch's own cache is for all programs of a user. To import torch makes it.
        return [str(path) for path in (self.root / "tmp").iterdir() if not path.name.startswith("torchinductor_")]

    def _processes(self) -> list[str]:
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(f"{folder.name} {(folder / 'cmdline').read_bytes()[-200:]!r}")
            except OSError:
                continue
        return found


def listens(pid: int) -> bool:
    """Whether a process has a handler of its own for SIGTERM, which Python has none for."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)


def wrong_with(ended: subprocess.CompletedProcess[str], command: Command) -> list[str]:
    """Returns what is not as it should be after an interrupt."""
    wrong = [] if ended.returncode == 130 else [f"exit code {ended.returncode}"]
    told = [line for line in ended.stderr.splitlines() if "nterrupted" in line]
    if len(told) != 1:
        wrong.append(f"told {len(told)} times")
    # A lack of memory is told of in the program's own words.
    said = "\n".join(line for line in ended.stderr.splitlines() if NO_ROOM not in line)
    wrong += [word for word in ("Traceback", "Aborted!", "Exception", "Error") if word in said]
    wrong += [f"left over: {left}" for left in command.left_over()]
    for folder in (*command.root.glob("zerotune-studies/*"), *command.root.glob("zerotune-experiments/*")):
        records = [folder / name for name in ("study.json", "record.json") if (folder / name).exists()]
        status = json.loads(records[0].read_text())["status"] if records else "no record"
        if status != "cancelled" and f"had {status}. See " not in ended.stderr:
            wrong.append(f"{folder.name} is {status}")
    return wrong


def all_wrong(zerotune: Zerotune, words: tuple[str, ...], when: list[Moment], tmp_path: Path) -> dict[str, list[str]]:
    """Returns what is wrong after each moment's interrupt, where anything is."""
    found, too_late = {}, 0
    for number, moment in enumerate(when):
        root = tmp_path / f"{number:03d}"
        root.mkdir()
        command = Command(zerotune, words, root)
        ended = command.interrupted(moment)
        wrong = [] if ended is None else wrong_with(ended, command)
        if ended is None:
            too_late += 1
        elif wrong:
            found[f"{number:03d} {moment}"] = [*wrong, ended.stderr[-1500:]]
        else:
            shutil.rmtree(root)
    assert too_late <= len(when) / 4
    return found


@pytest.fixture
def zerotune(tmp_path: Path, home: Path) -> Zerotune:
    return Zerotune(tmp_path, home)


def test_the_first_two_seconds_of_a_command_end_in_130_and_one_sentence(zerotune: Zerotune, tmp_path: Path) -> None:
    words = (STUDY[0], str(zerotune.config), str(zerotune.model), *STUDY[1:])
    when = [Moment(0.0), Moment(0.05), Moment(0.3, (signal.SIGTERM,), group=False), *moments(5, 2, 0.6, 2.0)]
    assert all_wrong(zerotune, words, when, tmp_path) == {}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_hundred_interrupts_at_random_moments_of_a_study(zerotune: Zerotune, tmp_path: Path) -> None:
    words = (STUDY[0], str(zerotune.config), str(zerotune.model), *STUDY[1:])
    before = set(abandoned_buffers())
    began = time.monotonic()
    assert zerotune.run(*STUDY).returncode == 0
    whole_s = time.monotonic() - began
    shutil.rmtree(tmp_path / "zerotune-studies")
    when = [*moments(1, 40, 0.0, 2.0), *moments(2, 60, 2.0, whole_s * 0.9)]
    assert all_wrong(zerotune, words, when, tmp_path) == {}
    assert set(abandoned_buffers()) <= before


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", ["train", "estimate", "record", "show", "doctor"])
def test_other_commands_are_interrupted_as_well(zerotune: Zerotune, tmp_path: Path, command: str) -> None:
    experiment = (str(zerotune.config), str(zerotune.model))
    words = {
        "train": ("train", *experiment),
        "estimate": ("estimate", *experiment),
        "record": ("record", *experiment, "-o", "table.jsonl", "-b", "1"),
        "show": ("show",),
        "doctor": ("doctor",),
    }[command]
    zerotune.write_config(program="--num_steps 400 --step_seconds 0.05")
    # `show` is over within half a second.
    end_s = {"train": 8.0, "estimate": 8.0, "record": 8.0, "doctor": 0.5}.get(command, 0.25)
    assert all_wrong(zerotune, words, list(moments(3, 8, 0.0, end_s)), tmp_path) == {}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_an_interrupted_sync_has_begun_the_line_that_it_says_sends(zerotune: Zerotune, tmp_path: Path) -> None:
    words = ("sync", str(recorded_study(tmp_path).root))
    assert all_wrong(zerotune, words, list(moments(4, 12, 0.0, 3.0)), tmp_path) == {}
    assert zerotune.run(*words).returncode == 0
