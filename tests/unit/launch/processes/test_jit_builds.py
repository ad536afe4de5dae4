"""What is said of an op before it is built: a new one, and one that is built again."""

import os
import subprocess
import sys
from pathlib import Path

from trial_lib.wire import build_times

# DeepSpeed's part of an op's builder, over torch's own builds of an extension that takes a second.
BUILD = """
from pathlib import Path
from trial_lib.leave_alone import timed_builds
import sys
from types import SimpleNamespace
import deepspeed.accelerator
from torch.utils import cpp_extension
from trial_lib.launch.processes import jit_builds

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
SOURCE = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "counts", 0, -1, 0};
PyMODINIT_FUNC PyInit_counts(void) { return PyModule_Create(&module); }
"""


def test_an_op_that_is_built_again_is_told_of_as_one_that_is_new(tmp_path: Path) -> None:
    source = tmp_path / "counts.cpp"
    source.write_text(SOURCE)
    builds = tmp_path / "extensions"
    builds.mkdir()

    def said(*flags: str) -> list[str]:
        program = [sys.executable, "-c", BUILD.format(source=str(source), folder=str(tmp_path)), *flags]
        environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(builds)}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ended = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
        return [line for line in ended.stdout.splitlines() if line.startswith(("building", "DeepSpeed's"))]

    assert said() == ["building DeepSpeed's counts (once on this machine; one to three minutes)"]
    # A rank's deadline passes over it.
    assert build_times.seconds(tmp_path) > 0.1
    assert said() == []
    again = "again, for its flags or sources are others now"
    assert said("-DOTHER") == [f"building DeepSpeed's counts ({again}; one to three minutes)"]
    (failed,) = said("-DOTHER", "-std=none")[1:]
    assert failed.startswith("DeepSpeed's counts cannot be built: ")
