"""Wherever a batch stands in a command, it is the user's configuration, and a candidate arrives there.

What the program's engine has in a plain run, without a word of ZeroTune, is what the submitted trial has to have.
"""

import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import PROGRAMS
from device_fixtures import TRAINER_FLAGS
from others_fixtures import Triple, engine_in, engine_of

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.locks import reserved_port
from zerotune.trial_lib.launch.rank_starter import LaunchRequest, RankRequest
from zerotune.trial_lib.launch.starters import WarmStarter, rank_environment
from zerotune.trial_lib.launch.trial import ThisHost, TrialPlan
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.runner import Work
from zerotune.trial_lib.study.setup import StudySetup
from zerotune.trial_lib.study.typed_command import read_command

KEYS = {"micro": MICRO_BATCH, "accumulation": ACCUMULATION, "total": TRAIN_BATCH}
MICRO, ACCUMULATED = 4, 2


@dataclass(frozen=True)
class Command:
    """How a batch is typed in one way.

    Attributes:
        place: as the program calls it.
        name: how one of its numbers is typed, `{name}` and `{value}` in it.
        target: how it is mapped.
        before: what is typed before them.
        after: what is typed after them.
    """

    place: str
    name: str
    target: str
    before: str = ""
    after: str = ""


COMMANDS = {
    "option": Command("option", "--{name} {value}", "--{name}"),
    "option=": Command("option", "--{name}={value}", "--{name}"),
    "short": Command("option", "-{name[0]} {value}", "-{name[0]}"),
    "short joined": Command("option", "-{name[0]}{value}", "-{name[0]}"),
    "dotted": Command("dotted", "--trainer.{name} {value}", "trainer.{name}"),
    "dotted=": Command("dotted", "--trainer.{name}={value}", "--trainer.{name}"),
    "subcommand": Command("subcommand", "--{name} {value}", "--{name}", before="-v train", after="--lr 1"),
    "override": Command(
        "override", "trainer.{name}={value}", "trainer.{name}", before="ds=zero1", after="--config-name x"
    ),
    "variable": Command("variable", "", "{NAME}"),
    "yaml": Command("yaml", "", "conf.yaml:trainer.{name}", before="--config conf.yaml"),
    "json": Command("json", "", "conf.json:trainer.{name}", before="--config=conf.json"),
    "word": Command("word", "{value}", "argv:{number}"),
    "code": Command("code", "", ""),
}
SPELLINGS = ("option", "short", "short joined", "dotted")
TOTALS = ("absent", "given", "computed")


@dataclass(frozen=True)
class Case:
    """One crossing: where the batch stands, whether that is mapped, what is typed of it."""

    way: str
    mapped: bool
    accumulation: bool
    total: str

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers that are typed."""
        accumulation = {"accumulation": ACCUMULATED} if self.accumulation else {}
        total = {"total": MICRO * ACCUMULATED} if self.total == "given" else {}
        return {"micro": MICRO, **accumulation, **total}

    @property
    def command(self) -> Command:
        return COMMANDS[self.way]

    @property
    def arguments(self) -> list[str]:
        """The words behind the script's name."""
        command = self.command
        typed = [command.name.format(name=name, value=value) for name, value in self.numbers.items()]
        if command.place == "word":
            typed = [str(self.numbers.get(name, "-")) for name in KEYS]
        return " ".join((command.before, *typed, command.after)).split()

    @property
    def environment(self) -> dict[str, str]:
        """What stands before the command."""
        numbers = {name.upper(): str(value) for name, value in self.numbers.items()}
        return {
            "PLACE": self.command.place,
            "FEED": "own" if self.mapped else "engine",
            **(numbers if self.way == "variable" else {}),
            **({"COMPUTES": "1"} if self.total == "computed" else {}),
        }

    @property
    def mappings(self) -> dict[str, str]:
        if not self.mapped:
            return {}
        targets = {
            name: self.command.target.format(name=name, NAME=name.upper(), number=number)
            for number, name in enumerate(KEYS, start=1)
        }
        # What is not typed can be added where a parser reads it, but not to a file.
        names = self.numbers if self.way in ("yaml", "json", "word") else {**self.numbers, "accumulation": None}
        return {KEYS[name]: targets[name] for name in names}


def cases() -> Iterator[Case]:
    """Yields every crossing; how a number is spelt makes a difference where it is mapped."""
    for way, mapped, accumulation, total in itertools.product(COMMANDS, (True, False), (True, False), TOTALS):
        in_code = way == "code" and (mapped or not accumulation or total == "given")
        if not in_code and (way not in SPELLINGS or (mapped and accumulation and total == "given")):
            yield Case(way, mapped, accumulation, total)


SOON = [
    Case("option=", True, True, "computed"),
    Case("override", True, False, "absent"),
    Case("variable", True, True, "given"),
    Case("yaml", True, False, "given"),
    Case("subcommand", False, True, "computed"),
]
ALL = [pytest.param(case, marks=[] if case in SOON else pytest.mark.long, id=f"{case.way}, {case}") for case in cases()]


class Runs:
    """Runs the program of the batch's places, plainly and in a study of its own."""

    def __init__(self, folder: Path, starter: WarmStarter) -> None:
        self.folder = folder / "program"
        self.lock_dir = folder / "locks"
        self._starter = starter
        self._study = folder / "study"
        shutil.copytree(PROGRAMS / "batch_places", self.folder)

    def write_files(self, case: Case) -> None:
        """Writes the files that a command may name."""
        (self.folder / "conf.json").write_text(json.dumps({"trainer": case.numbers}))
        lines = [f"  {name}: {value}  # typed" for name, value in case.numbers.items()]
        (self.folder / "conf.yaml").write_text("\n".join(["name: x", "trainer:", *lines]) + "\n")

    def plainly(self, case: Case) -> Triple:
        """Returns the batch of the engine where nothing of ZeroTune's has a hand in it."""
        log = self.folder.parent / "plain.log"
        with reserved_port() as port:
            ranks = {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            environment = {**rank_environment(), **case.environment, **ranks, "STEPS": "4"}
            payload = {"script": "train.py", "arguments": case.arguments}
            rank = RankRequest(environment, str(log), [])
            request = LaunchRequest(sys.executable, "plain_run:run", payload, str(self.folder), [rank], 60.0)
            ending = self._starter.launch(request).wait_or_cancel(threading.Event())
        assert ending.statuses == [0], log.read_text()
        return engine_in(log.read_text())

    def typed(self, words: list[str]) -> Triple:
        """Returns the batch of the engine where a command is run as it is typed."""
        log = self.folder.parent / "plain.log"
        with log.open("w") as output:
            subprocess.run(["env", *words], cwd=self.folder, stdout=output, stderr=output, check=True, timeout=200)
        return engine_in(log.read_text())

    def driver(self, words: list[str], mappings: dict[str, str]) -> StudyDriver:
        """Returns the driver of a study of a command."""
        host = this_host()
        arguments = StudyArguments(
            command=tuple(words),
            arg_mappings=mappings,
            model_dir=self.folder,
            start_profile_step=1,
            end_profile_step=1,
        )
        experiment = read_command(words, mappings, self.folder, host)
        paths = StudyPaths(self._study)
        paths.trials.mkdir(parents=True)
        place = ThisHost(self._starter, host, self.lock_dir)
        log = logging.getLogger(f"test.{self._study}")
        setup = StudySetup.now("study", time.time(), experiment, arguments, paths, host)
        return StudyDriver(setup, place, log)


@pytest.fixture
def runs(tmp_path: Path, warm_starter: WarmStarter, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return Runs(tmp_path, warm_starter)


def measured(driver: StudyDriver, plan: TrialPlan | None) -> TrialResult:
    """Runs a trial to its end."""
    assert plan is not None
    (result,) = driver.run(Work((plan,)))
    assert isinstance(result, TrialResult)
    assert result.outcome is Outcome.COMPLETED, result.reason
    driver.tell(result)
    return result


def expect_followed(driver: StudyDriver, plain: Triple) -> None:
    """Runs a study as far as it takes to see that it submits what was typed, and that a candidate arrives."""
    measured(driver, driver.profile_plan())
    submitted = driver.submitted_plan()
    assert submitted is not None
    own = submitted.candidate
    assert (own.micro_batch_size, own.gradient_accumulation_steps) == plain[:2]
    assert engine_of(measured(driver, submitted)) == plain
    other = Candidate(**{**own.model_dump(), "micro_batch_size": 6, "gradient_accumulation_steps": 1})
    result = measured(driver, driver.plan_again(Purpose.CONFIRM, other))
    assert engine_of(result) == (6, 1, 6)
    assert result.micro_batch_arrived == 6


@pytest.mark.parametrize("case", ALL)
def test_what_is_typed_is_the_users_configuration_and_a_candidate_arrives(runs: Runs, case: Case) -> None:
    runs.write_files(case)
    plain = runs.plainly(case)
    environment = [f"{name}={value}" for name, value in case.environment.items()]
    expect_followed(runs.driver([*environment, "python", "train.py", *case.arguments], case.mappings), plain)


AUTO = dict.fromkeys(KEYS.values(), "auto")
BY_TRAINER = "torchrun --nproc_per_node 1 by_trainer.py"
TRAINER = f"{BY_TRAINER} --deepspeed ds.json {' '.join(TRAINER_FLAGS)} --report_to none --output_dir out --max_steps 2"
ACCELERATE = "EPOCHS=1 accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
LIBRARIES = {
    "trainer": (f"{TRAINER} --per_device_train_batch_size 4 --gradient_accumulation_steps 2", AUTO, ""),
    "trainer, no accumulation": (f"{TRAINER} --per-device-train-batch-size=4", AUTO, ""),
    "trainer, numbers": (f"{TRAINER} --per_device_train_batch_size 4", {**AUTO, MICRO_BATCH: 4, TRAIN_BATCH: 4}, ""),
    "trainer, in code": (f"IN_CODE=1 {BY_TRAINER}", AUTO, ""),
    "accelerate": (f"{ACCELERATE} --use_deepspeed by_accelerate.py --batch 4", AUTO, "--batch"),
    "accelerate, accumulation": (
        f"{ACCELERATE} --use_deepspeed --gradient_accumulation_steps 2 by_accelerate.py --batch=4",
        AUTO,
        "--batch",
    ),
    "accelerate, in code": (f"IN_CODE=1 {ACCELERATE} --use_deepspeed by_accelerate.py", AUTO, "--batch"),
    "accelerate, file": (
        f"{ACCELERATE} --use_deepspeed --deepspeed_config_file ds.json by_accelerate.py",
        {**AUTO, ACCUMULATION: 2},
        "--batch",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(("command", "config", "mapped"), LIBRARIES.values(), ids=LIBRARIES)
def test_what_is_typed_for_a_library_is_the_users_configuration(
    runs: Runs, command: str, config: dict[str, object], mapped: str
) -> None:
    (runs.folder / "ds.json").write_text(json.dumps({**config, "zero_optimization": {"stage": 1}}))
    plain = runs.typed(command.split())
    words = [word for word in command.split() if word != "EPOCHS=1"]
    expect_followed(runs.driver(words, {MICRO_BATCH: mapped} if mapped else {}), plain)
