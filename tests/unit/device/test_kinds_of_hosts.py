"""What every kind of host answers, whichever it is; GPUs are made up."""

import dataclasses
import functools
import json

import pynvml
import pytest
from nvml_fixtures import PretendGpu, Process, pretend_gpus

from zerotune.trial_lib.device.base import DeviceState, Host, HostKind, Tenant
from zerotune.trial_lib.device.this_host import kind_called, kind_of, this_host


@pytest.fixture(params=["cpu", "cuda"])
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Host:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    pretend_gpus(monkeypatch, [PretendGpu("GPU-a", used=7, processes=[Process(7, 5)]), PretendGpu("GPU-b")])
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


def test_the_state_of_each_slot_s_device_is_told_in_their_order(host: Host, kind: HostKind) -> None:
    slots = host.slots[::-1]
    assert [state.device for state in kind.states(host, slots)] == [host.device_of(slot) for slot in slots]


def test_a_slot_of_another_host_has_a_name_and_no_state(host: Host, kind: HostKind) -> None:
    assert kind.states(host, ["node-2/0"]) == [DeviceState("node-2/0")]
    assert kind.load(host, ["node-2/0"]) in ([], [{}])
    assert not any(kind.tenants(host, ["node-2/0"]).values())


def test_who_computes_is_told_of_devices_alone_that_are_not_the_processor(host: Host, kind: HostKind) -> None:
    expected = {} if kind.computes_on_the_processor else {"GPU-a": [Tenant(7, 5)], "GPU-b": []}
    assert kind.tenants(host, host.slots) == expected


def test_what_a_study_may_stumble_over_is_told_of_each_such_device(host: Host, kind: HostKind) -> None:
    names = [condition.device for condition in kind.conditions(host)]
    assert names == ([] if kind.computes_on_the_processor else ["GPU-a", "GPU-b"])


def test_a_driver_that_has_gone_meanwhile_is_no_error(
    host: Host, kind: HostKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(pynvml, "nvmlInit", gone)
    devices = [host.device_of(slot) for slot in host.slots]
    assert [state.device for state in kind.states(host, host.slots)] == devices
    assert (kind.tenants(host, host.slots), kind.load(host, host.slots), kind.conditions(host)) == ({}, [], [])


def test_what_is_opened_to_ask_often_is_closed_again(
    host: Host, kind: HostKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, functools.partial(calls.append, name))
    with kind.asked_often():
        kind.states(host, host.slots)
    nested = ["nvmlInit", "nvmlInit", "nvmlShutdown", "nvmlShutdown"]
    assert calls == ([] if kind.computes_on_the_processor else nested)
