"""The folder where ranks build DeepSpeed's operators: one for each environment that builds them differently.

In torch's own folder two environments with one version of Python rebuild each other's operators in turn, because their
paths, or their versions of ninja, differ. So ZeroTune has a folder for each beside it. `jit_builds` copies what fits
from torch's folder, and leaves a copy there for trainings without ZeroTune.
"""

import hashlib
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path

from trial_lib.launch.processes.jit_builds import NAMED, OWN
from trial_lib.study.kept.data_folder import can_be_written, data_folder

# Variables that change the commands of a build (torch/utils/cpp_extension.py, deepspeed/ops/op_builder/builder.py).
_VARIABLES = (
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDA_HOME", "ROCM_HOME"),
    *("TORCH_CUDA_ARCH_LIST", "PYTORCH_ROCM_ARCH", "DS_ACCELERATOR", "PYTORCH_NVCC", "TORCH_DONT_CHECK_COMPILER_ABI"),
)
_PACKAGES = ("torch", "deepspeed")
_DIGITS = 12


def build_root(environment: Mapping[str, str]) -> Path:
    """Returns the folder that torch builds extensions in."""
    named = environment.get(NAMED)
    # Path.home() raises if there is no home folder.
    home = environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111
    return Path(named) if named else Path(home, ".cache", "torch_extensions")


def with_build_folder(environment: Mapping[str, str], interpreter: str) -> dict[str, str]:
    """Returns the environment of ranks, with ZeroTune's folder for the builds of their environment.

    A folder that the user names stays. If torch's folder cannot be written, ZeroTune's is in its own data folder. If
    that cannot be written either, torch's stays. A program that needs no operator still runs, and another one reports
    what it could not do.

    Args:
        environment: of the ranks.
        interpreter: of the ranks.
    """
    if environment.get(NAMED):
        return dict(environment)
    name = f"{OWN}{_key(environment, interpreter)}"
    for root in (build_root(environment), data_folder() / "torch_extensions"):
        # Without a home folder ZeroTune has no folder either.
        if root.is_absolute() and can_be_written(root):
            return {**environment, NAMED: str(root / name)}
    return dict(environment)


def _key(environment: Mapping[str, str], interpreter: str) -> str:
    """Returns a name for all that a build depends on. Source files that change are ninja's to notice."""
    prefix = Path(interpreter).absolute().parent.parent
    # A virtual environment may take those of its base, and a user has some at home. Debian calls them dist-packages.
    base = Path(interpreter).resolve().parent.parent
    roots = (prefix, base, base / "local", Path(environment.get("HOME", base), ".local"))
    packages = [
        str(path)
        for root in dict.fromkeys(roots)
        for package in _PACKAGES
        for path in sorted(root.glob(f"lib*/python*/*-packages/{package}-*"))
    ]
    # Another version of ninja takes everything for outdated.
    ninja = shutil.which("ninja", path=environment.get("PATH"))
    ninja_file = () if ninja is None else (os.path.realpath(ninja), Path(ninja).stat().st_mtime_ns)
    variables = {name: environment.get(name, "") for name in _VARIABLES}
    whole = [str(prefix), packages, ninja_file, variables, _processor()]
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:_DIGITS]


def _processor() -> list[str]:
    """Returns what the compilers see of the processor. A home folder may be shared by hosts of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        lines = []
    return [platform.machine(), *(line for line in lines if line.startswith(("model name", "flags", "Features")))]
