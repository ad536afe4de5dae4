"""The arms of a study's program, foreseen while its servers start and its profile trial runs.

The first foreseen run is of the program as it was typed. Then each arm runs at two small micro-batches, the likely arms
first. When the profile trial has ended, the rest is left out, because the next trials measure time. The formulas of the
memory model give the difference to arms that were not reached.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from trial_lib.command.switches import deepspeed_part, switches_of
from trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, overwrite_deepspeed_config
from trial_lib.device.host.this_host import kind_of
from trial_lib.experiment.search_space_section import read_search_space
from trial_lib.foresee.foreseen import Pretended, foresee
from trial_lib.foresee.memory.arm_bytes import foreseen_arm
from trial_lib.foresee.plan.arm_work import file_word, micro_batches_of_a_run
from trial_lib.foresee.plan.arms import PlanArm, own_label, planned_arms, run_overrides
from trial_lib.foresee.plan.switch_values import SwitchValues
from trial_lib.launch.endable_starter import EndableStarter
from trial_lib.launch.program import Program
from trial_lib.launch.rank_starter import RankStarter
from trial_lib.memory.foreseen_bytes import ForeseenArm
from trial_lib.memory.zero_settings import ArmKey, arm_key
from trial_lib.records.candidate import Candidate
from trial_lib.records.result import ProgramProfile
from trial_lib.records.study_folder import TrialPaths
from trial_lib.search.arm_priors import prior_costs
from trial_lib.space.arms import RequestedKnob
from trial_lib.space.knobs import Arm
from trial_lib.study.build_program import program_of
from trial_lib.study.foresight.foreseen_steps import keep_steps
from trial_lib.study.known_program import KnownProgram, varied_options
from trial_lib.study.setup import StudySetup
from trial_lib.study.spec_for_ranks import trial_spec
from trial_lib.wire.foreseen_run import ForeseenRun
from trial_lib.wire.whole_files import make_own_folder, write_all, write_whole

DEADLINE_S = 120.0
"""Seconds that one run of a study's program may take."""

# Micro-batches of the runs, in samples. A run takes the same time at any size, and at a small one the activations do
# not decide the peak.
_SIZES = (16, 48)
_END_S = 5.0


def is_foreseen_unasked(device: str) -> bool:
    """Returns whether a study foresees its program although the user does not ask for it.

    On GPUs it does, because the host has other cores than those of its ranks. On a CPU the slots are the cores, and a
    search with formulas comes as near to the best, although more of its trials do not fit (benchmarks/replay).

    Args:
        device: of the study.
    """
    return not kind_of(device).computes_on_the_processor


class Foresight:
    """Foresees the arms of one program on the devices of a study, in a thread of its own.

    Args:
        setup: the study's.
        starter: starts the processes on this host.
        folder: for the files of the runs.
        foresees: foresees one run. Tests give another.
        kept: folder for the operations of the arms' runs, which outlive `folder`; None keeps none.

    Attributes:
        typed: the run of the program as typed; None if there is none yet.
        base_config: the user's DeepSpeed configuration, completed by that run.
        folder: for the files of the runs.
        failure: why nothing was foreseen, in a sentence; empty so far.
        doing: the run that is under way, such as `z3-mbs16 (4 of 19)`.
    """

    def __init__(
        self,
        setup: StudySetup,
        starter: RankStarter,
        folder: Path,
        foresees: Callable[..., ForeseenRun] = foresee,
        kept: Path | None = None,
    ) -> None:
        self._kept = kept
        self._setup = setup
        self._starter = EndableStarter(starter)
        self.folder = folder
        self._foresees = foresees
        self._known = KnownProgram.of(setup.experiment, setup.environment)
        self._runs: dict[ArmKey, list[ForeseenRun]] = {}
        self._arms: dict[ArmKey, ForeseenArm] = {}
        self._thread: threading.Thread | None = None
        self.typed: ForeseenRun | None = None
        self.base_config: dict[str, Any] = {}
        self.failure = ""
        self.doing = "the program"

    def begin(self) -> None:
        """Starts the first run, and returns at once."""
        self._thread = threading.Thread(target=self._foresee_safely, name="foresight", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether there are runs left."""
        return self._thread is not None and self._thread.is_alive()

    def cancel(self) -> None:
        """Ends the runs, and does not wait for that."""
        self._starter.end()

    def end(self) -> tuple[ForeseenArm, ...]:
        """Ends the runs, and returns the arms that are foreseen. It waits some seconds at most."""
        if self._thread is not None:
            self._starter.end()
            self._thread.join(_END_S)
        return tuple(self._arms.values())

    def _foresee_safely(self) -> None:
        try:
            self._foresee_all()
        except Exception as error:  # noqa: BLE001 - the study goes on with formulas, and a line says why
            self.failure = self.failure or str(error) or type(error).__name__

    def _foresee_all(self) -> None:
        typed = self._run("typed", {})
        if typed is None or typed.stopped:
            self.failure = "it took too long." if typed is None else typed.stopped
            return
        self.typed = typed
        self._known = self._known.learned(ProgramProfile.model_validate(typed.program))
        if MICRO_BATCH not in self._known.base_config or self._known.base_config[MICRO_BATCH] == "auto":
            batch = {MICRO_BATCH: typed.micro_batch, ACCUMULATION: typed.accumulation}
            self._known = replace(self._known, base_config={**self._known.base_config, **batch})
        self.base_config = self._known.base_config
        sizes = (typed.micro_batch,) if typed.program.get("batch_varies") else _SIZES
        requests = read_search_space(self._setup.experiment.config.search_space)
        own = PlanArm(own_label(self.base_config), {}, is_own=True)
        switches = SwitchValues(
            requests, switches_of(self.base_config), own, lambda arm: _Wanted.of(arm, typed, sizes[0])
        )
        shown = self._run_all(switches.wanted)
        if shown is not None:
            requests, _ = switches.apart(shown)
            self._run_all([each for each in self._wanted(typed, requests, sizes) if each.name not in shown])

    def _run_all(self, wanted: Sequence["_Wanted"]) -> dict[str, ForeseenRun] | None:
        """Returns runs by name, and keeps their steps; None if all runs have been ended."""
        found: dict[str, ForeseenRun] = {}
        for number, (name, overrides) in enumerate(wanted, start=1):
            self.doing = f"{name} ({number} of {len(wanted)})"
            run = self._run(name, overrides)
            if run is None:
                return None
            if self._kept is not None and not run.stopped:
                keep_steps(run, name.rpartition("-mbs")[0], self._kept)
            found[name] = run
        return found

    def _wanted(self, typed: ForeseenRun, requests: Sequence[RequestedKnob], sizes: Sequence[int]) -> list["_Wanted"]:
        """Returns the runs of the arms: the user's own arm first, then the cheapest."""
        stages = self._setup.arguments.zero_stages
        arms = planned_arms(typed, self.base_config, stages, requests, self._setup.device)
        costs = prior_costs([Arm({"zero_optimization": {"stage": 0}, **arm.knobs}) for arm in arms])
        ordered = sorted(zip(arms, costs, strict=True), key=lambda pair: (not pair[0].is_own, pair[1]))
        return [_Wanted.of(arm, typed, size) for arm, _ in ordered for size in sizes]

    def _run(self, name: str, overrides: Mapping[str, Any]) -> ForeseenRun | None:
        """Returns a run, and keeps it if it has foreseen a step; None if all runs have been ended."""
        if self._starter.has_ended:
            return None
        folder = self.folder / name
        program = self._program(TrialPaths(folder), overrides)
        pretended = Pretended(world=self._setup.slots, ranks_per_host=self._setup.slots, **self._device_bytes())
        options = varied_options(self._setup.experiment)
        run = self._foresees(program, overrides, pretended, folder, self._starter, DEADLINE_S, varied_options=options)
        if self._starter.has_ended:
            return None
        if not run.stopped:
            self._keep(run)
        return run

    def _keep(self, run: ForeseenRun) -> None:
        """Keeps a run, or the arm that it completes. A run of a large model has a hundred thousand events."""
        key = arm_key(run.ds_config)
        runs = self._runs.setdefault(key, [])
        runs.append(run)
        for arm in arms_of(runs, self._setup.device):
            self._arms[key] = arm
            runs.clear()

    def _program(self, paths: TrialPaths, overrides: Mapping[str, Any]) -> Program:
        """Returns the user's program for one run, and writes the files that it reads."""
        experiment, is_typed = self._setup.experiment, not overrides
        base = self._known.base_config
        config = deepspeed_part(base if is_typed else overwrite_deepspeed_config(base, overrides))
        make_own_folder(paths.root)
        program = program_of(
            experiment,
            self._setup.environment,
            paths.ds_config,
            self._known.in_words(config),
            paths.training_spec,
            self._known.arg_mappings,
            as_typed=is_typed,
            switches=switches_of(overrides),
        )
        write_whole(paths.ds_config, json.dumps(config, indent=2))
        write_all(program.files)
        trial_spec(experiment, config, paths).write(paths.training_spec)
        return program

    def _device_bytes(self) -> dict[str, Any]:
        memory = self._setup.host.memory_per_slot
        return {"device_bytes": memory} if memory else {}


def arms_of(runs: Sequence[ForeseenRun], device: str) -> tuple[ForeseenArm, ...]:
    """Returns the arms of some foreseen runs.

    Args:
        runs: of one program on one number of devices.
        device: `cuda` or `cpu`.
    """
    by_arm: dict[ArmKey, dict[int, ForeseenRun]] = {}
    for run in runs:
        # The program as typed may have a small micro-batch, which says little of a sample.
        if run.micro_batch in _SIZES or run.program.get("batch_varies"):
            by_arm.setdefault(arm_key(run.ds_config), {})[run.micro_batch] = run
    groups = [list(group.values()) for group in by_arm.values()]
    groups = [group for group in groups if len(group) == len(_SIZES) or group[0].program.get("batch_varies")]
    found = (foreseen_arm(group, device) for group in groups)
    # If a sample takes nothing, the program did not take the other micro-batch.
    return tuple(arm for arm in found if arm is not None and arm.backward.per_sample > 0)


class _Wanted(NamedTuple):
    """A run to foresee: its name, and its overrides."""

    name: str
    overrides: dict[str, Any]

    @classmethod
    def of(cls, arm: PlanArm, typed: ForeseenRun, size: int) -> "_Wanted":
        """Returns the run of an arm at a micro-batch size (samples)."""
        return cls(f"{file_word(arm.label)}-mbs{size}", _overrides(arm, typed, size))


def _overrides(arm: PlanArm, typed: ForeseenRun, size: int) -> dict[str, Any]:
    """Returns the overrides of a run. Memory does not depend on the global batch, so it need not be kept."""
    candidate = Candidate(
        knobs=dict(arm.knobs),
        micro_batch_size=size,
        gradient_accumulation_steps=micro_batches_of_a_run(typed.accumulation, typed.pipeline_stages),
        slots=typed.world,
        data_parallel_size=typed.replicas,
    )
    return run_overrides(candidate)
