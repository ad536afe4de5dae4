"""GPUs that NVML may not or cannot ask, instances of GPUs (MIG), cards of several models; its answers are made up."""

import pynvml
import pytest
from nvml_fixtures import PretendGpu, pretend_gpus

from zerotune.trial_lib.device import cuda
from zerotune.trial_lib.device.this_host import kind_of, this_host
from zerotune.trial_lib.messages.errors import InputError

GIB = 2**30
H100, A2000 = "NVIDIA H100 80GB HBM3", "NVIDIA RTX A2000"
LOST = PretendGpu("GPU-3-lost", handle_error=pynvml.NVML_ERROR_GPU_IS_LOST)


def cards(count: int) -> list[PretendGpu]:
    return [PretendGpu(f"GPU-{number}") for number in range(count)]


def cut(*names: str, memory: int = 20 * GIB, parent: str = "GPU-cut") -> PretendGpu:
    """A GPU that is cut, in a container: it may not be asked for its memory, and its parts may."""
    parts = [PretendGpu(name, memory, model="NVIDIA A100 MIG 2g.20gb") for name in names]
    return PretendGpu(parent, memory_error=pynvml.NVML_ERROR_NO_PERMISSION, instances=parts)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)


# -- one of several that cannot be asked -----------------------------------------------------------------------------


@pytest.mark.parametrize("named", [None, "0,1", "GPU-0,GPU-1"])
def test_a_gpu_that_has_fallen_off_the_bus_is_left_out(monkeypatch: pytest.MonkeyPatch, named: str | None) -> None:
    pretend_gpus(monkeypatch, [*cards(2), LOST])
    host = this_host(named)
    assert [host.device_of(slot) for slot in host.slots] == ["GPU-0", "GPU-1"]
    assert host.memory_per_slot == 80 * GIB
    assert [note for note in host.notes if "GPU 2 cannot be used (GPU is lost)" in note] == list(host.notes)
    assert bool(host.notes) is (named is None)


@pytest.mark.parametrize("named", ["2", "0,2", "GPU-3"])
def test_one_that_is_named_and_cannot_be_asked_is_refused(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    pretend_gpus(monkeypatch, [*cards(2), LOST])
    with pytest.raises(InputError, match=r"cannot be used \(GPU is lost\)"):
        this_host(named)


def test_where_none_can_be_asked_the_processor_is_not_taken_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, [LOST])
    with pytest.raises(InputError, match="GPU is lost"):
        this_host()


def test_an_index_behind_a_lost_gpu_is_no_name_that_cuda_is_sure_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, [LOST, *cards(1)])
    host = this_host("1")
    assert host.slots == ["GPU-0"]


def test_gpus_that_a_job_may_not_open_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = [PretendGpu(f"GPU-f{number}", handle_error=pynvml.NVML_ERROR_NO_PERMISSION) for number in range(2)]
    pretend_gpus(monkeypatch, [*forbidden, *cards(2)])
    host = this_host("0,1")
    assert dict(host.devices) == {"0": "GPU-0", "1": "GPU-1"}
    assert this_host().slots == ["0", "1"]


def test_a_job_that_may_open_no_gpu_has_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, [PretendGpu("GPU-0", handle_error=pynvml.NVML_ERROR_NO_PERMISSION)])
    assert this_host().device == "cpu"


@pytest.mark.parametrize("named", ["7", "GPU-of-another-host", "first"])
def test_a_name_of_no_gpu_does_not_turn_the_study_to_the_processor(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    pretend_gpus(monkeypatch, cards(2))
    with pytest.raises(InputError, match="names no GPU of this host: this process may open 2"):
        this_host(named)


def test_a_name_where_none_may_be_opened_is_refused_and_no_name_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, [PretendGpu("GPU-0", handle_error=pynvml.NVML_ERROR_NO_PERMISSION)])
    with pytest.raises(InputError, match="this process may open 0"):
        this_host("0")
    # An instance may be opened where its GPU may not.
    assert this_host("MIG-a").slots == ["MIG-a"]


@pytest.mark.parametrize("named", ["", "-1", "NoDevFiles"])
def test_hiding_all_gpus_leaves_the_cores(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    pretend_gpus(monkeypatch, cards(2))
    assert this_host(named).device == "cpu"


def test_deepspeeds_own_choice_of_the_processor_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, cards(2))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert this_host().device == "cpu"


# -- instances of a GPU ----------------------------------------------------------------------------------------------


def test_an_instance_has_its_own_memory_and_a_container_may_not_ask_for_the_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend_gpus(monkeypatch, [cut("MIG-a", "MIG-b")])
    host = this_host("MIG-a")
    assert (host.slots, host.memory_per_slot) == (["MIG-a"], 20 * GIB)


def test_without_the_variable_the_instances_are_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, [cut("MIG-a", "MIG-b")])
    assert this_host().slots == ["MIG-a", "MIG-b"]


def test_beside_whole_gpus_instances_are_left_out_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, [cut("MIG-a"), *cards(2)])
    host = this_host()
    assert dict(host.devices) == {"1": "GPU-0", "2": "GPU-1"}
    assert "cut into instances" in host.notes[0]


@pytest.mark.parametrize("named", ["0", "GPU-cut"])
def test_the_name_of_a_gpu_that_is_cut_is_its_first_instances(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    pretend_gpus(monkeypatch, [cut("MIG-a", "MIG-b")])
    host = this_host(named)
    assert dict(host.devices) == {named: "MIG-a"}
    assert dict(this_host(f"{named},MIG-b").devices) == {named: "MIG-a", "MIG-b": "MIG-b"}
    # Two slots would share one instance.
    assert dict(this_host(f"{named},MIG-a").devices) == {named: "MIG-a"}


def test_an_instance_that_nobody_may_ask_about_is_taken_at_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    no = pynvml.NVML_ERROR_NO_PERMISSION
    pretend_gpus(monkeypatch, [PretendGpu("GPU-cut", memory_error=no, instances=[])])
    host = this_host("MIG-GPU-cut/1/0")
    assert (host.slots, host.memory_per_slot) == (["MIG-GPU-cut/1/0"], 0)


def test_a_trial_cannot_have_two_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, [cut("MIG-a", "MIG-b")])
    host = this_host("MIG-a,MIG-b")
    assert kind_of(host.device).refusal(host, 1) is None
    assert "one instance" in (kind_of(host.device).refusal(host, 2) or "")


def test_what_primes_for_an_instance_sees_the_gpu_that_it_is_part_of(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, [*cards(1), cut("MIG-a", "MIG-b")])
    host = this_host("MIG-b,MIG-a")
    assert kind_of(host.device).primed_with(host, 1)["CUDA_VISIBLE_DEVICES"] == "1"
    assert kind_of(host.device).environment(["MIG-b"])["CUDA_VISIBLE_DEVICES"] == "MIG-b"


# -- cards of several models -----------------------------------------------------------------------------------------


def mixed() -> list[PretendGpu]:
    return [PretendGpu("GPU-small", 12 * GIB, model=A2000), *(PretendGpu(f"GPU-{n}", model=H100) for n in range(2))]


def test_an_index_means_what_it_means_to_cuda_where_the_cards_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, mixed())
    monkeypatch.setattr(cuda, "cuda_order", lambda variables: ["GPU-0", "GPU-1", "GPU-small"])
    host = this_host("0")
    assert dict(host.devices) == {"1": "GPU-0"}
    assert f"CUDA_VISIBLE_DEVICES=0 is {H100} (slot 1)" in host.notes[0]
    assert kind_of(host.device).environment(host.slots)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_an_index_is_the_bus_s_where_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, mixed())
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setattr(cuda, "cuda_order", lambda variables: pytest.fail("nothing is left to ask"))
    host = this_host("0")
    assert (dict(host.devices), list(host.notes)) == ({"0": "GPU-small"}, [])


def test_where_cuda_does_not_say_the_driver_s_order_counts_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, mixed())
    monkeypatch.setattr(cuda, "cuda_order", lambda variables: [])
    host = this_host("0")
    assert dict(host.devices) == {"0": "GPU-small"}
    assert f"is {A2000} (slot 0), as the driver counts them" in host.notes[0]


def test_trials_that_are_compared_run_on_cards_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, mixed())
    host = this_host()
    assert host.memory_per_slot == 12 * GIB
    alike = kind_of(host.device).alike(host, 1)
    assert (alike.slots, alike.memory_per_slot) == (["1", "2"], 80 * GIB)
    assert f"So they run only on {H100} (1, 2)." in alike.notes[0]
    # Three are on all of them, whatever they are.
    assert kind_of(host.device).alike(host, 3) == host


def test_builds_see_the_cards_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, mixed())
    host = kind_of("cuda").alike(this_host(), 1)
    assert kind_of("cuda").primed_with(host, 1)["CUDA_VISIBLE_DEVICES"] == "1"
