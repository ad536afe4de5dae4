"""Foresees the runs of a plan: one fork server, and a process for each run."""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trial_lib.foresee.foreseen import Pretended, foresee, starter_for
from trial_lib.foresee.plan.asked_devices import AskedDevices
from trial_lib.launch.endable_starter import EndableStarter
from trial_lib.launch.program import Program
from trial_lib.launch.warm import WarmStarter
from trial_lib.study.build_program import leading_imports_of
from trial_lib.study.known_program import varied_options
from trial_lib.study.planning.open_plan import OpenPlan
from trial_lib.wire.foreseen_run import ForeseenRun
from trial_lib.wire.imported import Import

_LOG = re.compile(r"; its log is (\S+)\.$")
_LONGEST = 200


def _with_last_line(stopped: str) -> str:
    """Returns why a run was stopped with the last line of its log, which is removed with the plan's scratch folder."""
    found = _LOG.search(stopped)
    if found is None:
        return stopped
    log = Path(found[1])
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = f". The last line of its output: {lines[-1][:_LONGEST]}" if lines else ""
    return f"{stopped[: found.start()]}{said.rstrip('.')}."


class Foreseer:
    """Foresees runs of one program, each in a process of its own. Use it as a context.

    Args:
        opened: the plan.
        note: called with a sentence when something takes long.
    """

    def __init__(self, opened: OpenPlan, note: Callable[[str], None]) -> None:
        self._opened = opened
        self._note = note
        self._starter: WarmStarter | None = None
        self._starting = threading.Lock()
        self._running: dict[str, EndableStarter] = {}
        self._is_closed = False

    def __enter__(self) -> "Foreseer":
        """Starts nothing yet. The first run gives the interpreter."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends everything."""
        self.stop()

    def __call__(self, name: str, program: Program, overrides: Mapping[str, Any], asked: AskedDevices) -> ForeseenRun:
        """Returns a run.

        Args:
            name: of the run. No other run of this name is under way.
            program: the user's program.
            overrides: merged into the DeepSpeed configuration of the engine that trains.
            asked: the devices that the program finds.
        """
        device = asked.cluster.device
        pretended = Pretended(
            world=asked.count,
            ranks_per_host=asked.cluster.per_host,
            device_bytes=int(device.memory),
            device_name=device.cuda_name,
            capability=device.capability,
        )
        folder = self._opened.scratch / name
        starter = self._running[name] = EndableStarter(self._started(program))
        deadline, options = self._opened.read.arguments.deadline, varied_options(self._opened.read.experiment)
        try:
            run = foresee(program, overrides, pretended, folder, starter, deadline, varied_options=options)
        finally:
            del self._running[name]
        return replace(run, stopped=_with_last_line(run.stopped)) if run.stopped else run

    def prime(self, imported: Sequence[Import]) -> None:
        """Has the modules of the program imported before the next run, once for all of them."""
        with self._starting:
            starter = None if self._is_closed else self._starter
        if starter is not None:
            starter.prime(imported)

    def end(self, name: str) -> None:
        """Ends a run. It does nothing if no run of this name is under way."""
        starter = self._running.get(name)
        if starter is not None:
            starter.end()

    def stop(self) -> None:
        """Ends all runs and the fork server."""
        with self._starting:
            self._is_closed = True
            starter = self._starter
        if starter is not None:
            starter.close()

    def _started(self, program: Program) -> WarmStarter:
        with self._starting:
            if self._is_closed:
                raise InterruptedError
            if self._starter is None:
                leading = leading_imports_of(self._opened.read.experiment, program.environment)
                self._starter = starter_for(program, self._opened.scratch / "server", self._note, leading)
            return self._starter
