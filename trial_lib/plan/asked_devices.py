"""The devices of a plan as they are typed, such as `a100-40gb:2x8` or `h200:8`, and their prices, `h100-80gb=2.99`."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trial_lib.device.base import Host
from trial_lib.device.data_sheets import sheet_name, sheet_of
from trial_lib.messages.errors import InputError
from trial_lib.messages.foreseen_run import BFLOAT16_SINCE
from trial_lib.plan.devices import Cluster, DeviceFigures

MOST_DEVICES = 65_536
"""A plan foresees one rank of them. No source here has measured larger rings."""

_COUNT = re.compile(r"(?:([1-9]\d{0,6})[x*])?([1-9]\d{0,6})")
_NEAR, _LISTED = 4, 12


@dataclass(frozen=True)
class AskedDevices:
    cluster: Cluster  # the devices
    price: float | None = None  # of one device for one hour, in the user's currency; None if the user gives none
    is_here: bool = False  # whether they are this host's own

    @property
    def count(self) -> int:
        return self.cluster.ranks


def ran_as(asked: Sequence[AskedDevices], base: AskedDevices) -> list[str]:
    """A sentence about programs that choose a number format by the device, if some differ in that from `base`."""
    name = base.cluster.device.name
    has = {each.cluster.device.name: each.cluster.device.capability >= BFLOAT16_SINCE for each in asked}
    others = [each for each, has_bfloat16 in has.items() if has_bfloat16 != has[name]]
    if not others:
        return []
    return [
        f"The program ran as on {name}. {' and '.join(others)} {'differ' if len(others) > 1 else 'differs'} from it in "
        "bfloat16, so a program that chooses its number format by the device may choose another one there."
    ]


def read_devices(
    typed: Sequence[str], prices: Sequence[str], known: Mapping[str, DeviceFigures]
) -> tuple[AskedDevices, ...]:
    """The devices of `--on`, in its order, with the prices of `--price`. Raises InputError if a word is malformed,
    names an unknown device, or is there twice.
    """
    clusters = [_read(word, known) for word in typed]
    costs = read_prices(prices, known)
    names = {cluster.device.name for cluster in clusters}
    for name in costs:
        if name not in names:
            raise InputError(
                f"no --on asks for {name}.",
                where=f"--price {name}",
                remedy=f"Add --on {name}:8, or leave the price out.",
            )
    for index, cluster in enumerate(clusters):
        if cluster in clusters[:index]:
            raise InputError(f"{cluster} is there twice.", where=f"--on {cluster}", remedy="Leave one out.")
    return tuple(AskedDevices(cluster, costs.get(cluster.device.name)) for cluster in clusters)


def read_prices(prices: Sequence[str], known: Mapping[str, DeviceFigures]) -> dict[str, float]:
    """The price of one device for one hour, by the device's name. Raises InputError if a word is malformed, names an
    unknown device, or is there twice.
    """
    costs: dict[str, float] = {}
    for word in prices:
        where = f"--price {word}"
        name, sign, amount = word.partition("=")
        try:
            price = float(amount)
        except ValueError:
            price = math.nan
        if not sign or not name or not math.isfinite(price) or price < 0:
            raise InputError(
                f'"{word}" is no price.',
                where=where,
                remedy="Write NAME=PRICE, the price of one device for one hour, such as h100-80gb=2.99.",
            )
        device = _known(name, known, where).name
        if device in costs:
            raise InputError(f"{device} has two prices.", where=where, remedy="Leave one of them out.")
        costs[device] = price
    return costs


def _read(word: str, known: Mapping[str, DeviceFigures]) -> Cluster:
    where = f"--on {word}"
    name, colon, count = word.strip().partition(":")
    found = _COUNT.fullmatch(count.strip().lower()) if colon else None
    if not name or (colon and found is None):
        raise InputError(
            f'"{word}" is no number of devices.',
            where=where,
            remedy="Write NAME:NUMBER, or NAME:HOSTSxNUMBER for several hosts, such as h100-80gb:8 or a100-40gb:2x8.",
        )
    device = _known(name, known, where)
    hosts, each = (1, 1) if found is None else (int(found[1] or 1), int(found[2]))
    if found is not None and found[1] is None and each > device.per_host:
        hosts, each = _hosts_of(each, device, where)
    if hosts * each > MOST_DEVICES:
        raise InputError(
            f"{hosts * each:,} devices are more than a plan can foresee.",
            where=where,
            remedy=f"Ask for at most {MOST_DEVICES:,}.",
        )
    return Cluster(device=device, hosts=hosts, per_host=each)


def _hosts_of(count: int, device: DeviceFigures, where: str) -> tuple[int, int]:
    if count % device.per_host:
        raise InputError(
            f"{count} devices do not fill hosts of {device.per_host}.",
            where=where,
            remedy=f"Write hosts and devices of a host, such as {device.name}:2x{device.per_host}.",
        )
    return count // device.per_host, device.per_host


def _known(name: str, known: Mapping[str, DeviceFigures], where: str) -> DeviceFigures:
    """A device by its name, in any case and with any separators.

    A part of a name is taken if it means one device alone: its kind (`h200`), with its form (`h100-pcie`) or without
    the maker's word (`4090`).
    """
    plain = {_plain(each): device for each, device in known.items()}
    if (found := plain.get(_plain(name))) is not None:
        return found
    meant = [device for each, device in known.items() if _plain(name) in _short(each)]
    if len(meant) == 1:
        return meant[0]
    if meant:
        names = [device.name for device in meant]
        raise InputError(
            f'"{name}" may be {", ".join(names[:-1])} or {names[-1]}.',
            where=where,
            remedy=f"Write one of them, such as {names[0]}.",
        )
    raise InputError(
        f'no device is called "{name}".',
        where=where,
        remedy=f"{_nearest(name, plain)} A file of yours can describe others (--devices).",
    )


def _short(name: str) -> set[str]:
    kind, *more = name.lower().split("-")
    form = "".join(more[1:])
    bare = re.sub(r"^(rtx|gtx)", "", kind)
    return {_plain(each) for each in (kind, bare, kind + form, bare + form)} - {""}


def _nearest(name: str, plain: Mapping[str, DeviceFigures]) -> str:
    # A sentence with the names that are nearest to an unknown one; with many if none is near.
    word = _plain(name)
    within = [each for each in plain if word and word in each]
    near = [*within, *difflib.get_close_matches(word, plain, n=_NEAR, cutoff=0.5)]
    names = [plain[each].name for each in dict.fromkeys(near)][:_NEAR]
    if names:
        return f"The nearest: {', '.join(names)}."
    listed = sorted(device.name for device in plain.values())
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return f"Known: {', '.join(listed[:_LISTED])}{more}."


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# The devices of this host, as a plan knows devices.

_TERA = 1e12
_ALIKE = 0.1


def own_devices(host: Host, known: Mapping[str, DeviceFigures], prices: Mapping[str, float]) -> AskedDevices:
    """The devices of this host. Raises InputError if it has no GPU, or none that is known."""
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
    """None if the host's GPUs are no known device, or of several models."""
    models = {*host.models.values()}
    return _device(models.pop(), host, known) if len(models) == 1 else None


def _device(model: str, host: Host, known: Mapping[str, DeviceFigures]) -> DeviceFigures | None:
    """The known device of a model's data sheet with nearly its memory.

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
