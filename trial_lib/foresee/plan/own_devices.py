"""The devices of this host, as a plan knows devices."""

from collections.abc import Mapping

from trial_lib.device.data_sheets import sheet_name, sheet_of
from trial_lib.device.host.base import Host
from trial_lib.foresee.plan.asked_devices import AskedDevices
from trial_lib.foresee.time.devices import Cluster, DeviceFigures
from trial_lib.wire.errors import InputError

_TERA = 1e12
_ALIKE = 0.1


def own_devices(host: Host, known: Mapping[str, DeviceFigures], prices: Mapping[str, float]) -> AskedDevices:
    """Returns the devices of a host.

    Args:
        host: this host.
        known: the known devices by name.
        prices: of one device for one hour, by the device's name.

    Raises:
        InputError: it has no GPU, or none that is known.
    """
    if host.device != "cuda":
        raise InputError(
            "this host has no GPU to plan for.", where="--on", remedy="Name devices, such as --on h100-80gb:8."
        )
    found = own_kind(host, known)
    if found is None:
        named = " and ".join(sorted({*host.models.values()})) or "the GPU of this host"
        raise InputError(
            f"no known device is {named}.",
            where="--on",
            remedy="Name a device that is like it, or describe it in a file (--devices).",
        )
    return AskedDevices(Cluster(device=found, per_host=len(host.slots)), prices.get(found.name), is_here=True)


def own_kind(host: Host, known: Mapping[str, DeviceFigures]) -> DeviceFigures | None:
    """Returns the known device that a host's GPUs are; None if they are none of them, or of several models."""
    models = {*host.models.values()}
    return _device(models.pop(), host, known) if len(models) == 1 else None


def _device(model: str, host: Host, known: Mapping[str, DeviceFigures]) -> DeviceFigures | None:
    """Returns the known device of a model's data sheet with nearly its memory.

    If no known device has the sheet, one with the sheet's peak counts. Cards of other forms have the same peaks, and
    other links.
    """
    sheet, name = sheet_of(model), sheet_name(model)
    if sheet is None:
        return None
    memory = next(iter(host.memory.values()), host.memory_per_slot)
    of_sheet = [device for device in known.values() if device.sheet == name]
    alike = of_sheet or [device for device in known.values() if device.peaks.get("float32") == sheet.float32 * _TERA]
    fitting = [each for each in alike if not memory or abs(each.memory - memory) < _ALIKE * each.memory]
    return min(fitting, key=lambda device: abs(device.memory - memory), default=None)
