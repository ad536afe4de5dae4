"""What every kind of host answers, whichever it is; GPUs are made up."""

import dataclasses
import json

import pytest
from nvml_fixtures import PretendGpu, pretend_gpus

from trial_lib.device.host.base import Host, HostKind
from trial_lib.device.host.this_host import kind_called, kind_of, this_host


@pytest.fixture(params=["cpu", "cuda"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Host:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    pretend_gpus(monkeypatch, [PretendGpu("GPU-a", used=7), PretendGpu("GPU-b")])
    found = this_host("" if request.param == "cpu" else None)
    assert found.device == request.param
    return found


@pytest.fixture
def kind(host: Host) -> HostKind:
    return kind_of(host.device)


def test_a_kind_is_found_by_each_of_its_names(host: Host, kind: HostKind) -> None:
    assert (kind.device, kind_called(kind.resource)) == (host.device, kind)


def test_a_host_has_slots_with_memory_each_on_a_device_of_its_own(host: Host) -> None:
    assert host.memory_per_slot > 0
    devices = [host.device_of(slot) for slot in host.slots]
    assert len(set(devices)) == len(host.slots) > 0


def test_a_host_goes_through_json(host: Host) -> None:
    again = Host(**json.loads(json.dumps(dataclasses.asdict(host))))
    assert (again.slots, again.devices, again.memory_per_slot) == (host.slots, host.devices, host.memory_per_slot)


def test_a_rank_is_shown_its_device_or_pinned_to_it(host: Host, kind: HostKind) -> None:
    slot = host.slots[-1]
    shown, cores = kind.environment([slot]), kind.cores(slot)
    assert bool(shown) is not bool(cores)
    assert cores == ([int(slot)] if kind.computes_on_the_processor else [])
    if kind.visible_by:
        assert shown[kind.visible_by] == slot


def test_the_slot_of_another_host_has_no_core_here(kind: HostKind) -> None:
    assert kind.cores("node-2/0") == []


def test_what_primes_sees_what_a_trial_sees(host: Host, kind: HostKind) -> None:
    assert kind.primed_with(host, 1) == kind.environment(host.slots[:1])
    elsewhere = dataclasses.replace(host, slots=["node-2/0"], devices={})
    assert kind.primed_with(elsewhere, 1) == {}


def test_a_budget_is_what_is_asked_for_and_on_a_processor_its_share_else(host: Host, kind: HostKind) -> None:
    share = host.memory_per_slot if kind.computes_on_the_processor else None
    assert (kind.budget(host, None), kind.budget(host, 5)) == (share, 5)


def test_equal_devices_are_all_kept_and_go_together(host: Host, kind: HostKind) -> None:
    assert kind.alike(host, 1) == host
    assert kind.refusal(host, len(host.slots)) is None


def test_the_identity_names_no_single_card(host: Host, kind: HostKind) -> None:
    named = {"GPU": "NVIDIA H100 80GB HBM3", "driver": "580.95.05"}
    assert kind.identity(host) == ({} if kind.computes_on_the_processor else named)


def test_the_load_is_in_the_order_of_the_slots(host: Host, kind: HostKind) -> None:
    gpus = [{"memory_used": used, "utilization": 87} for used in (7, 0)]
    assert kind.load(host, host.slots) == ([] if kind.computes_on_the_processor else gpus)
