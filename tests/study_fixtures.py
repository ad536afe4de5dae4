"""What the tests of whole studies share: the real command in a process of its own, and what it leaves behind."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from device_fixtures import need

from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.study.history import Asked, Event, Stopped, Told, read_history

BIN = Path(sys.executable).parent
TINY = Path(__file__).parent / "programs" / "tiny_study"
ENTRYPOINT = "deepspeed train.py --deepspeed_config ds_config.json"
# Of the user's own: a test must not depend on it.
_FOREIGN = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME", "DS_ACCELERATOR")


class Zerotune:
    """The command, run in a folder of a test's own on the tiny program.

    Attributes:
        folder: where it runs.
        model: the model directory, a copy of the tiny program.
        config: the experiment's YAML.
        prefect_database: of the Prefect server that it starts.
    """

    def __init__(self, folder: Path, home: Path, slots: int = 1, program: str = "", memory: str = "600 MiB") -> None:
        need(slots)
        self.folder = folder
        self.model = folder / "model"
        self.config = folder / "experiment.yaml"
        self.prefect_database = home / "zerotune" / "prefect" / "prefect.db"
        shutil.copytree(TINY, self.model)
        self.write_config(slots, program, memory)
        self.environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        self.environment["XDG_DATA_HOME"] = str(home)
        # As in an activated environment: another ninja than the one that built DeepSpeed's ops builds them again.
        self.environment["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"

    def write_config(self, slots: int = 1, program: str = "", memory: str = "600 MiB") -> None:
        """Writes the experiment; `program` is what follows the entrypoint's own arguments."""
        text = (self.model / "deepspeed.yaml").read_text()
        text = text.replace(ENTRYPOINT, f"{ENTRYPOINT} {program}".rstrip())
        text = text.replace("slots_per_trial: 1", f"slots_per_trial: {slots}").replace("600 MiB", memory)
        self.config.write_text(text)

    def start(self, *arguments: str | Path, **environment: str) -> "Running":
        """Starts the command; `METHOD` is given its experiment, `resume` is not."""
        command = [str(BIN / "zerotune"), *self.words(*arguments)]
        return Running(command, self.folder, {**self.environment, **environment})

    def words(self, command: str | Path, *arguments: str | Path) -> list[str]:
        """Returns what is typed behind `zerotune`."""
        experiment = (self.config, self.model) if command in ("adaptive", "asha", "binary", "random") else ()
        return [str(word) for word in (command, *experiment, *arguments)]

    def on_servers(self, api_url: str, store: Path) -> "Zerotune":
        """Gives its commands the tests' Prefect server and a copy of an MLflow store that has its tables."""
        self.environment["PREFECT_API_URL"] = api_url
        shutil.copy(store, self.folder / "mlflow.db")
        return self

    def run(self, *arguments: str | Path, timeout: float = 200, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs the command to its end."""
        return self.start(*arguments, **environment).end(timeout)

    def record(self, model: Path, *more: str) -> subprocess.CompletedProcess[str]:
        """Records `table.jsonl`, a table of the experiment."""
        script = [sys.executable, "-m", "benchmarks.replay.record", str(self.config), str(model)]
        environment = {**self.environment, "PYTHONPATH": str(Path(__file__).parents[1])}
        return Running([*script, "-o", "table.jsonl", *more], self.folder, environment).end(600)

    @property
    def study(self) -> "Study":
        """The one study there is."""
        (root,) = (self.folder / "zerotune-studies").iterdir()
        return Study(root)


def run_here(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that starts nothing, in this process: an interpreter of its own takes half a second to import."""
    # Here, so that processes which import this file pay for neither.
    from click.testing import CliRunner

    from zerotune.flows.command_line import cli

    with contextlib.chdir(folder), patch.dict(os.environ, environment):
        ended = CliRunner().invoke(cli, words, prog_name="zerotune")
    assert isinstance(ended.exception, SystemExit | None), ended.exception
    return subprocess.CompletedProcess(words, ended.exit_code, ended.stdout, ended.stderr)


class Running:
    """A command that runs in a session of its own, with what it says in files."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self._output = [folder / f"{time.monotonic_ns()}.{name}" for name in ("out", "err")]
        with self._output[0].open("w") as out, self._output[1].open("w") as err:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._descendants: dict[int, psutil.Process] = {}
        self._commands: dict[int, list[str]] = {}

    def end(self, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Waits for the end; one that does not come is a failure."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            raise
        out, err = (path.read_text() for path in self._output)
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)

    @property
    def said(self) -> str:
        """Its standard error so far."""
        return self._output[1].read_text()

    def follow(self, timeout: float = 200) -> subprocess.CompletedProcess[str]:
        """Waits for the end like `end`, and looks at its processes meanwhile."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            self.look()
            time.sleep(0.2)
        return self.end(timeout=1)

    @property
    def ports(self) -> list[int]:
        """The ports of the servers among the processes that `look` has seen."""
        commands = self._commands.values()
        return [int(words[words.index("--port") + 1]) for words in commands if "--port" in words]

    def wait_until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60) -> None:
        """Waits for a condition while the command runs, and looks at its processes meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended before {what}: {self.said}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s: {self.said}"
            self.look()
            time.sleep(0.05)
        self.look()

    def look(self) -> list[psutil.Process]:
        """Remembers the processes that the command has started so far, and returns them."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._descendants.setdefault(process.pid, process)
                self._commands[process.pid] = words_of(process) or self._commands.get(process.pid, [])
        return list(self._descendants.values())

    def left_over(self, within_s: float) -> list[str]:
        """Returns the processes it had started that still run so many seconds from now, if any."""
        deadline = time.monotonic() + within_s
        while True:
            alive = [describe(process) for process in self._descendants.values() if is_alive(process)]
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def words_of(process: psutil.Process) -> list[str]:
    """Returns a process's command line; nothing of one that has ended."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def left_in(folder: Path) -> list[psutil.Process]:
    """Returns the processes that work in a folder."""
    left = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder) and process.pid != os.getpid():
                left.append(process)
        except psutil.Error:
            continue
    return left


def describe(process: psutil.Process) -> str:
    return f"{process.pid} {' '.join(words_of(process)[-3:])}"


class Study:
    """What a study has left in its folder."""

    def __init__(self, root: Path) -> None:
        self.paths = StudyPaths(root)

    @property
    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.paths.record.read_text())
        return record

    @property
    def history(self) -> list[Event]:
        return read_history(self.paths.history)

    @property
    def asked(self) -> list[Asked]:
        """What was asked for. The profile trial is asked for again when its run has settled the candidate."""
        return list({event.number: event for event in self.history if isinstance(event, Asked)}.values())

    @property
    def searched(self) -> list[int]:
        """The numbers of the trials that were decided on before the winner was confirmed, in order."""
        return [asked.number for asked in self.asked if asked.purpose is not Purpose.CONFIRM]

    @property
    def confirmed(self) -> list[TrialResult]:
        """How the confirming trials ended."""
        return [result for result in self.results.values() if result.purpose is Purpose.CONFIRM]

    @property
    def told(self) -> list[Told]:
        return [event for event in self.history if isinstance(event, Told)]

    @property
    def stopped(self) -> list[Stopped]:
        return [event for event in self.history if isinstance(event, Stopped)]

    @property
    def results(self) -> dict[int, TrialResult]:
        """How each trial that ran ended, from its own folder."""
        files = sorted(self.paths.trials.glob("*/result.json"))
        results = [TrialResult.from_text(file.read_text()) for file in files]
        return {result.number: result for result in results}

    def result_times(self) -> dict[int, int]:
        """Returns when each trial's result was written, in nanoseconds."""
        results = {int(folder.name): folder / "result.json" for folder in self.paths.trials.iterdir()}
        return {number: file.stat().st_mtime_ns for number, file in results.items() if file.exists()}


def query(database: Path, sql: str, *values: str) -> list[tuple[Any, ...]]:
    """Returns the rows of a SQLite database that no process has to be running for."""
    connection = sqlite3.connect(database)
    try:
        return connection.execute(sql, values).fetchall()
    finally:
        connection.close()


def migrated_home(root: Path, kept: Path | None = None) -> Path:
    """Returns the folder of ZeroTune's own Prefect home, its database migrated: some ten seconds, for all tests.

    With `kept` that folder is migrated, once for all workers and later runs, and this is a copy of it.
    """
    home = root / "zerotune-home"
    if not home.exists():
        code = "from zerotune.flows.prefect_server import migrate_own_database; migrate_own_database()"
        environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        subprocess.run(
            [sys.executable, "-c", code], env={**environment, "XDG_DATA_HOME": str(kept or home)}, check=True
        )
        if kept is not None:
            shutil.copytree(kept, home)
    return home
