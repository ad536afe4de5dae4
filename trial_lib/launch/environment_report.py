"""What torch and DeepSpeed say of the environment that the ranks run in, as JSON on standard output.

Runs in the user's environment, in a process of its own: it imports both, and a broken driver can hold it up for ever.
"""

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trial_lib.launch import jit_builds

_COLOUR = re.compile(r"\x1b\[\d+m")


def report() -> dict[str, Any]:
    """Returns the versions, the devices that torch sees, and of each of DeepSpeed's ops whether it can be built or is.

    Returns:
        `python`, `torch`, `torch_cuda` (the CUDA that torch was built for; None without), `torch_sees` (CUDA devices),
        `deepspeed`, `accelerator` (DeepSpeed's name of the device), and `ops`: by name, `built`, `can_build` and, where
        it cannot, `why`.
    """
    # DeepSpeed imports mlflow where it is installed, which takes seconds.
    sys.modules["mlflow"] = None  # type: ignore[assignment]
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    built = _built(jit_builds.build_folders(os.environ))
    ops = {}
    for name, builder in ALL_OPS.items():
        if name == "deepspeed_not_implemented":
            continue
        said = io.StringIO()
        can_build = False
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(Exception):
            can_build = bool(builder.is_compatible(verbose=True))
        ops[name] = {
            "built": bool(installed_ops.get(name)) or name in built,
            "can_build": can_build,
            "why": " ".join(_COLOUR.sub("", said.getvalue()).split()),
        }
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "torch_sees": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "deepspeed": deepspeed.__version__,
        "accelerator": get_accelerator()._name,
        "ops": ops,
    }


def _built(folders: Iterable[Path]) -> set[str]:
    """Returns the extensions that are built for this Python."""
    other = re.compile(rf"py(?!{sys.version_info[0]}{sys.version_info[1]}_)\d+_")
    return {
        folder.name
        for folder in folders
        if (folder / f"{folder.name}.so").exists() and not other.match(folder.parent.name)
    }


def main(arguments: list[str]) -> None:
    """Writes the report to the file descriptor that is named: libraries print what they like to standard output."""
    with os.fdopen(int(arguments[0]), "w") as file:
        file.write(json.dumps(report()))
