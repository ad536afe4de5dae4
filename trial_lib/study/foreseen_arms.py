"""The arms of a study's program, foreseen while its servers start, and what the study reads from them."""

import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, overwrite_deepspeed_config
from trial_lib.device.base import Host, available_bytes
from trial_lib.device.this_host import kind_of
from trial_lib.launch.rank_starter import EndableStarter, Program, RankStarter
from trial_lib.messages.errors import InputError
from trial_lib.messages.files import make_own_folder, write_all, write_whole
from trial_lib.messages.foreseen_run import MOMENTS, OPERATIONS, ForeseenRun
from trial_lib.plan.arm_bytes import foreseen_arm
from trial_lib.plan.arm_runs import ArmRuns
from trial_lib.plan.arm_work import file_word, micro_batches_of_a_run
from trial_lib.plan.arms import PlanArm, SwitchValues, own_label, planned_arms, run_overrides
from trial_lib.plan.asked_devices import own_kind
from trial_lib.plan.devices import ON_MATRIX_UNITS, Cluster, known_devices
from trial_lib.plan.fits import outside_pytorch
from trial_lib.plan.foreseen import Pretended, foresee
from trial_lib.plan.plan_record import read_kept_run, write_run
from trial_lib.records.candidate import Candidate
from trial_lib.records.folders import TrialPaths
from trial_lib.records.result import ModelProfile, ProgramProfile
from trial_lib.records.switches import deepspeed_part, switches_of, unforeseen_switches
from trial_lib.search.allocations import ForeseenArm, nearest_arm
from trial_lib.search.arms import RequestedKnob
from trial_lib.search.base import key_in_plan
from trial_lib.search.cost_model import prior_costs
from trial_lib.search.knobs import Arm
from trial_lib.search.zero_settings import ArmKey, arm_key
from trial_lib.study.folder import read_own_text
from trial_lib.study.plans import trial_spec
from trial_lib.study.program import KnownProgram, program_of, varied_options
from trial_lib.study.setup import StudySetup

# The foreseen step of each trial, from the runs of its arms

_END = ".json.gz"


@dataclass(frozen=True)
class ForeseenSteps:
    """The steps of a program on the slots of a study."""

    runs: Mapping[ArmKey, ArmRuns]  # of each arm that was foreseen
    cluster: Cluster | None = None  # the slots; None if they are no known devices, so that steps have no seconds
    replicas: int | None = None  # of the model on the slots; None for those of the runs

    def of(self, candidate: Candidate, base_config: Mapping[str, Any]) -> tuple[str, ForeseenRun] | None:
        """The label of a candidate's arm, and its foreseen step; None if none was foreseen."""
        config = candidate.complete(base_config)
        foreseen = {place for runs in self.runs.values() for place in switches_of(runs.small.ds_config)}
        runs = self.runs.get(key_in_plan(config, base_config, foreseen))
        if runs is None or unforeseen_switches(candidate.knobs, base_config, foreseen):
            return None
        size, accumulation = candidate.micro_batch_size, max(1, candidate.gradient_accumulation_steps)
        # The candidate's own settings decide what goes on beside the computation.
        step = runs.step_at(self.replicas or runs.small.replicas, size, accumulation)
        return runs.arm.label, replace(step, micro_batch=size, ds_config=config)


def cluster_here(host: Host, slots: int, hosts: int) -> Cluster | None:
    """The devices of a trial with so many slots on so many hosts; None if they are no known ones. A CPU is none."""
    found = own_kind(host, known_devices()) if host.models else None
    return None if found is None else Cluster(device=found, hosts=hosts, per_host=slots // hosts)


def keep_steps(run: ForeseenRun, label: str, folder: Path) -> None:
    """Writes the operations of an arm's foreseen run, from which its seconds follow. Its storages are left out."""
    write_run(folder / f"{label}-mbs{run.micro_batch}{_END}", replace(run, storages=(), events=()))


def kept_steps(folder: Path, cluster: Cluster | None) -> ForeseenSteps:
    """The steps that `keep_steps` has written, perhaps none. Raises InputError if a file is damaged."""
    by_arm: dict[str, list[ForeseenRun]] = {}
    for file in sorted(folder.glob(f"*{_END}")):
        by_arm.setdefault(file.name.rpartition("-mbs")[0], []).append(read_kept_run(file))
    runs: dict[ArmKey, ArmRuns] = {}
    for label, found in by_arm.items():
        small, *larger = sorted(found, key=lambda run: run.micro_batch)
        runs[arm_key(small.ds_config)] = ArmRuns(PlanArm(label, {}), small, larger[-1] if larger else None)
    return ForeseenSteps(runs, cluster)


# The runs beside the profile trial

DEADLINE_S = 120.0  # of one run of a study's program
# Micro-batches of the runs, in samples. A run takes the same time at any size, and at a small one the activations do
# not decide the peak.
_SIZES = (16, 48)
_END_S = 5.0


def is_foreseen_unasked(device: str) -> bool:
    """Whether a study foresees its program although the user does not ask for it.

    On GPUs it does, because the host has other cores than those of its ranks. On a CPU the slots are the cores, and a
    search with formulas comes as near to the best, although more of its trials do not fit (benchmarks/replay).
    """
    return not kind_of(device).computes_on_the_processor


class Foresight:
    """Foresees the arms of one program on the devices of a study, in a thread of its own.

    `starter` starts the processes on this host. `kept` is a folder for the operations of the arms' runs, which outlive
    `folder`; None keeps none. Tests give another `foresees`.
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
        self.typed: ForeseenRun | None = None  # the run of the program as typed
        self.base_config: dict[str, Any] = {}  # the user's, completed by that run
        self.failure = ""  # why nothing was foreseen, in a sentence
        self.doing = "the program"  # the run that is under way, such as `z3-mbs16 (4 of 19)`

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._foresee_safely, name="foresight", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
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
        # Runs by name, and keeps their steps; None if all runs have been ended.
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
        stages = self._setup.arguments.zero_stages
        arms = planned_arms(typed, self.base_config, stages, requests, self._setup.device)
        costs = prior_costs([Arm({"zero_optimization": {"stage": 0}, **arm.knobs}) for arm in arms])
        ordered = sorted(zip(arms, costs, strict=True), key=lambda pair: (not pair[0].is_own, pair[1]))
        return [_Wanted.of(arm, typed, size) for arm, _ in ordered for size in sizes]

    def _run(self, name: str, overrides: Mapping[str, Any]) -> ForeseenRun | None:
        # A run, and keeps it if it has foreseen a step; None if all runs have been ended.
        if self._starter.has_ended:
            return None
        folder = self.folder / name
        program = self._program(TrialPaths(folder), overrides)
        memory = self._setup.host.memory_per_slot
        device_bytes: dict[str, Any] = {"device_bytes": memory} if memory else {}
        pretended = Pretended(world=self._setup.slots, ranks_per_host=self._setup.slots, **device_bytes)
        options = varied_options(self._setup.experiment)
        run = self._foresees(program, overrides, pretended, folder, self._starter, DEADLINE_S, varied_options=options)
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

    def _program(self, paths: TrialPaths, overrides: Mapping[str, Any]) -> Program:
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
    return tuple(arm for arm in found if arm is not None and arm.backward.per_sample > 0)


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


def keep_foreseen(foresight: Foresight, file: Path, log: logging.Logger) -> None:
    """Ends the foreseen runs, and writes the arms that they have found. Without arms there is no file."""
    arms = foresight.end()
    shutil.rmtree(foresight.folder, ignore_errors=True)
    if arms:
        keep_arms(arms, file)
        log.info("The search begins with the memory of %d foreseen arms.", len(arms))
    else:
        reason = foresight.failure or "the profile trial ended first."
        log.info("The search begins with formulas of memory, because the program was not foreseen: %s", reason)


def keep_arms(arms: Iterable[ForeseenArm], file: Path) -> None:
    """Writes the foreseen arms that a search begins with, so that a resumed study begins with the same."""
    write_whole(file, json.dumps([arm.to_json() for arm in arms], indent=1))


def foreseen_in(file: Path) -> tuple[ForeseenArm, ...]:
    """The arms of a study's file; none if it does not exist. Raises InputError if it is damaged."""
    remedy = "Start a new study."
    try:
        text = read_own_text(file, "the record of foreseen arms", remedy)
        return tuple(ForeseenArm.from_json(arm) for arm in json.loads(text))
    except FileNotFoundError:
        return ()
    except (ValueError, LookupError, TypeError, AttributeError):
        said = "the record of foreseen arms is damaged or of another version."
        raise InputError(said, where=str(file), remedy=remedy) from None


# In the place of a profile trial

_MODEL_FLOPS = frozenset(map(OPERATIONS.index, ON_MATRIX_UNITS))
_PASSES = frozenset(MOMENTS.index(name) for name in ("forward", "backward"))


def foreseen_profile(typed: ForeseenRun, arms: tuple[ForeseenArm, ...], setup: StudySetup) -> ModelProfile:
    """A model's profile from the foreseen run of the program as typed, in the place of a profile trial."""
    own = nearest_arm(arms, typed.ds_config)
    on_gpus = not kind_of(setup.device).computes_on_the_processor
    free = available_bytes() if on_gpus else None
    return ModelProfile(
        num_params=typed.parameters,
        trainable_num_params=typed.trainable,
        # Those of one micro-batch. In its runs the first stage of a pipeline holds as many as there are stages.
        activation_mem_per_gpu=int(own.backward.per_sample / typed.pipeline_stages),
        gpu_mem=_for_the_model(typed, setup.host, setup.memory_limit, on_gpus),
        host_mem=(free or 0) // max(1, len(setup.host.slots)),
        data_parallel_size=typed.replicas,
        pipeline_parallel=typed.is_pipeline,
        flops_per_sample=flops_per_sample(typed),
    )


def _for_the_model(typed: ForeseenRun, host: Host, limit: int | None, on_gpus: bool) -> int:
    # The bytes that the model may use on a slot; 0 if that is not known.
    if not on_gpus:
        # The budget holds for the whole process, which has its libraries before it has an engine.
        return max(0, (limit or 0) - typed.process_bytes) if typed.process_bytes else 0
    if not host.memory_per_slot:
        return 0
    ranks_here = min(typed.world, len(host.slots))
    return max(0, int(host.memory_per_slot - outside_pytorch(typed.world, ranks_here).mean))


def flops_per_sample(run: ForeseenRun) -> float:
    """The model FLOPs of a run's last forward and backward passes for one sample, on all devices of a replica.

    The same operations count as in a profile trial (`trial_lib/rank/flops.py`).
    """
    last = max((moment.step for moment in run.moments if moment.name in _PASSES), default=0)
    passes = [
        sum(each.flops for each in operations if each.kind in _MODEL_FLOPS)
        for moment, operations in run.operations_by_moment()
        if moment.step == last and moment.name in _PASSES
    ]
    samples = run.micro_batch * run.accumulation
    return sum(passes) / samples * run.world / run.replicas if samples and run.replicas else 0.0
