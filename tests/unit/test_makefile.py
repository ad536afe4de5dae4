"""`make demo` with commands that only note that they ran: their order, two at a time, and what follows a Ctrl-C."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Notes when it begins and ends. `HANGS` is part of the command line of one that does not end by itself.
COMMAND = """#!/bin/sh
line="$(basename $0) $*"
case "$line" in
    *'version("torch")'*) test -n "$TORCH" && echo "torch==$TORCH"; exit ;;
    *this_host*) echo 2; exit ;;
    "pip -q show"*) test -n "$THERE"; exit ;;
esac
echo "begins $line" >> "$NOTES"
if test -n "$HANGS"; then case "$line" in *"$HANGS"*) exec sleep 60 ;; esac; fi
sleep 0.2
echo "ends $line" >> "$NOTES"
"""
RANKS, PACKAGES, OPS, STUDY = "torch deepspeed", "-e .", "-m zerotune.flows.prepare examples", "zerotune adaptive"
FETCHES = ("-w .venv/wheels/.fetched-prefect", "-w .venv/wheels/.fetched-others")


class Demo:
    """A copy of the Makefile beside such an environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.venv = folder / ".venv"
        for file in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / file, folder)
        shutil.copytree(ROOT / "examples" / "hello_deepspeed", folder / "examples" / "hello_deepspeed")
        (self.venv / "bin").mkdir(parents=True)
        for name in ("pip", "python", "zerotune"):
            command = self.venv / "bin" / name
            command.write_text(COMMAND)
            command.chmod(0o755)
        self.notes = folder / "notes"

    def start(self, hangs: str = "", torch: str = "", there: str = "") -> "subprocess.Popen[str]":
        self.notes.write_text("")
        # `make test` may have been told of another environment, and hands that on.
        outer = ("MAKE", "MFLAGS", "VENV", "CONSTRAINTS", "PYTHON")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
        return subprocess.Popen(
            # In the background of a script, this test itself may ignore the signal.
            ["env", "--default-signal=INT", "make", "demo"],
            cwd=self.folder,
            env={**environment, "NOTES": str(self.notes), "HANGS": hangs, "TORCH": torch, "THERE": there},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, torch: str = "", there: str = "") -> None:
        make = self.start(torch=torch, there=there)
        said, _ = make.communicate(timeout=60)
        assert make.returncode == 0, said

    def when(self, event: str, command: str) -> int:
        """Returns in which line of the notes a command has begun or ended; -1 if in none."""
        lines = self.notes.read_text().splitlines()
        return next((at for at, line in enumerate(lines) if line.startswith(event) and command in line), -1)

    def wait_for(self, event: str, command: str) -> None:
        until = time.monotonic() + 30
        while self.when(event, command) < 0:
            assert time.monotonic() < until, self.notes.read_text()
            time.sleep(0.02)


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    return Demo(tmp_path)


def test_the_rest_is_fetched_while_torch_is_installed(demo: Demo) -> None:
    demo.run()
    for fetch in FETCHES:
        assert demo.when("begins", fetch) < demo.when("ends", RANKS)
        assert demo.when("ends", fetch) < demo.when("begins", PACKAGES)
    lists = [(demo.venv / f"{Path(fetch).name}.txt").read_text().split() for fetch in FETCHES]
    dependencies = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert dependencies is not None
    named = set(re.findall(r'"(.*)"', dependencies[1]))
    assert set(lists[0]).isdisjoint(lists[1])
    assert {*lists[0], *lists[1]} == named


def test_what_is_installed_is_not_fetched(demo: Demo) -> None:
    demo.run(there="mlflow")
    assert [demo.when("begins", fetch) for fetch in FETCHES] == [-1, -1]
    assert demo.when("ends", PACKAGES) >= 0


def test_ops_are_built_while_pip_installs_the_rest(demo: Demo) -> None:
    demo.run()
    assert demo.when("ends", RANKS) < min(demo.when("begins", OPS), demo.when("begins", PACKAGES))
    assert demo.when("begins", OPS) < demo.when("ends", PACKAGES) < demo.when("begins", STUDY)
    assert demo.when("begins", PACKAGES) < demo.when("ends", OPS)


def test_the_second_time_there_is_only_the_study(demo: Demo) -> None:
    demo.run()
    demo.run()
    assert [line.split()[1] for line in demo.notes.read_text().splitlines()] == ["zerotune", "zerotune"]


def test_the_study_begins_beside_a_build_that_takes_longer(demo: Demo) -> None:
    make = demo.start(hangs=OPS)
    try:
        demo.wait_for("ends", STUDY)
    finally:
        os.killpg(make.pid, signal.SIGKILL)
        make.communicate()


@pytest.mark.parametrize(("interrupted", "again"), [(PACKAGES, (PACKAGES, STUDY)), (OPS, (OPS, STUDY))])
def test_after_a_ctrl_c_make_does_what_is_not_done(demo: Demo, interrupted: str, again: tuple[str, ...]) -> None:
    make = demo.start(hangs=interrupted)
    try:
        demo.wait_for("begins", interrupted)
        # What is done meanwhile stays done.
        demo.wait_for("ends", OPS if interrupted == PACKAGES else STUDY)
        time.sleep(0.2)
        os.killpg(make.pid, signal.SIGINT)
        make.communicate(timeout=30)
    finally:
        if make.poll() is None:
            os.killpg(make.pid, signal.SIGKILL)
            make.communicate()
    assert make.returncode != 0
    demo.run()
    assert demo.when("begins", RANKS) < 0
    for command in (PACKAGES, OPS, STUDY):
        assert (demo.when("ends", command) >= 0) is (command in again), command


def test_a_package_whose_installation_was_killed_is_installed_again(demo: Demo) -> None:
    packages = demo.venv / "lib" / "python3.11" / "site-packages"
    for name in ("whole-1.0.dist-info", "half-1.0.dist-info"):
        (packages / name).mkdir(parents=True)
        (packages / name / "METADATA").touch()
    (packages / "whole-1.0.dist-info" / "INSTALLER").write_text("pip\n")
    demo.run()
    assert [path.name for path in packages.iterdir()] == ["whole-1.0.dist-info"]


@pytest.mark.parametrize("there", ["", "2.7.1+cu126"])
def test_a_torch_that_is_there_stays(demo: Demo, there: str) -> None:
    demo.run(torch=there)
    tested = (ROOT / "constraints.txt").read_text()
    pins = (demo.venv / "constraints.txt").read_text().splitlines()
    (pin,) = [line for line in pins if line.startswith("torch==")]
    assert pin == f"torch=={there}" if there else f"{pin}\n" in tested
    assert len(pins) == len(tested.splitlines())


def test_no_unit_test_wants_the_machine_for_itself() -> None:
    """`make test` looks for such tests in the other folders alone."""
    files = [file for file in (ROOT / "tests" / "unit").rglob("test_*.py") if file != Path(__file__)]
    assert files
    assert [file.name for file in files if "mark.alone" in file.read_text()] == []
