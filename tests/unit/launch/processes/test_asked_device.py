"""A GPU is asked by a child, so that the process itself stays fit to fork; the GPU, and who asks it, are made up."""

import subprocess
import sys
from pathlib import Path

import pytest

# To ask the GPU opens a file of its driver's, for good.
GPU = """
import os, types
import torch
from zerotune.trial_lib.launch.processes.environment_check import asked_by_a_child

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


@pytest.mark.long
def test_what_the_gpu_s_driver_raises_is_raised_where_it_is_asked(tmp_path: Path) -> None:
    program = """
with asked_by_a_child(lambda: True):
    try:
        torch.cuda.get_device_properties(7)
    except RuntimeError as error:
        print(error, len(opened))
"""
    assert said(program, tmp_path) == "AssertionError: Invalid device id 0"


@pytest.mark.long
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
from zerotune.trial_lib.launch.processes import jit_builds
from zerotune.trial_lib.launch.processes import fork_server as priming
from zerotune.trial_lib.launch.processes import fork_server as forks
forks._FILES = {file: "CUDA"}
priming.remember_cpu_info = lambda: None
jit_builds.build = lambda builders, note, only_built: None
ours, theirs = socket.socketpair()
priming.prime(ours, [])
deepspeed = sys.modules["deepspeed"]
print(deepspeed.major, deepspeed.capability, len(opened), priming.doubt())
"""
    assert said(program, tmp_path, tmp_path) == "9 (9, 0) 0 None"


@pytest.mark.long
def test_gpus_are_counted_by_a_child_until_the_process_is_a_rank(tmp_path: Path) -> None:
    program = """
from zerotune.trial_lib.launch.processes.environment_check import count_by_a_child, make_up
counted_here = []
def device_count():
    counted_here.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return 8 if os.environ.get("CUDA_VISIBLE_DEVICES") is None else 1
torch.cuda.device_count = device_count
count_by_a_child(lambda: True)
from torch.cuda import device_count as imported_early
print(torch.cuda.device_count(), imported_early(), len(counted_here))
os.environ["CUDA_VISIBLE_DEVICES"] = "3"
print(imported_early(), len(counted_here))
make_up()
print(imported_early(), torch.cuda.device_count is device_count, len(counted_here))
"""
    assert said(program, tmp_path).splitlines() == ["8 8 0", "1 0", "1 True 1"]


NVML = """
import sys, types
nvml = sys.modules["pynvml"] = types.ModuleType("pynvml")
begun = []
def nvmlInit():
    if {broken}:
        raise OSError("the driver is not loaded")
    begun.append(os.getpid())
nvml.nvmlInit = nvmlInit
from zerotune.trial_lib.launch.processes.environment_check import make_up
"""


@pytest.mark.long
def test_nvml_is_initialised_in_the_ranks_alone(tmp_path: Path) -> None:
    program = """
with asked_by_a_child(lambda: True):
    nvml.nvmlInit()
    print(begun, flush=True)
print(nvml.nvmlInit is nvmlInit, flush=True)
child = os.fork()
if child == 0:
    make_up()
    print(begun == [os.getpid()], flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(begun)
"""
    assert said(NVML.format(broken=False) + program, tmp_path).splitlines() == ["[]", "True", "True", "[]"]


@pytest.mark.long
def test_nvml_that_fails_says_so_at_once(tmp_path: Path) -> None:
    program = """
with asked_by_a_child(lambda: True):
    try:
        nvml.nvmlInit()
    except OSError as error:
        print(error)
"""
    assert said(NVML.format(broken=True) + program, tmp_path) == "the driver is not loaded"
