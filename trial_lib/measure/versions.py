"""The versions of the libraries that a rank has."""

import contextlib
import platform
from importlib.metadata import PackageNotFoundError, version

# Libraries of the user's in which a training may spend its time.
_ALSO_DECIDE_SPEED = ("accelerate", "bitsandbytes", "flash-attn", "peft", "transformers", "triton", "xformers")


def versions_here() -> dict[str, str]:
    """Returns the versions of Python, torch, DeepSpeed and what else decides the speed of this process's program."""
    import deepspeed
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__, "deepspeed": deepspeed.__version__}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    for package in _ALSO_DECIDE_SPEED:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
