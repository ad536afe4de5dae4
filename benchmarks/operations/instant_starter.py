"""A starter whose trials end at once: it writes the records that ranks would have left, and starts no process."""

import json
import socket
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from zerotune.trial_lib.launch.processes import channel
from zerotune.trial_lib.launch.rank_starter import Launched, LaunchRequest
from zerotune.trial_lib.messages.measurement import Import
from zerotune.trial_lib.messages.orders import RankOrder, SizeOrder

MIB = 2**20
PROFILE = {
    "num_params": 7_000_000_000,
    "trainable_num_params": 7_000_000_000,
    "activation_mem_per_gpu": 100 * MIB,
    "gpu_mem": 80 * 1024 * MIB,
    "data_parallel_size": 1,
    "flops_per_sample": 1e12,
}


class InstantStarter:
    """Stands where the warm starter does.

    Attributes:
        launched: when each trial was launched, in seconds of the monotonic clock.
    """

    launched: list[float] = []  # noqa: RUF012 - of the one study of this process
    has_compiled = False

    def __init__(self, *_: object) -> None:
        self._started = monotonic()

    def start(self) -> None:
        """Has nothing to prime."""

    def prepare(self, beside_builds: bool, starts_cold: bool) -> None:
        """Has nothing to wait for."""

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        """Has nothing to build."""
        return {}

    def prime(self, imported: Sequence[Import]) -> None:
        """Has nothing to prime."""

    def close(self) -> None:
        """Has nothing to end."""

    def launch(self, request: LaunchRequest) -> Launched:
        """Writes what the trial's ranks would have measured, and returns a trial that has ended."""
        self.launched.append(monotonic())
        order = RankOrder.from_json(request.payload)
        size, *following = order.sizes
        if following:
            Path(order.withdrawal).write_text(json.dumps({"reason": "not_repeatable"}), encoding="utf-8")
        for rank, measurement in enumerate(size.measurements):
            Path(size.engine_built[rank]).touch()
            Path(request.ranks[rank].log).write_text("step 1\n" * 100, encoding="utf-8")
            Path(measurement).write_text(json.dumps(_measured(size)), encoding="utf-8")
        ours, theirs = socket.socketpair()
        with theirs:
            channel.send(theirs, {"ended_by": "ranks", "statuses": [0] * len(request.ranks)})
        return Launched(ours, len(request.ranks))


def _measured(order: SizeOrder) -> dict[str, Any]:
    """Returns a rank's record: its throughput is highest near micro-batch 63 and differs between configurations.

    One that grew for ever would have a search end early: each new size would have to be above the best one.
    """
    candidate = json.loads((Path(order.measurements[0]).parent / "candidate.json").read_text(encoding="utf-8"))
    overrides, size = candidate["knobs"], candidate["micro_batch_size"]
    bucket = overrides.get("zero_optimization", {}).get("reduce_bucket_size", 0)
    rate = 100.0 * size / (size + 20) / (1 + size / 200) * (1 + zlib.crc32(str(bucket).encode()) % 7 / 70)
    record = {
        "outcome": "completed",
        "metrics": {
            "throughput": rate,
            "FLOPS_per_gpu": rate * PROFILE["flops_per_sample"],
            "latency": size / rate,
            "cpu_time_per_sample": 1 / rate,
            "forward": size / rate / 4,
            "backward": size / rate / 2,
            "step": size / rate / 4,
        },
        "step_times": [size / rate] * 10,
        "losses": [1.0] * 10,
        "micro_batch_arrived": size,
        "memory": {"peak": [400 * MIB + size * MIB], "after_initialize": [400 * MIB]},
        "phases": {"start": 0.0, "import": 0.0, "initialize": 0.0, "first_step": 0.0, "steps": 0.0},
        "versions": {"python": "3", "torch": "2", "deepspeed": "0"},
    }
    return {**record, "profile": PROFILE, "imported": []} if order.with_profile else record


def stand_in(module: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Puts something in the place of a module's or a class's own: a benchmark's way to time it from outside."""
    setattr(module, name, wrap(getattr(module, name)))
