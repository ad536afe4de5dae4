"""Devices that can be foreseen, and clusters of them. Pure.

`devices.yaml` beside this module has the figures and their sources. The peak FLOP/s are those of
`trial_lib/device/data_sheets.py`.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from trial_lib.device.data_sheets import DataSheet, sheet_name, sheet_of
from trial_lib.wire.errors import InputError

_GIB, _GIGA, _TERA = 2.0**30, 1e9, 1e12
_OWN_FILE = Path(__file__).with_name("devices.yaml")
# In gigabytes a second, and one number without a unit.
_RATES = ("bandwidth", "link", "network", "to_host", "host_bandwidth", "disk")
_SIZES = {"memory_gib": "memory", "host_memory_gib": "host_memory"}
_NUMBERS = (*_SIZES, *_RATES, "host_cores", "per_host", "attained", "capability")
_OPTIONAL = ("attained", "capability", "disk")
_KEYS = ("like", "sheet", "teraflops", *_NUMBERS)
_DTYPES = tuple(each.name for each in fields(DataSheet) if each.name != "multiprocessors")


@dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """What is known of a device without having it. Rates are bytes a second in one direction.

    Attributes:
        name: such as `h100-80gb`.
        memory: bytes that torch sees.
        peaks: the most FLOP/s of its products of matrices, by the names of types as in `DataSheet`.
        bandwidth: of its memory.
        link: from one device to the others of its host.
        network: from one device to other hosts.
        to_host: between it and its host.
        host_memory: bytes of the host's memory for each device.
        host_bandwidth: of the host's memory, for each device.
        host_cores: of the host, for each device.
        per_host: devices that its host usually has.
        disk: what the host's NVMe drives read, for each device.
        sheet: the name of its data sheet in `trial_lib/device/data_sheets.py`; empty if it has peaks of its own.
        attained: the share of `peaks` that counts as the peak of a kind whose matrix units fall short of others'.
        capability: the compute capability of an NVIDIA device.
    """

    name: str
    memory: float
    peaks: Mapping[str, float]
    bandwidth: float
    link: float
    network: float
    to_host: float
    host_memory: float
    host_bandwidth: float
    host_cores: float
    per_host: int = 8
    disk: float = 2.5e9
    attained: float = 1.0
    capability: float = 8.0
    sheet: str = ""

    @property
    def cuda_name(self) -> str:
        """A name with the words of `torch.cuda.get_device_name`, by which programs look up what it can do."""
        maker = "AMD" if self.sheet.startswith("Instinct") else "NVIDIA"
        of_name = self.name.upper().split("-")
        sizes = [word for word in of_name if re.fullmatch(r"\d+GB", word)]
        return " ".join((maker, self.sheet, *sizes) if self.sheet else (maker, *of_name))

    def peak(self, dtype: str) -> float:
        """Returns the most FLOP/s in a type; those of `float32` for a type that its matrix units lack.

        Args:
            dtype: such as `bfloat16`, `torch.bfloat16` or `tf32`.
        """
        name = dtype.removeprefix("torch.")
        short = "float8" if name.startswith("float8") else name
        return self.peaks.get(short, self.peaks["float32"])


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices of one kind.

    Attributes:
        device: the kind.
        hosts: that have them.
        per_host: devices of each host that train.
    """

    device: DeviceFigures
    hosts: int = 1
    per_host: int = 1

    @property
    def ranks(self) -> int:
        """All devices; one rank has one."""
        return self.hosts * self.per_host

    def __str__(self) -> str:
        """Returns what people type for it."""
        count = f"{self.hosts}x{self.per_host}" if self.hosts > 1 else str(self.per_host)
        return f"{self.device.name}:{count}"


def known_devices(own: Path | None = None) -> dict[str, DeviceFigures]:
    """Returns all devices by name.

    Args:
        own: a YAML file of the user's with more devices, as `devices.yaml`. An entry may say
            `like: h100-80gb`, and then only what differs.

    Raises:
        InputError: the file cannot be used.
    """
    devices = _read(_OWN_FILE, {})
    return devices if own is None else {**devices, **_read(own, devices)}


def _read(file: Path, known: Mapping[str, DeviceFigures]) -> dict[str, DeviceFigures]:
    where = str(file)
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise InputError(f"it cannot be read ({why}).", where=where, remedy="Give a YAML file with devices.") from None
    except yaml.YAMLError as error:
        raise InputError(
            f"it is not YAML: {' '.join(str(error).split())}.",
            where=where,
            remedy="Mend it, or compare it with the page.",
        ) from None
    if not isinstance(content, dict) or not all(isinstance(each, dict) for each in content.values()):
        raise InputError(
            "it has no devices.", where=where, remedy="Begin each with its name, and indent its figures below it."
        )
    return {str(name): _device(str(name), entry, known, where) for name, entry in content.items()}


def _device(name: str, entry: Mapping[str, Any], known: Mapping[str, DeviceFigures], where: str) -> DeviceFigures:
    for key in entry:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise InputError(
                f"`{name}` has the key `{key}`, which no device has.{hint}",
                where=where,
                remedy=f"Keys are {', '.join(_KEYS)}.",
            )
    base: dict[str, Any] = {}
    if "like" in entry:
        like = known.get(str(entry["like"]).lower())
        if like is None:
            near = difflib.get_close_matches(str(entry["like"]).lower(), known, n=3, cutoff=0.4)
            raise InputError(
                f"`{name}` is like `{entry['like']}`, which is unknown.",
                where=where,
                remedy=f"The nearest are {', '.join(near)}." if near else f"Known are {', '.join(known)}.",
            )
        base = {each.name: getattr(like, each.name) for each in fields(DeviceFigures)}
    peaks = _peaks(name, entry, where) or base.get("peaks")
    named = sheet_name(str(entry["sheet"])) if "sheet" in entry else base.get("sheet", "")
    values = {**base, **{_field(key): _number(name, key, entry[key], where) for key in _NUMBERS if key in entry}}
    per_host = values.get("per_host", 8)
    if per_host != int(per_host):
        raise InputError(f"`{name}` has `per_host: {per_host}`.", where=where, remedy="It must be a whole number.")
    values.update(name=name, peaks=peaks, per_host=int(per_host), sheet="" if "teraflops" in entry else named)
    missing = [key for key in _NUMBERS if _field(key) not in values and key not in _OPTIONAL]
    missing += [] if peaks else ["teraflops"]
    if missing:
        raise InputError(
            f"`{name}` lacks {', '.join(missing)}.",
            where=where,
            remedy="Add what is missing, or `like: h100-80gb` to take it from another device.",
        )
    return DeviceFigures(**values)


def _field(key: str) -> str:
    return _SIZES.get(key, key)


def _number(name: str, key: str, value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise InputError(f"`{name}` has `{key}: {value}`.", where=where, remedy="It must be a number above 0.")
    return float(value) * (_GIB if key in _SIZES else _GIGA if key in _RATES else 1.0)


def _peaks(name: str, entry: Mapping[str, Any], where: str) -> dict[str, float] | None:
    if "teraflops" in entry:
        given = entry["teraflops"]
        if not isinstance(given, dict) or "float32" not in given or not set(given) <= set(_DTYPES):
            raise InputError(
                f"`{name}` has `teraflops: {given}`.",
                where=where,
                remedy=f"Give TFLOP/s by type, `float32` among them. Types are {', '.join(_DTYPES)}.",
            )
        return {dtype: _number(name, f"teraflops.{dtype}", value, where) * _TERA for dtype, value in given.items()}
    if "sheet" not in entry:
        return None
    sheet = sheet_of(str(entry["sheet"]))
    if sheet is None:
        raise InputError(
            f"`{name}` has `sheet: {entry['sheet']}`, which is unknown.",
            where=where,
            remedy="Give its `teraflops` instead.",
        )
    return {dtype: value * _TERA for dtype in _DTYPES if (value := getattr(sheet, dtype)) is not None}
