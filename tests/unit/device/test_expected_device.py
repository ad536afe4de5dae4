"""A rank that trains on another kind of device than its slot is: what it says, by what has led to it."""

from collections.abc import Iterator

import pytest
import torch

from zerotune.trial_lib.rank import device
from zerotune.trial_lib.rank.device import OtherDeviceError, expect, require


@pytest.fixture(autouse=True)
def _expecting_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    yield
    expect(None)


def told(
    monkeypatch: pytest.MonkeyPatch, slots: str, found: str, cuda: str | None = None, hip: str | None = None
) -> str:
    """Returns what is told where slots are of one kind and DeepSpeed has found another.

    Args:
        monkeypatch: of the test.
        slots: the one.
        found: the other.
        cuda: the CUDA that torch is built for.
        hip: the ROCm.
    """
    monkeypatch.setattr(device, "found", lambda: found)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    expect(slots)
    with pytest.raises(OtherDeviceError) as error:
        require()
    return str(error.value)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_slots_and_ranks_of_one_kind_are_well(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(device, "found", lambda: kind)
    expect(kind)
    require()
    expect(None)
    require()


def test_a_torch_without_cuda_on_a_host_of_gpus_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    said = told(monkeypatch, "cuda", "cpu")
    assert "DeepSpeed trains on the CPU, but this host's slots are GPUs: torch " in said
    assert "is built without CUDA. Install a torch for your GPUs there" in said
    assert "CUDA_VISIBLE_DEVICES= (to nothing)" in said


def test_a_gpu_that_torch_cannot_use_is_another_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    said = told(monkeypatch, "cuda", "cpu", cuda="13.0")
    assert "built for CUDA 13.0, finds none that it can use." in said
    assert "the driver is too old" in said
    assert "built for ROCm 7.1, finds none" in told(monkeypatch, "cuda", "cpu", hip="7.1")


def test_a_device_that_the_user_has_chosen_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    said = told(monkeypatch, "cuda", "cpu", cuda="13.0")
    assert said.startswith("the environment: ")
    assert "DS_ACCELERATOR=cpu chooses that. Unset it" in said


def test_a_gpu_that_nvml_has_not_told_of_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    said = told(monkeypatch, "cpu", "cuda", cuda="13.0")
    assert "trains on `cuda`, but this host's slots are its cores: NVML" in said
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in said


def test_an_amd_gpu_that_the_kernel_has_not_told_of_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    said = told(monkeypatch, "cpu", "cuda", hip="7.1")
    assert "the kernel shows ZeroTune no AMD GPU" in said
    assert "--device=/dev/kfd" in said


def test_a_device_that_zerotune_does_not_know_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    said = told(monkeypatch, "cpu", "xpu")
    assert "trains on `xpu`" in said
    assert "Set DS_ACCELERATOR=cpu" in said
