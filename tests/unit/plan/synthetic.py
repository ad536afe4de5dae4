"""Foreseen runs with a few operations whose seconds can be told by hand."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from zerotune.trial_lib.messages.foreseen_run import MOMENTS, OPERATIONS, ForeseenRun, Moment, Operation
from zerotune.trial_lib.plan.devices import Cluster, Constant, DeviceFigures, Efficiencies

# A tera-FLOP takes a second, as do a gigabyte of memory, of links, of pages and of files, and 2 of the host's.
DEVICE = DeviceFigures(
    name="round",
    memory=1e12,
    peaks={"float32": 1e12, "bfloat16": 1e12},
    bandwidth=1e9,
    link=1e9,
    network=0.1e9,
    to_host=1e9,
    host_memory=1e12,
    host_bandwidth=2e9,
    host_cores=1,
    disk=1e9,
)
TWO = Cluster(device=DEVICE, per_host=2)
EXACT = Efficiencies(
    **{
        each.name: Constant(1e-9 if each.name in ("launch", "collective", "module") else 1.0, 0.1)
        for each in fields(Efficiencies)
    }  # type: ignore[arg-type]
)
SECOND = 1e12


def product(seconds: float) -> Operation:
    return Operation(OPERATIONS.index("matmul"), 0, seconds * SECOND, 1.0)


def moving(seconds: float, kind: str = "elementwise", on_host: int = 0) -> Operation:
    return Operation(OPERATIONS.index(kind), 0, 0.0, seconds * 1e9, on_host=on_host)


def carried(seconds: float, kind: str, ranks: int = 2) -> Operation:
    """A collective of two ranks that takes so long: half of its bytes cross, or all for an all-reduce."""
    return Operation(OPERATIONS.index(kind), 0, 0.0, seconds * 1e9 * (1 if kind == "all_reduce" else 2), ranks)


def run_of(
    *stretches: tuple[str, Sequence[Operation]], micro_batches: Sequence[int] | None = None, **fields: Any
) -> ForeseenRun:
    """A run whose first step is these moments."""
    operations, moments = [], []
    for index, (name, stretch) in enumerate(stretches):
        micro_batch = micro_batches[index] if micro_batches else 0
        moments.append(Moment(MOMENTS.index(name), 1, micro_batch, 0, len(operations)))
        operations += stretch
    given = {"world": 2, "replicas": 2, "dtypes": ("bfloat16",), "formats": ("bfloat16",), **fields}
    return ForeseenRun(operations=tuple(operations), moments=tuple(moments), **given)
