"""Accelerators that are not tuned on, and GPUs that nobody here can ask: refused, and never taken for a processor."""

from pathlib import Path

import pynvml
import pytest

from zerotune.trial_lib.device import cpu, cuda
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.messages.errors import InputError


class Machine:
    """Device files, and what the kernel tells of them; NVML has no library there."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dev, self.accel = root / "dev", root / "accel"
        self._monkeypatch = monkeypatch
        self.dev.mkdir()
        for module in (cuda, cuda):
            monkeypatch.setattr(module, "_DEV", self.dev)
        for name, folder in (("_DEV", self.dev), ("_ACCEL", self.accel)):
            monkeypatch.setattr(cpu, name, folder)
        for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
            monkeypatch.delenv(name, raising=False)
        self.nvml(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def nvml(self, error: int) -> None:
        def init() -> None:
            raise pynvml.NVMLError(error)

        self._monkeypatch.setattr(pynvml, "nvmlInit", init)

    def has(self, *files: str) -> None:
        for name in files:
            (self.dev / name).parent.mkdir(exist_ok=True)
            (self.dev / name).touch()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_host_without_any_has_its_cores(machine: Machine) -> None:
    machine.has("nvidiactl", "nvidia-uvm", "dri/renderD128", "accel/accel0")
    assert this_host().device == "cpu"


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_gpus_that_nvml_cannot_be_asked_for_are_refused(machine: Machine, error: int) -> None:
    machine.has("nvidiactl", "nvidia0")
    machine.nvml(error)
    with pytest.raises(InputError, match="but NVML does not answer") as refused:
        this_host()
    assert str(machine.dev / "nvidia0") in refused.value.what
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in refused.value.remedy
    # As the remedy says.
    assert this_host("").device == "cpu"


@pytest.mark.parametrize(("has_cuda", "refused"), [(True, True), (False, False)])
def test_in_windows_subsystem_it_is_cuda_that_tells_of_a_gpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, has_cuda: bool, refused: bool
) -> None:
    machine.has("dxg")
    monkeypatch.setattr(cuda, "_has_cuda", lambda: has_cuda)
    if not refused:
        assert this_host().device == "cpu"
        return
    with pytest.raises(InputError, match="dxg"):
        this_host()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("davinci0", "an Ascend NPU"),
        ("hl0", "a Gaudi accelerator"),
        ("cambricon_dev0", "a Cambricon MLU"),
        ("neuron0", "a Trainium"),
    ],
)
def test_another_accelerator_is_refused_unless_deepspeed_is_told_to_use_the_processor(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, file: str, name: str
) -> None:
    machine.has(file)
    with pytest.raises(InputError, match=f"this host has {name}") as refused:
        this_host()
    assert "set DS_ACCELERATOR=cpu" in refused.value.remedy
    # CUDA's variable hides nothing from them.
    with pytest.raises(InputError):
        this_host("")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert this_host().device == "cpu"


@pytest.mark.parametrize(("torch", "refused"), [("2.13.0+xpu", True), ("2.13.0+cpu", False), ("2.13.0", False)])
def test_intels_graphics_count_where_torch_can_train_on_them(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, torch: str, refused: bool
) -> None:
    machine.has("dri/renderD128")
    monkeypatch.setattr(cpu.metadata, "version", lambda name: torch)
    if not refused:
        assert this_host().device == "cpu"
        return
    with pytest.raises(InputError, match="this host has an Intel GPU"):
        this_host()


def test_the_kernels_own_name_for_accelerators_is_a_gaudis_where_its_driver_is(machine: Machine) -> None:
    machine.has("accel/accel0")
    device = machine.accel / "accel0" / "device"
    device.mkdir(parents=True)
    (machine.accel / "intel_vpu").mkdir()
    (device / "driver").symlink_to(machine.accel / "intel_vpu")
    assert this_host().device == "cpu"
    (machine.accel / "habanalabs").mkdir()
    (device / "driver").unlink()
    (device / "driver").symlink_to(machine.accel / "habanalabs")
    with pytest.raises(InputError, match="Gaudi"):
        this_host()


def test_a_device_that_deepspeed_is_told_to_use_and_nobody_tunes_on_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    with pytest.raises(InputError, match="DS_ACCELERATOR is xpu"):
        this_host()
