"""The cluster of a public measurement, from the words of its row. Pure."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.foresee.public_gpus.row_device import device_of
from zerotune.trial_lib.plan.devices import Cluster, DeviceFigures

_STATED = re.compile(r"(?:(\d+) x )?(\d+) Gbit/s.*?per (GPU|(?:\d+-GPU )?node)")
_BYTES = 1e9 / 8
# What rows leave out: a DGX-2 has 16 devices and, by the rows that state it, 4 adapters of 100 Gbit/s.
_BY_WORDS = (("dgx-2", 25 * _BYTES),)
# Hosts of Jean Zay have 4 devices and 4 such adapters. A group of ranks used about one of them: 16 hosts reduced at 44
# to 57 Gbit/s (bigscience, experiments/bandwidth/README.md). With tensor parallelism a host has several groups.
_ONE_ADAPTER_A_GROUP = "4 gpu node"
# Two Xeon 6248 with 12 channels of DDR4-2933.
_JEAN_ZAY = 281e9


def cluster_of(row: Mapping[str, Any]) -> Cluster | None:
    """Returns the devices of a row; None if their kind is not among the known devices."""
    kind, words = row["gpu_kind"].lower(), str(row.get("interconnect") or "")
    device = device_of(row)
    if device is None:
        return None
    per_host = min(row["gpus"], row.get("gpus_per_node") or device.per_host)
    device = _linked(device, kind, words, per_host)
    if _ONE_ADAPTER_A_GROUP in words.lower():
        shards = min(per_host, row.get("tensor_parallel") or 1)
        device = replace(device, network=100 * _BYTES * shards / per_host, host_bandwidth=_JEAN_ZAY / per_host)
    return Cluster(device=device, hosts=-(-row["gpus"] // per_host), per_host=per_host)


def _linked(device: DeviceFigures, kind: str, words: str, per_host: int) -> DeviceFigures:
    # A source had the whole host, with all of its cores and its memory's bandwidth, however many devices trained.
    times = max(1.0, device.per_host / per_host)
    device = replace(device, host_bandwidth=device.host_bandwidth * times, host_cores=device.host_cores * times)
    if stated := _STATED.search(words):
        of_all = int(stated[1] or 1) * int(stated[2]) * _BYTES
        return replace(device, network=of_all if stated[3] == "GPU" else of_all / per_host)
    named = f"{kind} {words.lower()}"
    network = next((rate for part, rate in _BY_WORDS if part in named), device.network)
    return replace(device, network=network)
