"""What the tests of other people's kinds of programs share: a copy of a program's folder, and a command typed there."""

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from device_fixtures import host_of_tests, need
from server_fixtures import free_port
from study_fixtures import Study, Zerotune, left_in

from benchmarks.programs.commands import read
from benchmarks.programs.frameworks import differences
from benchmarks.programs.run import WATCHED
from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import OwnCommand
from zerotune.trial_lib.records.result import Outcome, TrialResult

OTHERS = Path(__file__).parent / "programs" / "others"
Triple = tuple[int, int, int]
"""The micro-batch, the accumulation and the global batch of an engine."""

_ENGINE = re.compile(r"^engine (\d+) (\d+) (\d+)$", re.MULTILINE)
_OWN = ("zerotune-studies", "mlflow.db", "mlartifacts")


@dataclass(frozen=True)
class Tuned:
    """What a study has said and left.

    Attributes:
        document: the answer as a program reads it.
        said: standard error.
        study: its folder.
        new: the files that are in the program's folder since then, but for ZeroTune's own.
    """

    document: dict[str, Any]
    said: str
    study: Study
    new: set[str]

    @property
    def best_command(self) -> str:
        """What to type to train with the answer: the last line, in words."""
        return self.study.paths.best_command.read_text()

    @property
    def candidates(self) -> dict[int, Candidate]:
        """What each trial was to measure, by its number."""
        return {asked.number: asked.candidate for asked in self.study.asked}

    @property
    def results(self) -> list[TrialResult]:
        """How the trials ended, but for the profile's."""
        return [each for each in self.study.results.values() if each.purpose is not Purpose.PROFILE]

    @property
    def completed(self) -> list[TrialResult]:
        """The trials that were measured, but for the profile's."""
        return [each for each in self.results if each.outcome is Outcome.COMPLETED]

    @property
    def submitted(self) -> TrialResult:
        """The trial of what was typed."""
        (result,) = (each for each in self.results if each.purpose is Purpose.SUBMITTED)
        return result

    @property
    def stages(self) -> set[int]:
        """The ZeRO stages that were measured."""
        return {stage_of(result) for result in self.completed}


class Copied:
    """A copy of a program's folder, and what its user types there.

    Attributes:
        folder: the copy.
        variables: what stands before the command.
        flags: ZeroTune's.
        program: what stands behind `--`.
    """

    def __init__(self, name: str, root: Path) -> None:
        # Each of them is typed with two ranks.
        need(2)
        self.folder = root / name
        shutil.copytree(OTHERS / name, self.folder, ignore=shutil.ignore_patterns("__pycache__"))
        typed = read(self.folder)
        self.variables, self.flags, self.program = dict(typed.variables), list(typed.flags), list(typed.typed)
        if host_of_tests().device == "cuda":
            self.program = [word for word in self.program if word != "--use_cpu"]
            for recipe in self.folder.glob("*.yaml"):
                recipe.write_text(recipe.read_text().replace("use_cpu: true", "use_cpu: false"))

    def plain_engine(self) -> Triple:
        """Returns the batch of the engine where the program runs as it is typed, without a word of ZeroTune."""
        port, words = str(free_port()), list(self.program)
        if words[0] == "deepspeed":
            words[1:1] = ["--master_port", port]
        environment = {**os.environ, **self.variables, "PET_MASTER_PORT": port}
        output = subprocess.PIPE
        process = psutil.Popen(
            words, cwd=self.folder, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
        )
        said = ""
        try:
            # Some of them come to no end.
            for line in process.stdout:
                said += line
                if _ENGINE.match(line):
                    return engine_in(line)
        finally:
            for each in [*process.children(recursive=True), process]:
                each.kill()
            process.wait()
        raise AssertionError(said)


class Typed(Copied):
    """One in which the command is typed, with a Prefect server and an MLflow store that are there already."""

    def __init__(self, name: str, root: Path, home: Path, server: PrefectServer, store: Path) -> None:
        super().__init__(name, root)
        self._zerotune = Zerotune(root, home)
        self._zerotune.environment["PREFECT_API_URL"] = server.api_url
        self._zerotune.folder = self.folder
        shutil.copy(store, self.folder / "mlflow.db")

    def type(self, *flags: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
        """Types the command with more flags of ZeroTune's, to its end; no process is left."""
        running = self._zerotune.start("tune", *self.flags, *flags, "--", *self.program, **self.variables)
        ended = running.follow(timeout)
        assert running.left_over(within_s=20) == []
        assert left_in(self.folder) == []
        return ended

    @property
    def study(self) -> Study:
        """What the command has left."""
        return self._zerotune.study

    def tune(self, *flags: str, timeout: float = 500) -> Tuned:
        """Tunes with the command as it is typed; files that were there are as they were."""
        before = self._files()
        ended = self.type("--json", *flags, timeout=timeout)
        assert ended.returncode == 0, ended.stderr
        after = self._files()
        assert {name: after.get(name) for name in before} == before
        return Tuned(json.loads(ended.stdout), ended.stderr, self._zerotune.study, set(after) - set(before))

    def _files(self) -> dict[str, bytes]:
        """The files in the folder, but for ZeroTune's own and for what the command itself says."""
        left_out = (*_OWN, "__pycache__")
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file()
            and path.suffix not in (".out", ".err")
            and not any(part.startswith(left_out) for part in path.relative_to(self.folder).parts)
        }


def expect_trained_alike(tuned: Tuned, timeout: float = 120) -> OwnCommand:
    """Checks that the best command is the typed one, and trains without ZeroTune as the winner's trials did.

    Every setting of DeepSpeed's that decides a training is compared. Returns the command.
    """
    own = OwnCommand.of(tuned.study.paths)
    assert own is not None, tuned.best_command
    recorded = tuned.study.paths.trial(tuned.document["best"]["trial"]).engine_built(0)
    engine = plain_configuration(tuned.study.paths.best_command, tuned.study.paths.best / "engines", timeout)
    assert list(differences(json.loads(recorded.read_text())["engine"], engine)) == []
    return own


def plain_configuration(command: Path, folder: Path, timeout: float = 120) -> dict[str, Any]:
    """Returns the configuration of the first engine that steps in a command without ZeroTune. Then ends it."""
    folder.mkdir()
    found = folder / "rank-0.jsonl"
    environment = {**os.environ, "WATCH_FOLDER": str(folder), "PET_MASTER_PORT": str(free_port())}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(WATCHED), os.environ.get("PYTHONPATH", "")]))
    with (folder / "said").open("w+") as said:
        process = psutil.Popen(["sh", command], env=environment, stdout=said, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + timeout
            while not _first_line(found) and process.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
        finally:
            for each in [*process.children(recursive=True), process]:
                each.kill()
            process.wait()
        said.seek(0)
        line = _first_line(found)
        assert line, said.read()
    return dict(json.loads(line)["engine"])


def _first_line(file: Path) -> str:
    return file.read_text().partition("\n")[0] if file.exists() and "\n" in file.read_text() else ""


def engine_in(said: str) -> Triple:
    """Returns the batch that a program has read off its engine, by what it has said last."""
    found = _ENGINE.findall(said)
    assert found, said
    micro, accumulation, total = map(int, found[-1])
    return micro, accumulation, total


def engine_of(result: TrialResult) -> Triple:
    """Returns the batch of the engine that a trial has measured."""
    return engine_in(Path(result.logs[0]).read_text())


def stage_of(result: TrialResult) -> int:
    """Returns the ZeRO stage that a trial was given."""
    config = json.loads((Path(result.logs[0]).parent / "ds_config.json").read_text())
    stage: int = config.get("zero_optimization", {}).get("stage", 0)
    return stage


def expect_answered(tuned: Tuned, typed: Triple) -> None:
    """Checks what holds for every program: the batch is the typed one, and the answer is against what was typed."""
    assert tuned.submitted.outcome is Outcome.COMPLETED, tuned.submitted.reason
    assert engine_of(tuned.submitted) == typed
    for result in tuned.completed:
        micro, accumulation, total = engine_of(result)
        candidate = tuned.candidates[result.number]
        assert (micro, accumulation) == (candidate.micro_batch_size, candidate.gradient_accumulation_steps)
        assert total == typed[2]
    answer = tuned.document["confirmation"]
    if answer is None:
        assert tuned.document["best"]["purpose"] == "submitted"
        assert "No configuration was faster than yours (one measurement, not confirmed)." in tuned.said
    else:
        assert answer["sentence"] in tuned.said
        assert "your" in answer["sentence"]
    assert "was edited while" not in tuned.said
