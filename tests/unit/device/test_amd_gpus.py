"""AMD's GPUs are counted as HIP counts them, by what the kernel tells of them."""

from pathlib import Path

import pynvml
import pytest

from zerotune.trial_lib.device import cuda
from zerotune.trial_lib.device.this_host import kind_of, this_host

GIB = 2**30
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "DS_ACCELERATOR")


class Machine:
    """A processor with graphics, and four cards; NVML has no library there."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dev, self.nodes = root / "dev", root / "nodes"
        (self.dev / "dri").mkdir(parents=True)
        (self.dev / "kfd").touch()
        monkeypatch.setattr(cuda, "_DEV", self.dev)
        monkeypatch.setattr(cuda, "_KFD_DEV", self.dev)
        monkeypatch.setattr(cuda, "_NODES", self.nodes)
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)

        def init() -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

        monkeypatch.setattr(pynvml, "nvmlInit", init)
        self.node(0, cpu_cores_count=16, simd_count=8, drm_render_minor=127)
        for card in range(1, 5):
            self.node(
                card, cpu_cores_count=0, simd_count=304, unique_id=0xA0 + card, drm_render_minor=127 + card, domain=0
            )

    def node(self, number: int, **properties: int) -> None:
        node = self.nodes / str(number)
        (node / "mem_banks" / "0").mkdir(parents=True)
        text = "".join(f"{name} {value}\n" for name, value in properties.items())
        (node / "properties").write_text(text)
        (node / "name").write_text(f"model {number}\n")
        (node / "mem_banks" / "0" / "properties").write_text(f"heap_type 1\nsize_in_bytes {192 * GIB}\n")
        (self.dev / "dri" / f"renderD{properties['drm_render_minor']}").touch()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_cards_are_slots_and_the_graphics_of_a_processor_are_not(machine: Machine) -> None:
    host = this_host()
    assert (host.device, host.slots, host.memory_per_slot) == ("cuda", ["0", "1", "2", "3"], 192 * GIB)
    assert host.devices["0"] == "GPU-00000000000000a1"
    assert host.models["GPU-00000000000000a1"] == "model 1"


def test_a_card_that_the_job_may_not_open_is_not_counted(machine: Machine) -> None:
    (machine.dev / "dri" / "renderD129").unlink()
    assert this_host().device_of("1") == "GPU-00000000000000a3"


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({"HIP_VISIBLE_DEVICES": "2,0"}, ["a3", "a1"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["a2"]),
        ({"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "1"}, ["a4"]),
        ({"ROCR_VISIBLE_DEVICES": "3,1"}, ["a4", "a2"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000a4,0", "HIP_VISIBLE_DEVICES": "1"}, ["a1"]),
    ],
)
def test_the_variables_of_rocm_are_read_as_it_does(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], devices: list[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    host = this_host()
    assert [host.device_of(slot) for slot in host.slots] == [f"GPU-00000000000000{name}" for name in devices]


def test_ranks_are_shown_their_cards_by_the_variable_that_hip_listens_to_first(machine: Machine) -> None:
    shown = kind_of("cuda").environment(["2"])
    assert shown["HIP_VISIBLE_DEVICES"] == shown["CUDA_VISIBLE_DEVICES"] == "2"


def test_what_only_nvml_could_tell_is_left_out(machine: Machine) -> None:
    host, kind = this_host(), kind_of("cuda")
    assert [state.device for state in kind.states(host, ["0"])] == [host.device_of("0")]
    assert not any(kind.tenants(host, host.slots).values())
    assert kind.identity(host).keys() <= {"GPU", "driver"}
    assert len(kind.conditions(host)) <= 4
    kind.load(host, ["0"])


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"])
def test_hidden_cards_leave_the_processor(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "")
    assert this_host().device == "cpu"
