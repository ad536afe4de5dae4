"""What the doctor says of devices and of torch's use of them, on machines of all kinds; GPUs are made up."""

import json
from dataclasses import asdict
from typing import Any

import pynvml
import pytest
from nvml_fixtures import PretendGpu, Process, pretend_gpus
from pydantic import TypeAdapter

from zerotune.trial_lib.device.base import DeviceCondition, Host
from zerotune.trial_lib.doctor import Check, DevicesFound, Verdict, check_accelerators, check_devices
from zerotune.trial_lib.messages.errors import InputError

GIB = 2**30
GPU = DevicesFound(Host("cuda", ["0", "1"], 80 * GIB), "580.1")
MIG = DevicesFound(Host("cuda", ["MIG-a", "MIG-b"], 20 * GIB, {"MIG-a": "MIG-a", "MIG-b": "MIG-b"}), "580.1")
CPU, HIDDEN = DevicesFound(Host("cpu", ["0", "1"], 10 * GIB)), DevicesFound(Host("cpu", ["0"], 10 * GIB), "580.1")
NOBODY = 2**22 - 3


def report(torch_cuda: str | None) -> dict[str, Any]:
    return {"torch": "2.13.0", "torch_cuda": torch_cuda}


def tried(*devices: str, why_none: str = "", together: str | None = None) -> dict[str, Any]:
    return {"sees": len(devices), "why_none": why_none, "devices": list(devices), "together": together}


@pytest.mark.parametrize(
    ("found", "torch_cuda", "came_of_it", "verdict", "word"),
    [
        (CPU, None, None, Verdict.OK, "no GPU; 2 slots of 10.0 GiB"),
        (CPU, "12.8", None, Verdict.WARN, "no NVIDIA driver answers"),
        (HIDDEN, "12.8", None, Verdict.WARN, "CUDA_VISIBLE_DEVICES hides"),
        (GPU, "12.8", tried("", "", together=""), Verdict.OK, "2 slots of 80.0 GiB (GPUs, driver 580.1)"),
        (GPU, None, tried(), Verdict.FAIL, "built without CUDA"),
        # The commonest fault of a GPU host: NVML shows GPUs that the driver is too old for.
        (GPU, "13.0", tried(why_none="The NVIDIA driver is too old"), Verdict.FAIL, "sees none: The NVIDIA driver is"),
        (GPU, "12.8", tried("", "no kernel image"), Verdict.FAIL, "on 1 of 2 (cuda:1: no kernel image)"),
        (GPU, "12.8", tried("", "", together="NCCL error"), Verdict.FAIL, "cannot reduce together by NCCL: NCCL error"),
        (GPU, "12.8", tried(""), Verdict.FAIL, "CUDA shows torch 1 of them"),
        (GPU, "12.8", "it ended with -11", Verdict.FAIL, "trying them has failed: it ended with -11"),
        (MIG, "12.8", tried(""), Verdict.OK, "2 slots of 20.0 GiB"),
    ],
)
def test_devices_that_torch_cannot_use_are_found(
    found: DevicesFound, torch_cuda: str | None, came_of_it: Any, verdict: Verdict, word: str
) -> None:
    check = check_accelerators(found, report(torch_cuda), came_of_it)
    assert check.verdict is verdict
    assert word in check.said
    assert bool(check.remedy) is (verdict is not Verdict.OK)


def test_a_driver_that_does_not_answer_fails() -> None:
    silent = InputError("it hangs.", where="the NVIDIA driver", remedy="Restart.")
    check = check_accelerators(silent, report("12.8"))
    assert (check.verdict, check.said, check.remedy) == (Verdict.FAIL, "the NVIDIA driver: it hangs.", "Restart.")
    assert check_devices(silent) == []


def devices_line(monkeypatch: pytest.MonkeyPatch, *gpus: PretendGpu) -> Check:
    """Returns what the doctor says of GPUs, which a process of its own has asked for."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    pretend_gpus(monkeypatch, gpus)
    told = json.loads(json.dumps(asdict(DevicesFound.here())))
    found = TypeAdapter(DevicesFound).validate_python(told)
    assert found == DevicesFound.here()
    (check,) = check_devices(found)
    return check


def test_a_healthy_card_is_told_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    check = devices_line(monkeypatch, PretendGpu("GPU-a", used=GIB // 2))
    assert (check.verdict, check.remedy) == (Verdict.OK, "")
    assert check.said == "GPU-a: NVIDIA H100 80GB HBM3, 512 MiB of 80.0 GiB in use"


@pytest.mark.parametrize(
    ("gpu", "verdict", "word", "remedy"),
    [
        (PretendGpu("GPU-a", processes=[Process(NOBODY, 30 * GIB)]), "warn", f"({NOBODY}, 30.0 GiB)", "Wait for"),
        (
            PretendGpu("GPU-a", said={"nvmlDeviceGetPersistenceMode": 0}),
            "warn",
            "persistence mode off",
            "nvidia-smi -pm 1",
        ),
        (
            PretendGpu("GPU-a", said={"nvmlDeviceGetComputeMode": pynvml.NVML_COMPUTEMODE_PROHIBITED}),
            "fail",
            "compute mode prohibited",
            "nvidia-smi -c 0",
        ),
        (
            PretendGpu("GPU-a", said={"nvmlDeviceGetComputeMode": pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS}),
            "ok",
            "one process at a time",
            "",
        ),
        (
            PretendGpu("GPU-a", said={"nvmlDeviceGetRemappedRows": (0, 1, 1, 0)}),
            "warn",
            "disabled at the next reset",
            "nvidia-smi -r",
        ),
        (
            PretendGpu("GPU-a", said={"nvmlDeviceGetRetiredPagesPendingStatus": 1}),
            "warn",
            "disabled at the next reset",
            "nvidia-smi -r",
        ),
        (
            PretendGpu("GPU-a", said={"nvmlDeviceGetRemappedRows": (0, 1, 0, 1)}),
            "warn",
            "no spare rows left",
            "replace it",
        ),
        (
            PretendGpu("GPU-a", instances=[PretendGpu("MIG-a", 20 * GIB)]),
            "ok",
            "MIG-a: NVIDIA H100 80GB HBM3, 0 bytes of 20.0 GiB in use, cut into instances",
            "",
        ),
    ],
)
def test_what_a_study_may_stumble_over_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, gpu: PretendGpu, verdict: str, word: str, remedy: str
) -> None:
    check = devices_line(monkeypatch, gpu)
    assert check.verdict.value == verdict
    assert word in check.said
    assert remedy in check.remedy
    assert bool(check.remedy) is (verdict != "ok")


def test_a_remedy_for_several_cards_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {"nvmlDeviceGetPersistenceMode": 0}
    check = devices_line(monkeypatch, PretendGpu("GPU-a", said=off), PretendGpu("GPU-b", said=off))
    assert check.remedy.count("nvidia-smi -pm 1") == 1


def test_a_card_that_was_left_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = PretendGpu("GPU-b", handle_error=pynvml.NVML_ERROR_GPU_IS_LOST)
    assert "GPU 1 cannot be used (GPU is lost)" in devices_line(monkeypatch, PretendGpu("GPU-a"), lost).said


def test_of_a_card_that_tells_nothing_its_name_is_told() -> None:
    (check,) = check_devices(DevicesFound(GPU.host, "580.1", (DeviceCondition("GPU-a"),)))
    assert (check.verdict, check.said) == (Verdict.OK, "GPU-a: of no known model")


def test_of_a_processor_there_is_no_such_line() -> None:
    assert check_devices(CPU) == []
