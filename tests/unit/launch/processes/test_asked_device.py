"""A GPU is asked by a child, so that the process itself stays fit to fork; the GPU, and who asks it, are made up."""

import subprocess
import sys
from pathlib import Path

import pytest

# To ask the GPU opens a file of its driver's, for good.
GPU = """
import os, types
import torch
from trial_lib.launch.processes.asked_device import asked_by_a_child

opened, file = [], {file!r}
def get_device_properties(device=None):
    opened.append(open(file))
    if device == 7:
        raise AssertionError("Invalid device id")
    return types.SimpleNamespace(major=9, minor=0, name="H100", total_memory=80, _hidden=1, method=print)
torch.cuda.get_device_properties = get_device_properties
"""


def said(program: str, path: Path, *folders: Path) -> str:
    """Returns what a program prints, which has that GPU."""
    file = path / "nvidia-uvm"
    file.touch()
    code = GPU.format(file=str(file)) + program
    environment = {"PYTHONPATH": ":".join(map(str, [*folders, Path(__file__).parents[4]])), "PATH": "/usr/bin:/bin"}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # as the fork server has it
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_who_asks_is_told_and_the_process_has_nothing_of_the_driver(tmp_path: Path) -> None:
    program = """
with asked_by_a_child(lambda: True):
    found = torch.cuda.get_device_properties(0)
    print(torch.cuda.get_device_capability(), found.name, found.total_memory, sorted(vars(found)), len(opened))
"""
    assert said(program, tmp_path) == "(9, 0) H100 80 ['major', 'minor', 'name', 'total_memory'] 0"


def test_what_the_gpu_s_driver_raises_is_raised_where_it_is_asked(tmp_path: Path) -> None:
    program = """
with asked_by_a_child(lambda: True):
    try:
        torch.cuda.get_device_properties(7)
    except RuntimeError as error:
        print(error, len(opened))
"""
    assert said(program, tmp_path) == "AssertionError: Invalid device id 0"


@pytest.mark.parametrize("fit", ["over", "unfit"])
def test_a_process_that_need_not_or_must_not_fork_asks_by_itself(tmp_path: Path, fit: str) -> None:
    program = f"""
with asked_by_a_child(lambda: {fit == "over"}):
    kept = torch.cuda.get_device_properties
    if {fit == "unfit"}:
        kept(0)
if {fit == "over"}:
    kept(0)
print(len(opened), torch.cuda.get_device_properties is get_device_properties)
"""
    assert said(program, tmp_path) == "1 True"


def test_a_deepspeed_that_asks_when_it_is_imported_is_primed_without_a_trace_of_the_driver(tmp_path: Path) -> None:
    package = tmp_path / "deepspeed"
    for folder in (package, package / "ops", package / "accelerator"):
        folder.mkdir()
    (package / "__init__.py").write_text(
        "import torch\nfrom torch.cuda import get_device_capability\n"
        "major = torch.cuda.get_device_properties(0).major\ncapability = get_device_capability()\n"
    )
    (package / "ops" / "__init__.py").write_text("__compatible_ops__ = {}\n")
    (package / "accelerator" / "__init__.py").write_text(
        "class Accelerator:\n    def device_name(self): return 'cpu'\nget_accelerator = Accelerator\n"
    )
    program = """
import socket, sys
from trial_lib.launch.processes import jit_builds
from trial_lib.launch.processes import priming
from trial_lib.device.host import forks
forks._FILES = {file: "CUDA"}
priming.remember_cpu_info = lambda: None
jit_builds.build = lambda builders, note: None
ours, theirs = socket.socketpair()
priming.prime(ours, [])
deepspeed = sys.modules["deepspeed"]
print(deepspeed.major, deepspeed.capability, len(opened), priming.doubt())
"""
    assert said(program, tmp_path, tmp_path) == "9 (9, 0) 0 None"
