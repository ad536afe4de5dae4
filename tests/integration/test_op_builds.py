"""Ops are built beside what runs, trials that need them wait, and nothing of a build outlives who wanted it."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import PROGRAMS, Trials
from study_fixtures import BIN, Zerotune

from zerotune.trial_lib.launch import starters
from zerotune.trial_lib.launch.rank_starter import LaunchRequest, RankRequest
from zerotune.trial_lib.launch.starters import ColdStarter, rank_environment
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import TrialResult

# DeepSpeed's part of an op: one takes its time, one lacks a compiler, one a library, and one there is not here.
DEEPSPEED = """
import pathlib, subprocess, sys

class Builder:
    def __init__(self, name):
        self.name = name
    def is_compatible(self, verbose):
        print("\\x1b[93m [WARNING] \\x1b[0m async_io requires the dev libaio .so object")
        return self.name != "async_io"
    def load(self, verbose):
        if self.name == "quantizer":
            raise RuntimeError("CUDA_HOME does not exist, unable to compile CUDA op(s)\\nmore")
        started = pathlib.Path({folder!r}) / (self.name + ".started")
        started.touch()
        # As ninja: a process of the builder's.
        subprocess.run([sys.executable, "-S", "-c", "import time; time.sleep({seconds})"])
        (started.parent / self.name).touch()

class Accelerator:
    def create_op_builder(self, name):
        names = {{"QuantizerBuilder": "quantizer", "AsyncIOBuilder": "async_io"}}
        names |= dict.fromkeys(["SlowBuilder", "ShareMemCommBuilder"], "slow")
        return Builder(names[name]) if name in names else None

get_accelerator = Accelerator
"""
ROOT = Path(__file__).parents[2]
RANK = """
import os, pathlib
def run(payload, rank):
    print(pathlib.Path('slow').exists(), flush=True)
    os._exit(0)
"""


class Building:
    """A starter for which ops are built, and what it says.

    Args:
        folder: where it does so.
        seconds: that the op takes which can be built.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        package = folder / "deepspeed" / "accelerator"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").write_text(DEEPSPEED.format(folder=str(folder), seconds=seconds))
        (folder / "op_builds_rank.py").write_text(RANK)
        self._folder = folder
        self.environment = rank_environment() | {
            "PYTHONPATH": str(folder),
            "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1",
        }
        self.notes: list[str] = []

    def starter(self, *ahead: str) -> ColdStarter:
        return ColdStarter(sys.executable, [], self.environment, self.notes.append, ahead)

    def request(self, beside_builds: bool) -> LaunchRequest:
        """Returns a trial whose only rank says whether it finds the op built."""
        rank = RankRequest(self.environment, str(self._folder / f"{beside_builds}.log"), [])
        return LaunchRequest(
            sys.executable,
            "op_builds_rank:run",
            {},
            str(self._folder),
            [rank],
            deadline_s=30.0,
            beside_builds=beside_builds,
        )

    def found_it_built(self, beside_builds: bool) -> bool:
        return (self._folder / f"{beside_builds}.log").read_text() == "True\n"


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


@pytest.mark.long
def test_the_profile_runs_beside_a_build_and_all_other_trials_after_it(tmp_path: Path) -> None:
    building = Building(tmp_path, seconds=2.0)
    starter = building.starter("SlowBuilder")
    try:
        for beside in (True, False):
            assert starter.launch(building.request(beside)).wait().statuses == [0]
        assert [building.found_it_built(beside) for beside in (True, False)] == [False, True]
        cannot = starter.build(["SlowBuilder", "QuantizerBuilder", "AsyncIOBuilder", "UnknownBuilder"])
    finally:
        starter.close()
    assert cannot == {
        "QuantizerBuilder": "CUDA_HOME does not exist, unable to compile CUDA op(s)",
        "AsyncIOBuilder": "async_io requires the dev libaio .so object",
        "UnknownBuilder": "this version of DeepSpeed has none for these devices",
    }
    assert building.notes == [f"DeepSpeed's quantizer cannot be built: {cannot['QuantizerBuilder']}"]


@pytest.mark.parametrize("killed", [pytest.param("nobody", marks=pytest.mark.long), "guard"])
def test_a_starter_that_is_closed_ends_its_builds(tmp_path: Path, killed: str) -> None:
    building = Building(tmp_path, seconds=600.0)
    starter = building.starter("SlowBuilder")
    starter._builds.start(starter._ahead)
    # Servers that the tests share have children too, which come and go.
    (watchdog,) = [each for each in psutil.Process().children() if "build" in each.cmdline()]
    before = [watchdog, *watchdog.children(recursive=True)]
    assert wait_until((tmp_path / "slow.started").exists)
    processes = [watchdog, *watchdog.children(recursive=True)]
    assert len(processes) >= 4
    assert set(before) <= set(processes)
    waiting = threading.Thread(target=starter.build, args=([],))
    waiting.start()
    if killed == "guard":
        processes[1].kill()
    else:
        starter.close()
    assert wait_until(lambda: not any(each.is_running() for each in processes), 5.0)
    waiting.join(5.0)
    assert not waiting.is_alive()
    starter.close()


@pytest.mark.long
def test_a_stopped_build_is_told_of_and_ends_when_its_starter_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starters, "_WORD_S", 0.5)
    building = Building(tmp_path, seconds=600.0)
    starter = building.starter("SlowBuilder")
    starter._builds.start(starter._ahead)
    assert wait_until((tmp_path / "slow.started").exists)
    (watchdog,) = [each for each in psutil.Process().children() if "build" in each.cmdline()]
    processes = [watchdog, *watchdog.children(recursive=True)]
    for process in processes:
        process.suspend()
    waiting = threading.Thread(target=starter.build, args=([],))
    waiting.start()
    assert wait_until(lambda: any("ops are still being built" in note for note in building.notes))
    starter.close()
    waiting.join(5.0)
    assert not waiting.is_alive()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.long
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_what_is_built_ahead_ends_with_the_process_that_prepares(tmp_path: Path, number: signal.Signals) -> None:
    building = Building(tmp_path, seconds=600.0)
    # A server is named: there is no database to migrate.
    environment = {**building.environment, "PREFECT_API_URL": "http://127.0.0.1:1/api"}
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{ROOT}"
    preparing = psutil.Popen(
        [sys.executable, "-m", "zerotune.flows.prepare"], env=environment, stderr=subprocess.DEVNULL
    )
    assert wait_until((tmp_path / "slow.started").exists)
    processes = preparing.children(recursive=True)
    assert len(processes) >= 3
    preparing.send_signal(number)
    preparing.wait(10)
    assert wait_until(lambda: not any(each.is_running() for each in processes), 5.0)


def first_run(trials: Trials, builds: Path, script: str, folder: Path) -> tuple[list[str], TrialResult]:
    """Runs a program as a study does first, in an environment without any build. Returns the types of its failures."""
    environment = {**rank_environment(), "TORCH_EXTENSIONS_DIR": str(builds)}
    plan = trials.plan(script, purpose=Purpose.PROFILE, environment=environment, model_dir=folder)
    plan = dataclasses.replace(plan, ends_at_unbuilt_ops=True)
    result = trials.start(plan, "cold").result()
    failures = plan.paths.root.glob("rank*.failure.json")
    return [
        f"{failed['type']} {failed['message']}" for failed in map(json.loads, map(Path.read_text, failures))
    ], result


def test_a_program_s_first_run_ends_where_its_engine_needs_an_op_that_is_not_built(
    trials: Trials, tmp_path: Path
) -> None:
    failures, _ = first_run(trials, tmp_path / "builds", "plain.py", PROGRAMS)
    assert failures == ["OpNotBuiltError ShareMemCommBuilder"]
    assert not list(tmp_path.glob("builds/*/*.o"))


@pytest.mark.long
def test_nothing_is_built_for_a_program_that_never_has_an_engine(trials: Trials, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import deepspeed\ndeepspeed.init_distributed()\nprint('no engine')\n")
    failures, result = first_run(trials, tmp_path / "builds", "train.py", tmp_path)
    assert not any("OpNotBuiltError" in failure for failure in failures)
    assert "without calling deepspeed.initialize" in result.reason
    assert not list(tmp_path.glob("builds/*/*.o"))


def environment_like_this_one(folder: Path) -> Path:
    """Makes an environment that has this one's packages under paths of its own. Returns its folder of commands."""
    venv.create(folder, symlinks=True)
    ours = Path(sysconfig.get_path("purelib"))
    for package in ours.iterdir():
        (folder / ours.relative_to(sys.prefix) / package.name).symlink_to(package)
    commands = folder / "bin"
    (commands / "ninja").symlink_to(BIN / "ninja")
    for name in ("zerotune", "deepspeed"):
        (commands / name).write_text((BIN / name).read_text().replace(f"#!{BIN}", f"#!{commands}"))
        (commands / name).chmod(0o755)
    return commands


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_environments_in_turn_build_their_ops_once_each(tmp_path: Path, home: Path) -> None:
    zerotune = Zerotune(tmp_path, home)
    config = zerotune.model / "ds_config.json"
    config.write_text(config.read_text().replace(', "torch_adam": true', ""))
    variables = {**zerotune.environment, "HOME": str(tmp_path)}
    variables.pop("TORCH_EXTENSIONS_DIR", None)
    command = ["zerotune", "random", str(zerotune.config), str(zerotune.model), "-mt", "2", "-z", "1", "-mct", "1"]
    builds = []
    for turn in range(3):
        for name in "ab":
            commands = tmp_path / name / "bin" if turn else environment_like_this_one(tmp_path / name)
            path = f"{commands}{os.pathsep}{variables['PATH']}"
            study = subprocess.run(
                [commands / command[0], *command[1:]],
                cwd=tmp_path,
                env={**variables, "PATH": path},
                capture_output=True,
                text=True,
            )
            assert study.returncode == 0, study.stderr
            builds.append(sorted(re.findall(r"building DeepSpeed's (\w+)", study.stderr)))
    assert builds == [["deepspeed_shm_comm", "fused_adam"]] * 2 + [[]] * 4
