"""The load of the host during a training, sampled by the driver."""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from trial_lib.device.host.base import Host
from trial_lib.device.host.this_host import kind_of
from trial_lib.wire.json_lines import append
from trial_lib.wire.metrics_file import SYSTEM

_PERIOD_S = 10.0
_GUARD = "trial_lib.launch.processes.guard"


class SystemMonitor:
    """Appends a sample every ten seconds, and a last one at the end.

    A sample has `cpu_percent` (of all the host's cores, since the sample before), `memory_used` (bytes of the host) and
    `training_memory` (resident bytes of the training's processes; shared bytes count for each). For each GPU of the
    training it has `gpu0.utilization` (percent of the last moments) and `gpu0.memory_used` (bytes).

    Args:
        path: the file of samples.
        batch: returns the last batch that the training has reported, which goes into the sample.
        sampled: called after each sample.
        log: gets one message if a sample cannot be taken.
        host: with the devices of the training.
    """

    def __init__(
        self, path: Path, batch: Callable[[], int], sampled: Callable[[], None], log: logging.Logger, host: Host
    ) -> None:
        self._path = path
        self._batch = batch
        self._sampled = sampled
        self._log = log
        self._host = host
        self._slots: list[str] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="system-monitor")

    def start(self) -> None:
        """Starts sampling."""
        self._thread.start()

    def watch(self, slots: list[str]) -> None:
        """Takes the slots of the training, in the order of its ranks."""
        self._slots = slots

    def close(self) -> None:
        """Takes the last sample, and stops."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        psutil.cpu_percent()  # the first call of a thread has no earlier value to compare with
        told = False
        is_last = False
        while not is_last:
            is_last = self._done.wait(_PERIOD_S)
            try:
                self._sample()
            except Exception as error:  # noqa: BLE001 - nothing that a training has to end for
                if not told:
                    self._log.warning("system metrics are missing: %s: %s", type(error).__name__, error)
                told = True

    def _sample(self) -> None:
        metrics = {
            "cpu_percent": psutil.cpu_percent(),
            "memory_used": float(psutil.virtual_memory().used),
            "training_memory": _training_memory(),
            **self._load(),
        }
        record = {"kind": SYSTEM, "batch": self._batch(), "time": time.time(), "metrics": metrics}
        append(self._path, json.dumps(record))
        self._sampled()

    def _load(self) -> dict[str, float]:
        """Returns the load of the devices, numbered as the ranks see them."""
        loads = kind_of(self._host.device).load(self._host, self._slots)
        return {f"gpu{number}.{name}": value for number, load in enumerate(loads) for name, value in load.items()}


def _training_memory() -> float:
    """Returns the resident bytes of the processes below this process's guards."""
    total = 0
    for guard in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if _GUARD not in guard.cmdline():
                continue
            for process in guard.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += process.memory_info().rss
    return float(total)
