"""Devices that can be foreseen, and clusters of them. Pure.

`devices.yaml` beside this module has the figures and their sources. The peak FLOP/s are those of
`trial_lib/device/data_sheets.py`.
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from trial_lib.device.data_sheets import DataSheet, sheet_name, sheet_of
from trial_lib.messages.errors import InputError
from trial_lib.messages.foreseen_run import OPERATIONS, Operation
from trial_lib.records.candidate import FrozenRecord
from trial_lib.records.folders import StudyPaths

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
    """What is known of a device without having it. Rates are bytes a second in one direction."""

    name: str  # such as `h100-80gb`
    memory: float  # bytes that torch sees
    peaks: Mapping[str, float]  # the most FLOP/s of its products of matrices, by the names of types as in `DataSheet`
    bandwidth: float  # of its memory
    link: float  # from one device to the others of its host
    network: float  # from one device to other hosts
    to_host: float  # between it and its host
    host_memory: float  # bytes of the host's memory for each device
    host_bandwidth: float  # of the host's memory, for each device
    host_cores: float  # of the host, for each device
    per_host: int = 8  # devices that its host usually has
    disk: float = 2.5e9  # what the host's NVMe drives read, for each device
    # The share of `peaks` that counts as the peak of a kind whose matrix units fall short of others'
    attained: float = 1.0
    capability: float = 8.0  # the compute capability of an NVIDIA device
    sheet: str = ""  # the name of its data sheet in `trial_lib/device/data_sheets.py`; empty if it has peaks of its own

    @property
    def cuda_name(self) -> str:
        """A name with the words of `torch.cuda.get_device_name`, by which programs look up what it can do."""
        maker = "AMD" if self.sheet.startswith("Instinct") else "NVIDIA"
        of_name = self.name.upper().split("-")
        sizes = [word for word in of_name if re.fullmatch(r"\d+GB", word)]
        return " ".join((maker, self.sheet, *sizes) if self.sheet else (maker, *of_name))

    def peak(self, dtype: str) -> float:
        """The most FLOP/s in a type, such as `torch.bfloat16`; of `float32` if its matrix units lack that."""
        name = dtype.removeprefix("torch.")
        short = "float8" if name.startswith("float8") else name
        return self.peaks.get(short, self.peaks["float32"])


@dataclass(frozen=True, kw_only=True)
class Cluster:
    device: DeviceFigures  # the kind
    hosts: int = 1  # that have them
    per_host: int = 1  # devices of each host that train

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    def __str__(self) -> str:
        count = f"{self.hosts}x{self.per_host}" if self.hosts > 1 else str(self.per_host)
        return f"{self.device.name}:{count}"


def known_devices(own: Path | None = None) -> dict[str, DeviceFigures]:
    """All devices by name. Raises InputError if a file cannot be used.

    `own` is a YAML file of the user's with more devices, as `devices.yaml`. An entry may say `like: h100-80gb`, and
    then only what differs.
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


# How much of a data sheet's figures a training gets, with what is unknown about it.


@dataclass(frozen=True)
class Constant:
    """A positive number that is not known exactly."""

    value: float  # its median
    spread: float  # the standard deviation of its logarithm, from device to device and model to model


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """The constants of the foreseen time. Shares are of the data sheet's figure."""

    # Share of the peak FLOP/s that products of matrices get, convolutions included
    matmul: Constant = Constant(0.62, 0.12)
    # Share of it that fused causal attention seems to get, as FLOPs of the model count. It computes half.
    attention: Constant = Constant(0.81, 0.3)
    memory: Constant = Constant(0.83, 0.12)  # share of the memory's bandwidth that all other operations get
    link: Constant = Constant(0.56, 0.25)  # share of the links within a host that collectives get
    network: Constant = Constant(0.42, 0.35)  # share of the network
    to_host: Constant = Constant(0.76, 0.3)  # share of the link to the host
    # The public rows say 0.12. A host with 16 cores for one H200 was 8 times as fast (`benchmarks/gpu`).
    host_update: Constant = Constant(0.12, 1.2)  # share of the host's memory bandwidth that DeepSpeed's CPU Adam gets
    # Share of the figure of NVMe drives. The figure itself is assumed, so nearly nothing is known of it.
    disk: Constant = Constant(1.0, 0.9)
    launch: Constant = Constant(8e-6, 0.3)  # seconds in which the host issues an operation
    collective: Constant = Constant(5e-5, 0.3)  # seconds in which the host issues a collective
    # Seconds of the hooks with which stage 3 surrounds each module, forward or backward
    module: Constant = Constant(2.9e-4, 0.4)
    whole: Constant = Constant(1.0, 0.36)  # what all of this leaves out. Its value multiplies a step.
    measured: int = 0  # steps that it was refitted to; 0 for the defaults
    device: str = ""  # that the steps are of; empty for the defaults, and for several kinds

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Efficiencies":
        """A constant that an older file lacks has its default. Raises TypeError if a key is unknown."""
        values: dict[str, Any] = {
            key: Constant(**value) if isinstance(value, Mapping) else value for key, value in plain.items()
        }
        return cls(**values)

    def changed(self, logarithms: Mapping[str, float]) -> "Efficiencies":
        """These constants, each multiplied by the exponential of its entry."""
        values: dict[str, Any] = {
            name: Constant(getattr(self, name).value * math.exp(shift), getattr(self, name).spread)
            for name, shift in logarithms.items()
        }
        return replace(self, **values)


CONSTANTS = tuple(each.name for each in fields(Efficiencies) if each.name not in ("measured", "device"))
"""The names of all constants."""


class DeviceSpeed(FrozenRecord):
    """The constants of one kind of device, learned from the trials of a study."""

    study_id: str  # of the study
    device: str  # the name of the kind, as `--on` has it
    ended_at: float  # when the study had ended, in seconds since the epoch
    steps: int  # measured configurations that they were learned from
    efficiencies: dict[str, Any]  # the constants (`Efficiencies` as JSON)

    @property
    def constants(self) -> Efficiencies:
        return Efficiencies.from_json(self.efficiencies)

    @property
    def sentence(self) -> str:
        steps = "one configuration" if self.steps == 1 else f"{self.steps} configurations"
        return f"Speeds on {self.device} come from {steps} that the study {self.study_id} has measured on it."


def read_device_speed(file: Path) -> DeviceSpeed | None:
    """None if the study has learned nothing of its devices, or the file is damaged."""
    try:
        found = DeviceSpeed.model_validate_json(file.read_text(encoding="utf-8"))
        found.constants  # noqa: B018 - a file of another version has other constants
    except (OSError, ValueError, TypeError):
        return None
    return found


def device_speeds(studies: Path) -> Mapping[str, DeviceSpeed]:
    """What the latest study of each kind of device has learned, by the kind's name."""
    found = [read_device_speed(StudyPaths(root).device_speed) for root in sorted(studies.glob("*"))]
    in_order = sorted((each for each in found if each is not None), key=lambda each: each.ended_at)
    return {each.device: each for each in in_order}


# Seconds of a transfer: bytes over the slowest link of its way, and the latency of each hop.

_BASE, _HOP_WITHIN, _HOP_BETWEEN = 8.4e-6, 3.4e-6, 14e-6
# How often a whole tensor goes around a ring.
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_to_all": 1}
_SEND = "send"
COLLECTIVES = (*_ROUNDS, _SEND)
"""The names in `OPERATIONS` of transfers between devices."""
DISK = ("from_disk", "to_disk")
"""The names in `OPERATIONS` of what NVMe drives do."""
# They wrote 5 GB/s where they read 10 (blogs/deepspeed-gds of DeepSpeed).
_WRITTEN = 0.5
# A transfer to the host has to be set up by the driver, and small ones wait for it.
_COPY_LATENCY = 10e-6
# Pages that are not locked are copied twice, by one thread of the host.
_UNLOCKED = 0.3


@dataclass(frozen=True)
class Group:
    ranks: int  # of the group
    members: int  # of them on one host

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.members)


def group_of(ranks: int, replicas: int, world: int, cluster: Cluster, stages: int = 1) -> Group:
    """Where the ranks of a collective are.

    Tensor and sequence parallelism take neighbouring ranks. The replicas of a model then are ranks at a distance, and a
    host has fewer of a group's ranks than it has devices. A group of as many ranks as `replicas` has them all. All
    ranks of a pipeline's stage are neighbours (`PipeModelDataParallelTopology` in deepspeed/runtime/pipe/topology.py).
    """
    shards = max(1, world // max(1, replicas) // stages)
    members = max(1, cluster.per_host // shards) if ranks == replicas else cluster.per_host
    return Group(ranks, max(1, min(ranks, members)))


def collective_seconds(kind: str, size: float, group: Group, cluster: Cluster, efficiencies: Efficiencies) -> float:
    """`size` is the bytes of the whole tensor: what `all_gather` returns, what `reduce_scatter` takes.

    Every hop of a ring carries the same bytes, so its slowest link decides. A ring leaves a host once, and several
    rings share the host's adapters among its members. `send` is one hop, from a rank to another one of its group. In a
    group on several hosts, some ranks send to another host, and the others wait for them.
    """
    if group.ranks < 2:
        return 0.0
    device = cluster.device
    if kind == _SEND:
        if group.hosts == 1:
            return _BASE + _HOP_WITHIN + size / (device.link * efficiencies.link.value)
        return _BASE + _HOP_BETWEEN + size / (device.network * efficiencies.network.value)
    rounds = _ROUNDS[kind]
    carried = size * rounds * (group.ranks - 1) / group.ranks
    within = carried / (device.link * efficiencies.link.value) if group.members > 1 else 0.0
    hops = rounds * (group.ranks - 1)
    if group.hosts == 1:
        return _BASE + hops * _HOP_WITHIN + within
    outside = rounds * (group.hosts - 1)
    adapters = device.network * efficiencies.network.value * group.members
    # There each rank sends to all others itself, and its neighbours do so at the same time.
    between = (
        size * (group.ranks - group.members) / group.ranks / (adapters / group.members)
        if kind == "all_to_all"
        else carried / adapters
    )
    return _BASE + (hops - outside) * _HOP_WITHIN + outside * _HOP_BETWEEN + max(within, between)


def copy_seconds(size: float, is_pinned: bool, cluster: Cluster, efficiencies: Efficiencies) -> float:
    """The seconds of a copy between a device and its host, whose pages are locked if `is_pinned`."""
    share = efficiencies.to_host.value * (1.0 if is_pinned else _UNLOCKED)
    return _COPY_LATENCY + size / (cluster.device.to_host * share)


def swap_seconds(kind: str, size: float, cluster: Cluster, efficiencies: Efficiencies) -> float:
    return size / (cluster.device.disk * efficiencies.disk.value * (_WRITTEN if kind == "to_disk" else 1.0))


# Seconds of an operation on a device or its host: the slower of arithmetic and memory.

ON_MATRIX_UNITS = ("matmul", "convolution", "attention", "whole_attention")
"""The names in `OPERATIONS` of what counts by its FLOPs as well as by its bytes."""
# A causal kernel computes half of the pairs of positions, and all count as FLOPs of the model (PaLM, appendix B). So it
# seems to be twice as fast as a kernel that computes all of them.
_SHARES = {"whole_attention": 0.5}
# No kernel is shorter: its blocks have to start and to end.
_SHORTEST = 3e-6


def kernel_seconds(operation: Operation, dtype: str, device: DeviceFigures, efficiencies: Efficiencies) -> float:
    """The seconds of an operation that the device does itself. `dtype` is that of its products, or of its inputs."""
    moving = operation.moved / (device.bandwidth * efficiencies.memory.value)
    kind = OPERATIONS[operation.kind]
    if kind not in ON_MATRIX_UNITS:
        return max(_SHORTEST, moving)
    share = _SHARES.get(kind, 1.0) * (efficiencies.attention if "attention" in kind else efficiencies.matmul).value
    return _SHORTEST + max(moving, operation.flops / (device.peak(dtype) * device.attained * share))


def host_seconds(operation: Operation, cluster: Cluster, efficiencies: Efficiencies) -> float:
    """Returns the seconds of an operation of the host's processor, such as DeepSpeed's CPU Adam.

    The host's memory bounds it: an update of Adam reads and writes 28 bytes for ten operations. A rank has its device's
    share of the host, as it has of the host's memory, whether the other devices train or not.
    """
    return operation.moved / (cluster.device.host_bandwidth * efficiencies.host_update.value)
