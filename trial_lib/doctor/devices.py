"""Checks this host's devices, their driver, and whether torch can compute on them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trial_lib.device.host.base import DeviceCondition, Host, Tenant
from trial_lib.device.host.nvml import driver_version
from trial_lib.device.host.this_host import kind_of, this_host
from trial_lib.doctor.check import Check, fail, ok, warn
from trial_lib.launch.device_watch import company_said, neighbour
from trial_lib.records.units import bytes_shown
from trial_lib.wire.errors import InputError

ACCELERATORS, DEVICES = "accelerators", "devices"


@dataclass(frozen=True)
class DevicesFound:
    """The devices to train on.

    Attributes:
        host: the devices that this process may use.
        driver: the version of the NVIDIA driver; None without one.
        conditions: of each slot's device, if there is anything to report.
    """

    host: Host
    driver: str | None = None
    conditions: tuple[DeviceCondition, ...] = ()

    @classmethod
    def here(cls) -> "DevicesFound":
        """Asks the drivers, which may block this process.

        Raises:
            InputError: a driver does not answer, or the host has devices that ZeroTune does not tune on.
        """
        host = this_host()
        return cls(host, driver_version(), tuple(kind_of(host.device).conditions(host)))

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)

    @classmethod
    def of_json(cls, told: Mapping[str, Any]) -> "DevicesFound":
        """Returns the record of plain data."""
        conditions = []
        for each in told["conditions"]:
            lists = {"faults": tuple(each["faults"]), "tenants": tuple(Tenant(**one) for one in each["tenants"])}
            conditions.append(DeviceCondition(**{**each, **lists}))
        host = {**told["host"], "notes": tuple(told["host"]["notes"])}
        return cls(Host(**host), told["driver"], tuple(conditions))


def check_accelerators(
    found: DevicesFound | InputError,
    report: Mapping[str, Any] | str,
    tried: Mapping[str, Any] | str | None = None,
) -> Check:
    """Checks the devices, their driver, and whether torch can use them.

    Args:
        found: the answers of the drivers.
        report: `environment_report`'s.
        tried: `tried_devices`'s, or why there is none. None if there was nothing to try.
    """
    if isinstance(found, InputError):
        return fail(ACCELERATORS, f"{found.where}: {found.what}", found.remedy)
    slots, on_the_processor = _slots(found), kind_of(found.host.device).computes_on_the_processor
    if isinstance(report, str):
        return ok(ACCELERATORS, slots)
    if on_the_processor and report["torch_cuda"] is not None:
        why = "CUDA_VISIBLE_DEVICES hides the GPUs" if found.driver else "no NVIDIA driver answers"
        return warn(
            ACCELERATORS,
            f"{slots}: {why}, though torch is built for CUDA {report['torch_cuda']}",
            "With GPUs: install the driver, start a container with --gpus all, or unset CUDA_VISIBLE_DEVICES.",
        )
    if not on_the_processor and report["torch_cuda"] is None:
        return fail(
            ACCELERATORS,
            f"{slots}, but torch {report['torch']} is built without CUDA, so no rank can use them",
            "Install the build of torch that fits the driver (pytorch.org/get-started), then ZeroTune again.",
        )
    return ok(ACCELERATORS, slots) if tried is None else _check_tried(found, f"{slots}, but ", report, tried)


def _check_tried(found: DevicesFound, but: str, report: Mapping[str, Any], tried: Mapping[str, Any] | str) -> Check:
    if isinstance(tried, str):
        return fail(ACCELERATORS, f"{but}trying them has failed: {tried}", "See whether `nvidia-smi` hangs.")
    if tried["sees"] == 0:
        return fail(
            ACCELERATORS,
            f"{but}torch, built for CUDA {report['torch_cuda']}, sees none: {tried['why_none'] or 'CUDA shows none'}",
            "Update the driver to one that supports this CUDA, or install a build of torch for an older one.",
        )
    broken = {number: words for number, words in enumerate(tried["devices"]) if words}
    if broken:
        said = "; ".join(f"cuda:{number}: {words}" for number, words in broken.items())
        return fail(
            ACCELERATORS,
            f"{but}torch cannot compute on {len(broken)} of {tried['sees']} ({said})",
            "If torch has no kernel for the device, install a build that has one. If the device is busy, see which "
            "process has it (nvidia-smi). Otherwise restart the host.",
        )
    # CUDA shows a process only one instance.
    count = len(found.host.slots)
    if tried["sees"] < count and kind_of(found.host.device).refusal(found.host, count) is None:
        return fail(ACCELERATORS, f"{but}CUDA shows torch {tried['sees']} of them", "See what `nvidia-smi` says.")
    if tried["together"]:
        return fail(
            ACCELERATORS,
            f"{but}two of them cannot reduce together by NCCL: {tried['together']}",
            "NCCL_DEBUG=INFO shows more. Mostly /dev/shm is too small (Docker: --shm-size=8g), or the GPUs cannot "
            "reach each other (NCCL_P2P_DISABLE=1 avoids that).",
        )
    return ok(ACCELERATORS, _slots(found))


def _slots(found: DevicesFound) -> str:
    host = found.host
    size = bytes_shown(host.memory_per_slot) if host.memory_per_slot else "unknown size"
    memory = f"{len(host.slots)} slots of {size}"
    on_the_processor = kind_of(host.device).computes_on_the_processor
    return f"no GPU; {memory}, a core each" if on_the_processor else f"{memory} (GPUs, driver {found.driver})"


def check_devices(found: DevicesFound | InputError) -> list[Check]:
    """Checks the state of each device; returns no line if there is nothing to report.

    Args:
        found: what the drivers say.
    """
    if isinstance(found, InputError) or not (found.conditions or found.host.notes):
        return []
    said = "; ".join([*found.host.notes, *map(_state, found.conditions)])
    remedies = {remedy: verdict for each in found.conditions for remedy, verdict in _remedies(each).items()}
    if not remedies:
        return [ok(DEVICES, said)]
    is_broken = any(fails for fails in remedies.values())
    return [(fail if is_broken else warn)(DEVICES, said, " ".join(remedies))]


def _state(condition: DeviceCondition) -> str:
    """Returns the state of a device in words."""
    words = [f"{condition.device}: {condition.model or 'of no known model'}"]
    if condition.memory is not None and condition.memory_used is not None:
        words.append(f"{bytes_shown(condition.memory_used)} of {bytes_shown(condition.memory)} in use")
    if condition.tenants:
        words.append(f"others compute there: {company_said(list(map(neighbour, condition.tenants)))}")
    words += [
        text
        for holds, text in (
            (condition.is_cut, "cut into instances (MIG)"),
            (condition.is_closed, "closed to all (compute mode prohibited)"),
            (condition.is_exclusive, "for one process at a time (compute mode exclusive)"),
            (condition.forgets, "persistence mode off"),
        )
        if holds
    ]
    return ", ".join([*words, *condition.faults])


def _remedies(condition: DeviceCondition) -> dict[str, bool]:
    """Returns the remedies for a device, each with whether a study would fail without it."""
    found: dict[str, bool] = {}
    if condition.tenants:
        found[
            "Wait for the other processes, or name other GPUs in CUDA_VISIBLE_DEVICES. Beside them a trial is slower."
        ] = False
    if condition.is_closed:
        found["Open it: nvidia-smi -c 0."] = True
    if condition.forgets:
        found["Keep the driver up between trials: nvidia-smi -pm 1, or nvidia-persistenced."] = False
    if condition.faults:
        found["Reset the device (nvidia-smi -r) or restart the host. If that does not help, replace it."] = False
    return found
