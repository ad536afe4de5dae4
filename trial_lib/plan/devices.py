"""Devices that can be foreseen, and clusters of them. Pure.

`devices.yaml` beside this module has the figures and their sources. The peak FLOP/s are those of
`trial_lib/device/data_sheets.py`.
"""

import csv
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.device.data_sheets import DataSheet, sheet_name, sheet_of
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.foreseen_run import BFLOAT16_SINCE, OPERATIONS, ForeseenRun, Operation

_GIB, _GIGA, _TERA = 2.0**30, 1e9, 1e12
_OWN_FILE = Path(__file__).with_name("devices.yaml")
# In gigabytes a second, and one number without a unit.
_RATES = ("bandwidth", "link", "network", "to_host", "host_bandwidth", "disk")
_SIZES = {"memory_gib": "memory", "host_memory_gib": "host_memory"}
_NUMBERS = (*_SIZES, *_RATES, "host_cores", "per_host", "attained", "attention", "capability", "on_switch")
_OPTIONAL = ("attained", "attention", "capability", "disk", "on_switch")
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
    on_switch: float = 1.0  # devices of a host that share one link to it
    disk: float = 2.5e9  # what the host's NVMe drives read, for each device
    # The share of `peaks` that counts as the peak of a kind whose matrix units fall short of others'
    attained: float = 1.0
    # The share of its peak that fused causal attention seems to get, whatever torch; 0 if its kernel decides
    attention: float = 0.0
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
    """All devices by name, those of the user's own YAML among them. Raises InputError if it cannot be used."""
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
    value: float  # its median
    spread: float  # the standard deviation of its logarithm, from device to device and model to model


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """The constants of the foreseen time. Shares are of the data sheet's figure."""

    # Share of the peak FLOP/s that products of matrices get, convolutions included
    matmul: Constant = Constant(0.66, 0.12)
    attention: Constant = Constant(1.05, 0.2)  # share of what a fused kernel of attention gets that trainings get
    memory: Constant = Constant(0.81, 0.12)  # share of the memory's bandwidth that all other operations get
    link: Constant = Constant(0.67, 0.25)  # share of the links within a host that collectives get
    network: Constant = Constant(0.48, 0.35)  # share of the network
    to_host: Constant = Constant(0.76, 0.3)  # share of the link to the host
    # Share of the host's memory bandwidth that DeepSpeed's CPU Adam gets, if all ranks of a host update at once
    host_update: Constant = Constant(0.17, 1.2)
    # Share of the figure of NVMe drives. The figure itself is assumed, so nearly nothing is known of it.
    disk: Constant = Constant(1.0, 0.9)
    # Seconds in which the host issues an operation, with the model's own Python. The public rows do not decide it. On
    # an H200's host steps of many small ones took 16 us for each (benchmarks/results/gpu_h200_steps_foreseen.json).
    launch: Constant = Constant(1.6e-5, 0.5)
    collective: Constant = Constant(5e-5, 0.3)  # seconds in which the host issues a collective
    # Seconds of the hooks with which stage 3 surrounds each module, forward or backward
    module: Constant = Constant(2e-4, 0.4)
    # What all of this leaves out. Its value multiplies a step. The spread is that by which 90 % of left-out sources are
    # held (benchmarks/foresee/public_gpus/fit_speed.py).
    whole: Constant = Constant(1.0, 0.35)


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


def group_of(operation: Operation, run: ForeseenRun, cluster: Cluster) -> Group:
    """Where the ranks of a collective are.

    Tensor and sequence parallelism take neighbouring ranks. The replicas of a model then are ranks at a distance, and a
    host has fewer of a group's ranks than it has devices. All ranks of a pipeline's stage are neighbours
    (`PipeModelDataParallelTopology` in deepspeed/runtime/pipe/topology.py).
    """
    shards = max(1, run.world // run.zero_ranks // run.pipeline_stages)
    apart = operation.apart or (shards if run.shares_states(operation) else 1)
    return Group(operation.ranks, max(1, min(operation.ranks, cluster.per_host // apart)))


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
    """The seconds of a copy between a device and its host, whose pages are locked if `is_pinned`.

    Ranks copy at the same time, so neighbours share their link.
    """
    share = efficiencies.to_host.value * (1.0 if is_pinned else _UNLOCKED)
    share /= min(cluster.device.on_switch, cluster.per_host)
    return _COPY_LATENCY + size / (cluster.device.to_host * share)


def swap_seconds(kind: str, size: float, cluster: Cluster, efficiencies: Efficiencies) -> float:
    return size / (cluster.device.disk * efficiencies.disk.value * (_WRITTEN if kind == "to_disk" else 1.0))


# Seconds of an operation on a device or its host: the slower of arithmetic and memory.

ON_MATRIX_UNITS = ("matmul", "convolution", "attention", "whole_attention")
"""The names in `OPERATIONS` of what counts by its FLOPs as well as by its bytes."""
# The share of the peak that fused causal attention of long sequences seems to get. It computes half of the pairs of
# positions, and all count as FLOPs of the model (PaLM, appendix B). By compute capability.
# flash-attn 1 gets 25 to 40 % of an A100, flash-attn 2 up to 73 forward and 63 backward (Dao, arXiv 2307.08691). On an
# H100 flash-attn 2 gets 370 and 322 of 989 TFLOP/s, cuDNN 600 and 516 (charts of Shah et al., arXiv 2407.08608). That
# is without a mask. The charts' 0.55 leads from there to a causal kernel. A backward pass has 2.5 times the work.
# flash-attn 1 on an H100 is in neither, and counts as falling short of version 2 by as much as on an A100.
# Since which torch, from which capability to which: cuDNN (transformers#48163), flash-attn 2, 1, and a guess.
_ATTENTION = (
    ((2, 11), 9.0, 11.0, 0.98),
    *(((2, 2), 9.0, math.inf, 0.61), ((2, 2), 8.0, 9.0, 1.19)),
    *(((0, 0), 9.0, math.inf, 0.30), ((0, 0), 8.0, 9.0, 0.59), ((0, 0), 0.0, 8.0, 0.4)),
)
# All pairs of positions take longer than a causal kernel's half of them. With 300 positions a kernel is half as fast as
# with many: from 512 to 16,384 that is mostly within 15 % of the same charts.
_SHARES, _POSITIONS = {"attention": 1.0, "whole_attention": 0.55}, 300.0
# No kernel is shorter: its blocks have to start and to end.
_SHORTEST = 3e-6


def attention_share(device: DeviceFigures, torch: str = "") -> float:
    """The share of its peak that fused causal attention of long sequences seems to get, by a version of torch."""
    version = tuple(map(int, re.findall(r"\d+", torch or "99.0")[:2]))
    return device.attention or next(
        share for since, least, below, share in _ATTENTION if version >= since and least <= device.capability < below
    )


def kernel_seconds(
    operation: Operation, dtype: str, device: DeviceFigures, efficiencies: Efficiencies, torch: str = ""
) -> float:
    """The seconds of an operation that the device does itself. `dtype` is that of its products, or of its inputs, and
    `torch` the version that chooses its kernels.
    """
    moving = operation.moved / (device.bandwidth * efficiencies.memory.value)
    kind = OPERATIONS[operation.kind]
    if kind not in ON_MATRIX_UNITS:
        return max(_SHORTEST, moving)
    rate = device.peak(dtype)
    if kind in _SHARES:
        rate *= _SHARES[kind] * attention_share(device, torch) * efficiencies.attention.value
        # Queries, keys, values and results in 16 bits have a FLOP for each two bytes and position.
        rate /= 1 + _POSITIONS * operation.moved / (2 * operation.flops or 1.0)
    else:
        rate *= device.attained * efficiencies.matmul.value
    return _SHORTEST + max(moving, operation.flops / rate)


_OF_THREAD, _OF_MEMORY = 4.6e9, 0.96


def host_seconds(operation: Operation, cluster: Cluster, efficiencies: Efficiencies) -> float:
    """Returns the seconds of an operation of the host's processor, such as DeepSpeed's CPU Adam.

    The host's memory bounds it: an update of Adam reads and writes 28 bytes for ten operations. A rank has its device's
    share of the host, as it has of the host's memory. Launchers give each of several ranks one thread, or leave all
    cores to all of them. A rank that is alone has a thread on each of its cores.
    """
    device = cluster.device
    rate = device.host_bandwidth * efficiencies.host_update.value
    if cluster.per_host == 1:
        # Both figures are of a host with 16 cores for one H200, whose update got 74 GB/s (`benchmarks/gpu`).
        rate = max(rate, min(device.host_cores * _OF_THREAD, _OF_MEMORY * device.host_bandwidth))
    return operation.moved / rate


# The devices of a plan as they are typed, such as `a100-40gb:2x8` or `h200:8`, and their prices, `h100-80gb=2.99`.

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
    typed: Sequence[str],
    prices: Sequence[str],
    known: Mapping[str, DeviceFigures],
    listed: Mapping[str, float] | None = None,
) -> tuple[AskedDevices, ...]:
    """The devices of `--on`, in its order, with the prices of `--price`, or else those that a file has `listed`.

    Raises InputError if a word is malformed, names an unknown device, or is there twice.
    """
    clusters = [_read_cluster(word, known) for word in typed]
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
    costs = {**(listed or {}), **costs}
    return tuple(AskedDevices(cluster, costs.get(cluster.device.name)) for cluster in clusters)


def read_prices(prices: Sequence[str], known: Mapping[str, DeviceFigures]) -> dict[str, float]:
    """The price of one device for one hour, by the device's name. Raises InputError if a word is malformed, names an
    unknown device, or is there twice.
    """
    costs: dict[str, float] = {}
    for word in prices:
        name, _, amount = word.partition("=")
        remedy = "Write NAME=PRICE, the price of one device for one hour, such as h100-80gb=2.99."
        _add_price(costs, name, amount, known, f"--price {word}", f'"{word}" is no price.', remedy)
    return costs


def read_price_file(file: Path, known: Mapping[str, DeviceFigures]) -> dict[str, float]:
    """As `read_prices`, from lines of `NAME: PRICE` (YAML) or `NAME,PRICE` (CSV), which may have a heading."""
    remedy = "Write one device a line, as `h100-80gb: 2.99` in YAML or `h100-80gb,2.99` in CSV."
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix.lower() == ".csv":
            lines = [line for line in csv.reader(text.splitlines()) if any(map(str.strip, line))]
            heading = bool(lines) and not any(map(str.isdigit, "".join(lines[0][1:])))
            rows = [(line[0], ",".join(line[1:]).strip()) for line in lines[heading:]]
        else:
            rows = [(str(name), str(price)) for name, price in dict(yaml.safe_load(text) or {}).items()]
    except (OSError, ValueError, TypeError, yaml.YAMLError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise InputError(f"it has no prices ({why}).", where=str(file), remedy=remedy) from None
    costs: dict[str, float] = {}
    for name, amount in rows:
        _add_price(costs, name, amount, known, str(file), f'"{amount}" is no price of "{name}".', remedy)
    if not costs:
        raise InputError("it has no prices.", where=str(file), remedy=remedy)
    return costs


def _add_price(
    costs: dict[str, float],
    name: str,
    amount: str,
    known: Mapping[str, DeviceFigures],
    where: str,
    problem: str,
    remedy: str,
) -> None:
    try:
        price = float(amount)
    except ValueError:
        price = math.nan
    if not name or not math.isfinite(price) or price < 0:
        raise InputError(problem, where=where, remedy=remedy)
    device = _known(name, known, where).name
    if device in costs:
        raise InputError(f"{device} has two prices.", where=where, remedy="Leave one of them out.")
    costs[device] = price


def _read_cluster(word: str, known: Mapping[str, DeviceFigures]) -> Cluster:
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
    """The known device of the data sheet of the host's GPUs, with nearly their memory; None if they are of several
    models. If no known device has the sheet, one with the sheet's peak counts, whose links may be others.
    """
    models = {*host.models.values()}
    model = models.pop() if len(models) == 1 else ""
    sheet, name = sheet_of(model), sheet_name(model)
    if sheet is None:
        return None
    memory = next(iter(host.memory.values()), host.memory_per_slot)
    of_sheet = [device for device in known.values() if device.sheet == name]
    alike = of_sheet or [device for device in known.values() if device.peaks.get("float32") == sheet.float32 * _TERA]
    fitting = [each for each in alike if not memory or abs(each.memory - memory) < _ALIKE * each.memory]
    return min(fitting, key=lambda device: abs(device.memory - memory), default=None)
