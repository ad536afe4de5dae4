"""The arms of a study's program, foreseen while its servers start, and what the study reads from them."""

import logging
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, overwrite_deepspeed_config
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.launch.rank_starter import EndableStarter, RankStarter
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.arm_bytes import foreseen_arm
from zerotune.trial_lib.plan.arm_work import cheapest_first, file_word, micro_batches_of_a_run
from zerotune.trial_lib.plan.arms import PlanArm, SwitchValues, own_label, planned_arms, run_overrides
from zerotune.trial_lib.plan.simulation import Pretended, simulate
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.folders import TrialPaths
from zerotune.trial_lib.records.result import read_program
from zerotune.trial_lib.records.switches import deepspeed_part, switches_of
from zerotune.trial_lib.search.allocations import ForeseenArm
from zerotune.trial_lib.search.arms import RequestedKnob
from zerotune.trial_lib.search.zero_settings import ArmKey, arm_key
from zerotune.trial_lib.study.open_plan import written_program
from zerotune.trial_lib.study.open_search import keep_arms
from zerotune.trial_lib.study.program import KnownProgram, varied_options
from zerotune.trial_lib.study.setup import StudySetup

# The runs beside the profile trial

DEADLINE_S = 120.0  # of one run of a study's program
# Micro-batches of the runs, in samples. A run takes the same time at any size, and at a small one the activations do
# not decide the peak.
_SIZES = (16, 48)
_END_S = 5.0


def is_simulated_unasked(device: str) -> bool:
    """Whether a study foresees its program although the user does not ask for it.

    On GPUs it does, because the host has other cores than those of its ranks. On a CPU the slots are the cores, and a
    search with formulas comes as near to the best, although more of its trials do not fit (benchmarks/replay).
    """
    return not kind_of(device).computes_on_the_processor


class ArmSimulation:
    """Foresees the arms of one program on the devices of a study, in a thread of its own.

    `starter` starts the processes on this host. Tests give another `simulates`.
    """

    def __init__(
        self,
        setup: StudySetup,
        starter: RankStarter,
        folder: Path,
        simulates: Callable[..., ForeseenRun] = simulate,
    ) -> None:
        self._setup = setup
        self._starter = EndableStarter(starter)
        self.folder = folder
        self._simulate = simulates
        self._known = KnownProgram.of(setup.experiment, setup.environment)
        self._runs: dict[ArmKey, list[ForeseenRun]] = {}
        self._arms: dict[ArmKey, ForeseenArm] = {}
        self._thread: threading.Thread | None = None
        self.typed: ForeseenRun | None = None  # the run of the program as typed
        self.base_config: dict[str, Any] = {}  # the user's, completed by that run
        self.failure = ""  # why nothing was foreseen, in a sentence
        self.doing = "the program"  # the run that is under way, such as `z3-mbs16 (4 of 19)`

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._simulate_safely, name="simulation", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def cancel(self) -> None:
        self._starter.end()

    def end(self) -> tuple[ForeseenArm, ...]:
        """Ends the runs, and returns the arms that are foreseen. It waits some seconds at most."""
        if self._thread is not None:
            self._starter.end()
            self._thread.join(_END_S)
        return tuple(self._arms.values())

    def _simulate_safely(self) -> None:
        try:
            self._simulate_all()
        except Exception as error:  # noqa: BLE001 - the study goes on with formulas, and a line says why
            self.failure = self.failure or str(error) or type(error).__name__

    def _simulate_all(self) -> None:
        typed = self._run("typed", {})
        if typed is None or typed.stopped:
            self.failure = "it took too long." if typed is None else typed.stopped
            return
        self.typed = typed
        self._known = self._known.learned(read_program(typed.program))
        if MICRO_BATCH not in self._known.base_config or self._known.base_config[MICRO_BATCH] == "auto":
            batch = {MICRO_BATCH: typed.micro_batch, ACCUMULATION: typed.accumulation}
            self._known = replace(self._known, base_config={**self._known.base_config, **batch})
        self.base_config = self._known.base_config
        sizes = (typed.micro_batch,) if typed.program.get("batch_varies") else _SIZES
        requests = self._setup.experiment.requests
        own = PlanArm(own_label(self.base_config), {}, is_own=True)
        switches = SwitchValues(
            requests, switches_of(self.base_config), own, lambda arm: _Wanted.of(arm, typed, sizes[0])
        )
        shown = self._run_all(switches.wanted)
        if shown is not None:
            requests, _ = switches.apart(shown)
            self._run_all([each for each in self._wanted(typed, requests, sizes) if each.name not in shown])

    def _run_all(self, wanted: Sequence["_Wanted"]) -> dict[str, ForeseenRun] | None:
        # Runs by name; None if all runs have been ended.
        found: dict[str, ForeseenRun] = {}
        for number, (name, overrides) in enumerate(wanted, start=1):
            self.doing = f"{name} ({number} of {len(wanted)})"
            run = self._run(name, overrides)
            if run is None:
                return None
            found[name] = run
        return found

    def _wanted(self, typed: ForeseenRun, requests: Sequence[RequestedKnob], sizes: Sequence[int]) -> list["_Wanted"]:
        stages = self._setup.arguments.zero_stages
        arms = planned_arms(typed, self.base_config, stages, requests, self._setup.device)
        ordered = sorted(cheapest_first(arms, typed), key=lambda arm: not arm.is_own)
        return [_Wanted.of(arm, typed, size) for arm in ordered for size in sizes]

    def _run(self, name: str, overrides: Mapping[str, Any]) -> ForeseenRun | None:
        # A run, and keeps it if it has foreseen a step; None if all runs have been ended.
        if self._starter.has_ended:
            return None
        folder, base = self.folder / name, self._known.base_config
        program = written_program(
            self._setup.experiment,
            self._setup.environment,
            self._known,
            deepspeed_part(overwrite_deepspeed_config(base, overrides) if overrides else base),
            TrialPaths(folder),
            as_typed=not overrides,
            switches=switches_of(overrides),
        )
        memory = self._setup.host.memory_per_slot
        device_bytes: dict[str, Any] = {"device_bytes": memory} if memory else {}
        pretended = Pretended(world=self._setup.slots, ranks_per_host=self._setup.slots, **device_bytes)
        options = varied_options(self._setup.experiment)
        run = self._simulate(program, overrides, pretended, folder, self._starter, DEADLINE_S, varied_options=options)
        if self._starter.has_ended:
            return None
        if not run.stopped:
            self._keep(run)
        return run

    def _keep(self, run: ForeseenRun) -> None:
        # Keeps a run, or the arm that it completes. A run of a large model has a hundred thousand events.
        key = arm_key(run.ds_config)
        runs = self._runs.setdefault(key, [])
        runs.append(run)
        for arm in arms_of(runs, self._setup.device):
            self._arms[key] = arm
            runs.clear()


def arms_of(runs: Sequence[ForeseenRun], device: str) -> tuple[ForeseenArm, ...]:
    """The arms of some foreseen runs of one program on one number of devices."""
    by_arm: dict[ArmKey, dict[int, ForeseenRun]] = {}
    for run in runs:
        # The program as typed may have a small micro-batch, which says little of a sample.
        if run.micro_batch in _SIZES or run.program.get("batch_varies"):
            by_arm.setdefault(arm_key(run.ds_config), {})[run.micro_batch] = run
    groups = [list(group.values()) for group in by_arm.values()]
    groups = [group for group in groups if len(group) == len(_SIZES) or group[0].program.get("batch_varies")]
    found = (foreseen_arm(group, device) for group in groups)
    # If a sample takes nothing, the program did not take the other micro-batch.
    return tuple(arm for arm in found if arm is not None and arm.backward.of(1) > 0)


class _Wanted(NamedTuple):
    name: str
    overrides: dict[str, Any]

    @classmethod
    def of(cls, arm: PlanArm, typed: ForeseenRun, size: int) -> "_Wanted":
        # Memory does not depend on the global batch, so it need not be kept.
        candidate = Candidate(
            knobs=dict(arm.knobs),
            micro_batch_size=size,
            gradient_accumulation_steps=micro_batches_of_a_run(typed.accumulation, typed.pipeline_stages),
            slots=typed.world,
            data_parallel_size=typed.replicas,
        )
        return cls(f"{file_word(arm.label)}-mbs{size}", run_overrides(candidate))


# The foreseen arms in the study's folder


def keep_simulated(simulation: ArmSimulation, file: Path, log: logging.Logger) -> None:
    """Ends the foreseen runs, and writes the arms that they have found. Without arms there is no file."""
    arms = simulation.end()
    shutil.rmtree(simulation.folder, ignore_errors=True)
    if arms:
        keep_arms(arms, file)
        log.info("The search begins with the memory of %d foreseen arms.", len(arms))
    else:
        reason = simulation.failure or "the profile trial ended first."
        log.info("The search begins with formulas of memory, because the program was not foreseen: %s", reason)
