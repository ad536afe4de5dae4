"""What the doctor says of devices, of DeepSpeed's ops, of a compiler and of locks, on machines of all kinds."""

from pathlib import Path
from typing import Any

import pytest

from trial_lib.device.host.base import Host
from trial_lib.experiment.check import Verdict
from trial_lib.experiment.errors import InputError
from trial_lib.launch.build_checks import check_accelerators, check_compiler, check_environment, check_locks, check_ops

GPU = Host("cuda", ["0", "1"], 80 * 2**30)
CPU = Host("cpu", ["0", "1"], 10 * 2**30)
BUILT = {"built": True, "can_build": True, "why": ""}
CAN = {"built": False, "can_build": True, "why": ""}
CANNOT = {"built": False, "can_build": False, "why": "[WARNING] libaio is missing. [WARNING] install libaio-dev"}
SILENT = {"built": False, "can_build": False, "why": ""}


def report(torch_cuda: str | None = None, torch_sees: int = 0, **ops: dict[str, Any]) -> dict[str, Any]:
    return {
        "python": "3.11.7",
        "torch": "2.13.0",
        "torch_cuda": torch_cuda,
        "torch_sees": torch_sees,
        "deepspeed": "0.19.8",
        "accelerator": "cpu" if torch_cuda is None else "cuda",
        "ops": ops,
    }


@pytest.mark.parametrize(
    ("host", "driver", "torch_cuda", "sees", "verdict", "word"),
    [
        (CPU, None, None, 0, Verdict.OK, "no GPU; 2 slots of 10.0 GiB"),
        (GPU, "580.1", "12.8", 2, Verdict.OK, "2 slots of 80.0 GiB (GPUs, driver 580.1)"),
        (GPU, "580.1", None, 0, Verdict.FAIL, "built without CUDA"),
        (GPU, "450.1", "12.8", 0, Verdict.FAIL, "sees none"),
        (CPU, None, "12.8", 0, Verdict.WARN, "no NVIDIA driver answers"),
        (CPU, "580.1", "12.8", 0, Verdict.WARN, "CUDA_VISIBLE_DEVICES hides"),
    ],
)
def test_devices_that_torch_cannot_use_are_found(
    host: Host, driver: str | None, torch_cuda: str | None, sees: int, verdict: Verdict, word: str
) -> None:
    check = check_accelerators((host, driver), report(torch_cuda, sees))
    assert check.verdict is verdict
    assert word in check.said
    assert bool(check.remedy) is (verdict is not Verdict.OK)


def test_a_driver_that_does_not_answer_fails() -> None:
    silent = InputError("it hangs.", where="the NVIDIA driver", remedy="Restart.")
    check = check_accelerators(silent, report("12.8"))
    assert (check.verdict, check.said, check.remedy) == (Verdict.FAIL, "the NVIDIA driver: it hangs.", "Restart.")


def test_an_environment_that_cannot_import_deepspeed_fails() -> None:
    check = check_environment("/usr/bin/python3", "torch and DeepSpeed cannot be imported: No module named 'torch'")
    assert check.verdict is Verdict.FAIL
    assert "/usr/bin/python3" in check.said
    assert "No module named 'torch'" in check.said


def test_ops_are_named_by_whether_they_are_built_and_a_missing_one_that_is_wanted_fails() -> None:
    wanted = ("cpu_adam",)
    check = check_ops(report(cpu_adam=BUILT, fused_adam=CAN, async_io=CANNOT, gds=SILENT), wanted)
    assert check.verdict is Verdict.OK
    assert check.said == (
        "built: cpu_adam; can be built: fused_adam; "
        "cannot: async_io (libaio is missing), gds (DeepSpeed does not say why)"
    )
    check = check_ops(report(cpu_adam=CAN), wanted)
    assert check.verdict is Verdict.WARN
    assert "python -m flows.prepare" in check.remedy
    check = check_ops(report(cpu_adam=CANNOT, fused_adam=SILENT), ("fused_adam", *wanted))
    assert check.verdict is Verdict.FAIL
    assert check.remedy == f"fused_adam: DeepSpeed does not say why; cpu_adam: {CANNOT['why']}"


def test_a_stale_lock_is_found_and_one_that_a_build_holds_is_not(tmp_path: Path) -> None:
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    assert check_locks(environment).verdict is Verdict.OK
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    with lock.open("w"):
        assert check_locks(environment).verdict is Verdict.OK
    check = check_locks(environment)
    assert check.verdict is Verdict.FAIL
    assert check.remedy == f"rm {lock}"
    assert lock.exists()


def tool(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("")
    (folder / name).chmod(0o755)


def test_a_compiler_or_a_ninja_that_is_missing_is_told_by_what_it_costs(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path / "cuda")}
    assert check_compiler(environment, "cpu", report()).verdict is Verdict.FAIL
    tool(tmp_path, "ninja")
    check = check_compiler(environment, "cpu", report(cpu_adam=CAN))
    assert check.verdict is Verdict.FAIL
    assert "build-essential" in check.remedy
    assert check_compiler(environment, "cpu", report(cpu_adam=BUILT)).verdict is Verdict.WARN
    assert check_compiler(environment, "cpu", "torch cannot be imported").verdict is Verdict.FAIL
    tool(tmp_path, "c++")
    assert check_compiler(environment, "cpu", report()).verdict is Verdict.OK
    assert "no nvcc" in check_compiler(environment, "cuda", report()).said
    tool(tmp_path / "cuda" / "bin", "nvcc")
    assert check_compiler(environment, "cuda", report()).verdict is Verdict.OK
