"""The slots of a host with GPUs, however CUDA_VISIBLE_DEVICES spells them; NVML's answers are made up."""

from pathlib import Path

import pytest
from nvml_fixtures import pretend_gpus

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.device.nvml import Gpu, named_devices
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.slots import held_slots

UUIDS = ["GPU-8f3a-1", "GPU-8f3b-2", "GPU-c0de-3"]
MEMORY = {"GPU-8f3a-1": 80, "GPU-8f3b-2": 40, "GPU-c0de-3": 24}


class Nvml:
    """What NVML says of a host with three GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend_gpus(monkeypatch, MEMORY)
        self._monkeypatch = monkeypatch

    def host(self, visible: str | None) -> Host:
        """Returns the host as a process sees it whose CUDA_VISIBLE_DEVICES is that; None for unset."""
        self._monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            self._monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return this_host()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    return Nvml(monkeypatch)


@pytest.mark.parametrize(
    ("variable", "slots"),
    [
        ("1,0", {"1": UUIDS[1], "0": UUIDS[0]}),
        (" 2 ", {"2": UUIDS[2]}),
        (f"{UUIDS[2]},{UUIDS[0]}", {UUIDS[2]: UUIDS[2], UUIDS[0]: UUIDS[0]}),
        ("GPU-c0", {"GPU-c0": UUIDS[2]}),
        ("MIG-77aa", {"MIG-77aa": "MIG-77aa"}),
        # As CUDA does: nothing from the first name on that is no device's, or is not one device's, or comes again.
        ("0,5,1", {"0": UUIDS[0]}),
        ("0,-1,1", {"0": UUIDS[0]}),
        ("0,GPU-8f3,1", {"0": UUIDS[0]}),
        (f"1,{UUIDS[1]},0", {"1": UUIDS[1]}),
        ("", {}),
        ("NoDevFiles", {}),
    ],
)
def test_the_devices_are_those_that_cuda_would_see(variable: str, slots: dict[str, str]) -> None:
    assert named_devices(variable, [Gpu(uuid) for uuid in UUIDS]).devices == slots


def test_without_the_variable_every_gpu_is_a_slot(nvml: Nvml) -> None:
    host = nvml.host(None)
    assert (host.device, host.slots, host.memory_per_slot) == ("cuda", ["0", "1", "2"], 24)


def test_the_memory_of_a_slot_is_that_of_the_smallest_visible_gpu(nvml: Nvml) -> None:
    assert nvml.host("0,1").memory_per_slot == 40


def test_a_value_given_takes_the_place_of_this_process_s_own(nvml: Nvml) -> None:
    nvml.host("2")
    host = this_host("GPU-8f3b, 0")
    assert host.slots == ["GPU-8f3b", "0"]
    assert [host.device_of(slot) for slot in host.slots] == [UUIDS[1], UUIDS[0]]
    assert this_host().slots == ["2"]


def test_where_no_gpu_is_visible_the_cores_are_the_slots(nvml: Nvml) -> None:
    assert nvml.host("").device == "cpu"


@pytest.mark.parametrize("other", [UUIDS[1], "GPU-8f3b", "1"])
def test_one_gpu_is_one_slot_however_two_studies_spell_it(nvml: Nvml, tmp_path: Path, other: str) -> None:
    with held_slots(tmp_path, nvml.host("1,2"), 1, lambda: True) as held:
        assert held is not None
        assert held.names == ["1"]
        with held_slots(tmp_path, nvml.host(other), 1, lambda: True) as none:
            assert none is None
        with held_slots(tmp_path, nvml.host(f"{other},0"), 1, lambda: True) as another:
            assert another is not None
            assert another.names == ["0"]


def test_the_devices_of_the_trials_to_compare_with_are_taken_first_where_they_are_free(
    nvml: Nvml, tmp_path: Path
) -> None:
    host, alike = nvml.host("0,1,2"), (UUIDS[1], UUIDS[2])
    with held_slots(tmp_path, host, 2, lambda: True, preferred=alike) as held:
        assert held is not None
        assert held.names == ["1", "2"]
    with (
        held_slots(tmp_path, nvml.host("2"), 1, lambda: True),
        held_slots(tmp_path, host, 2, lambda: True, preferred=alike) as held,
    ):
        assert held is not None
        assert held.names == ["0", "1"]
