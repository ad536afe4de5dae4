"""What is asked of libcuda itself: its order of devices, and whether a process has initialised it.

The library is made up here: a few functions in C that answer as CUDA's driver documents it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerotune.trial_lib.device.cuda_variables import cuda_order
from zerotune.trial_lib.launch.processes import fork_server as priming

_SOURCE = r"""
#include <stdlib.h>
#include <string.h>
static int initialised = 0;
int cuInit(unsigned flags) { initialised = 1; return 0; }
int cuDeviceGetCount(int *count) { if (!initialised) return 3; *count = 2; return 0; }
int cuDeviceGet(int *device, int number) { if (!initialised) return 3; *device = number; return 0; }
int cuDeviceGetUuid(unsigned char *uuid, int device) {
    if (!initialised) return 3;
    int by_bus = !strcmp(getenv("CUDA_DEVICE_ORDER") ?: "", "PCI_BUS_ID");
    memset(uuid, device == by_bus ? 0xab : 0x11, 16);
    return 0;
}
"""


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the library."""
    folder = tmp_path_factory.mktemp("cuda")
    source, library = folder / "cuda.c", folder / "libcuda.so.1"
    source.write_text(_SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)], check=True)
    return folder


def test_the_order_is_cudas_own(libcuda: Path) -> None:
    variables = {**os.environ, "LD_LIBRARY_PATH": str(libcuda), "CUDA_VISIBLE_DEVICES": "1"}
    variables.pop("CUDA_DEVICE_ORDER", None)
    assert cuda_order(variables) == [
        "GPU-abababab-abab-abab-abab-abababababab",
        "GPU-11111111-1111-1111-1111-111111111111",
    ]


def test_the_order_is_that_of_the_environment_that_is_asked_about(libcuda: Path) -> None:
    variables = {**os.environ, "LD_LIBRARY_PATH": str(libcuda), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert cuda_order(variables)[0].startswith("GPU-1111")


def test_where_cuda_cannot_be_loaded_there_is_no_order(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("not a library")
    assert cuda_order({**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}) == []


_ASKS = """
import ctypes, sys
from zerotune.trial_lib.launch.processes.fork_server import initialised_driver
print(initialised_driver())
cuda = ctypes.CDLL(sys.argv[1])
print(initialised_driver())
cuda.cuInit(0)
print(initialised_driver())
"""


def test_a_process_that_has_initialised_cuda_is_found_where_no_file_tells_of_it(libcuda: Path) -> None:
    asked = subprocess.run(
        [sys.executable, "-c", _ASKS, str(libcuda / "libcuda.so.1")], capture_output=True, text=True, check=True
    )
    assert asked.stdout.split() == ["None", "None", "CUDA"]


@pytest.mark.parametrize(
    ("opened", "driver"),
    [
        ([], None),
        (["/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"], None),
        (["/dev/nvidiactl", "/dev/nvidia-uvm"], "CUDA"),
        (["/dev/kfd"], "ROCm"),
    ],
)
def test_a_driver_is_initialised_once_its_own_file_is_open(
    monkeypatch: pytest.MonkeyPatch, opened: list[str], driver: str | None
) -> None:
    monkeypatch.setattr(priming, "_open_files", lambda: opened)
    assert priming.initialised_driver() == driver
