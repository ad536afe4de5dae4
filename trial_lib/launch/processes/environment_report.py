"""Reports what torch and DeepSpeed find in the ranks' environment, as JSON.

Runs in the user's environment, in a process of its own, because it imports both and a broken driver may block it.
"""

import contextlib
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trial_lib.launch.processes import jit_builds

_NO_TOOLKIT = "there is no nvcc, the compiler of the CUDA toolkit, where CUDA_HOME is"
_COLOUR = re.compile(r"\x1b\[\d+m")


def report() -> dict[str, Any]:
    """Returns the versions, the devices that torch sees, and the state of each of DeepSpeed's ops.

    `torch_cuda` is the CUDA that torch was built for, or None; `accelerator` is DeepSpeed's name of the device.
    """
    # DeepSpeed imports mlflow if it is installed, which takes seconds.
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from deepspeed.ops.op_builder.builder import CUDAOpBuilder
    from torch.utils.cpp_extension import CUDA_HOME

    # If torch has CUDA, DeepSpeed builds these with the toolkit (op_builder/builder.py, jit_load), and does not look
    # for its compiler before.
    needs_toolkit = CUDAOpBuilder if torch.version.cuda and get_accelerator()._name == "cuda" else ()
    has_toolkit = CUDA_HOME is not None and shutil.which("nvcc", path=str(Path(CUDA_HOME) / "bin")) is not None
    folders = jit_builds.build_folders(os.environ)
    ops = {}
    for name, builder in ALL_OPS.items():
        if name == "deepspeed_not_implemented":
            continue
        said = io.StringIO()
        can_build = False
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(Exception):
            can_build = bool(builder.is_compatible(verbose=True))
        why = " ".join(_COLOUR.sub("", said.getvalue()).split())
        with_cuda = isinstance(builder, needs_toolkit)
        if can_build and with_cuda and not has_toolkit:
            can_build, why = False, _NO_TOOLKIT
        ops[name] = {
            "built": bool(installed_ops.get(name)) or is_built(name, folders, with_cuda),
            "can_build": can_build,
            "why": why,
        }
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "deepspeed": deepspeed.__version__,
        "accelerator": get_accelerator()._name,
        "ops": ops,
    }


def is_built(name: str, folders: Iterable[Path], with_cuda: bool) -> bool:
    """Whether an extension is built for this Python, and with CUDA or without. Builds of both kinds share a folder."""
    other = re.compile(rf"py(?!{sys.version_info[0]}{sys.version_info[1]}_)\d+_")
    return any(
        folder.name == name
        and (folder / f"{name}.so").exists()
        and not other.match(folder.parent.name)
        and _links_cuda(folder, with_cuda) is with_cuda
        for folder in folders
    )


def _links_cuda(folder: Path, unknown: bool) -> bool:
    # Whether a build is linked with CUDA, by ninja's file. Without that file, the value that is passed.
    try:
        return "-lcudart" in (folder / "build.ninja").read_text()
    except OSError:
        return unknown


def main(arguments: list[str]) -> None:
    with os.fdopen(int(arguments[0]), "w") as file:
        file.write(json.dumps(report()))
