"""Whether a process may still be forked, as far as the devices' drivers are concerned. Runs in the user's environment.

A driver that is initialised does not work in a child of the process. It has its own files open.
"""

import contextlib
from pathlib import Path

# Each is opened by its driver's initialisation, by whichever library.
_FILES = {"/dev/nvidia-uvm": "CUDA", "/dev/kfd": "ROCm"}


def initialised_driver() -> str | None:
    """Returns the name of the driver that this process has initialised; None for none."""
    links = _open_files()
    return next((name for file, name in _FILES.items() if any(link.startswith(file) for link in links)), None)


def _open_files() -> list[str]:
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(str(descriptor.readlink()))
    return links
