"""What the doctor says of DeepSpeed's ops, of a compiler and of locks, on machines of all kinds."""

from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.doctor import Verdict, check_compiler, check_environment, check_locks, check_ops
from zerotune.trial_lib.launch.processes.environment_check import is_built

BUILT = {"built": True, "can_build": True, "why": ""}
CAN = {"built": False, "can_build": True, "why": ""}
CANNOT = {"built": False, "can_build": False, "why": "[WARNING] libaio is missing. [WARNING] install libaio-dev"}
SILENT = {"built": False, "can_build": False, "why": ""}


def report(torch_cuda: str | None = None, **ops: dict[str, Any]) -> dict[str, Any]:
    return {
        "python": "3.11.7",
        "torch": "2.13.0",
        "torch_cuda": torch_cuda,
        "torch_libraries": "/env/lib/python3.12/site-packages/torch/lib",
        "deepspeed": "0.19.8",
        "accelerator": "cpu" if torch_cuda is None else "cuda",
        "ops": ops,
    }


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
    assert "python -m zerotune.flows.prepare" in check.remedy
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
    unquoted = check_compiler(environment, "cpu", {**report(), "torch_libraries": "/my env/torch/lib"})
    assert (unquoted.verdict, unquoted.remedy) == (Verdict.FAIL, "Make the environment in a folder without a space.")
    assert "no nvcc" in check_compiler(environment, "cuda", report()).said
    tool(tmp_path / "cuda" / "bin", "nvcc")
    assert check_compiler(environment, "cuda", report()).verdict is Verdict.OK
    check = check_compiler({**environment, "TORCH_CUDA_ARCH_LIST": "9.0a"}, "cuda", report())
    assert check.verdict is Verdict.FAIL
    assert "9.0a" in check.said
    assert check.remedy.endswith("Set it to the number of your GPU, or unset it.")


@pytest.mark.parametrize(
    ("linked", "with_cuda", "built"),
    [
        ("-lc10 -ltorch_cpu", False, True),
        ("-lc10 -ltorch_cpu", True, False),
        ("-lc10_cuda -lcudart", True, True),
        ("-lc10_cuda -lcudart", False, False),
        (None, True, True),
        (None, False, True),
    ],
)
def test_an_op_is_built_if_it_is_so_for_the_devices(
    tmp_path: Path, linked: str | None, with_cuda: bool, built: bool
) -> None:
    folder = tmp_path / "fused_adam"
    folder.mkdir()
    assert not is_built("fused_adam", [folder], with_cuda)
    (folder / "fused_adam.so").touch()
    if linked is not None:
        (folder / "build.ninja").write_text(f"ldflags = -shared {linked}\n")
    assert is_built("fused_adam", [folder], with_cuda) is built
    assert not is_built("cpu_adam", [folder], with_cuda)


def test_an_op_of_another_python_is_not_built_for_this_one(tmp_path: Path) -> None:
    folder = tmp_path / "py20_cu130" / "fused_adam"
    folder.mkdir(parents=True)
    (folder / "fused_adam.so").touch()
    assert not is_built("fused_adam", [folder], with_cuda=True)
