"""What is said of an op before it is built: a new one, and one that is built again."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerotune.trial_lib.messages import build_times

# DeepSpeed's part of an op's builder, over torch's own builds of an extension that takes a second.
BUILD = """
from pathlib import Path
from zerotune.trial_lib.rank import redirects as timed_builds
import sys
import time
from types import SimpleNamespace
import deepspeed.accelerator
from torch.utils import cpp_extension
from zerotune.trial_lib.launch.processes import jit_builds

class Builder:
    name = "counts"
    def is_compatible(self, verbose): return True
    def load(self, verbose):
        cpp_extension.load("counts", [{source!r}], extra_cflags=sys.argv[1:], verbose=verbose)

timed_builds.note_builds(Path({folder!r}))
accelerator = SimpleNamespace(create_op_builder=lambda name: Builder())
deepspeed.accelerator.get_accelerator = lambda: accelerator
jit_builds.build(["CountsBuilder"], print)
"""
SAYS = ("building", "DeepSpeed's", "waiting")
ONCE = "building DeepSpeed's counts (once for this environment; one to three minutes)"
WAITING = "waiting for another process that builds counts"
SOURCE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "counts", 0, -1, 0};
PyMODINIT_FUNC PyInit_counts(void) { return PyModule_Create(&module); }
"""


class Op:
    """An op of one C++ file, and the process that builds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.builds = folder / "extensions"
        self.builds.mkdir()
        (folder / "counts.cpp").write_text(SOURCE)

    def start(self, *flags: str) -> "subprocess.Popen[str]":
        program = BUILD.format(source=str(self.folder / "counts.cpp"), folder=str(self.folder))
        environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(self.builds)}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        command = [sys.executable, "-u", "-c", program, *flags]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def said(self, *flags: str) -> list[str]:
        building = self.start(*flags)
        printed, errors = building.communicate()
        assert building.returncode == 0, errors
        return [line for line in printed.splitlines() if line.startswith(SAYS)]


@pytest.fixture
def op(tmp_path: Path) -> Op:
    return Op(tmp_path)


@pytest.mark.long
def test_an_op_that_is_built_again_is_told_of_as_one_that_is_new(op: Op) -> None:
    assert op.said() == [ONCE]
    # A rank's deadline passes over it.
    assert build_times.seconds(op.folder) > 0.1
    assert op.said() == []
    again = "again, for its flags or sources are others now"
    assert op.said("-DOTHER") == [f"building DeepSpeed's counts ({again}; one to three minutes)"]
    (failed,) = op.said("-DOTHER", "-std=none")[1:]
    assert failed.startswith("DeepSpeed's counts cannot be built: ")


@pytest.mark.long
def test_a_process_says_that_it_waits_for_another_that_builds(op: Op) -> None:
    with (op.builds / ".counts.zerotune.lock").open("w") as around:
        fcntl.flock(around, fcntl.LOCK_EX)
        building = op.start()
        assert building.stdout is not None
        assert next(line for line in building.stdout if line.startswith(SAYS)) == f"{WAITING}\n"
        fcntl.flock(around, fcntl.LOCK_UN)
        printed, errors = building.communicate()
    assert (building.returncode, ONCE in printed.splitlines()) == (0, True), errors


@pytest.mark.long
def test_a_build_is_taken_from_torch_s_own_folder_and_left_there(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    home = op.folder / "home"
    monkeypatch.setenv("HOME", str(home))
    roots = [home / ".cache" / "torch_extensions" / f"zerotune-{name}" for name in "ab"]
    op.builds = roots[0]
    assert op.said() == [ONCE]
    (usual,) = (home / ".cache" / "torch_extensions").glob("py*/counts")
    assert (usual / "counts.so").read_bytes() == (roots[0] / "counts" / "counts.so").read_bytes()
    op.builds = roots[1]
    assert op.said() == []
    # A training without ZeroTune finds nothing to do there either.
    op.builds = usual.parent
    assert op.said() == []
    # What a training of another environment has built there does no harm.
    assert len(op.said("-DOTHER")) == 1
    for op.builds in roots:
        assert op.said() == []


@pytest.mark.long
def test_a_killed_build_leaves_nothing_half_and_the_next_one_is_whole(op: Op) -> None:
    (op.folder / "counts.cpp").write_text(f"{SOURCE}\nint slow() {{ return 0; }}\n")
    compiler = op.folder / "slow-c++"
    compiler.write_text('#!/bin/sh\nc++ "$@"\ntouch "$0.ran"\nsleep 60\n')
    compiler.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(compiler))
        building = op.start()
        assert building.stdout is not None
        while not (op.folder / "slow-c++.ran").exists():
            assert building.poll() is None
            time.sleep(0.05)
        building.kill()
        building.communicate()
    assert not list(op.builds.glob("counts/*.o"))
    left = list(op.builds.glob("counts/.building-*"))
    assert op.said()[-1].startswith("building DeepSpeed's counts (")
    assert (op.builds / "counts" / "counts.so").exists()
    assert not any(path.exists() for path in left)
