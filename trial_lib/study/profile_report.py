"""The report of the profile trial: the model, and the memory that each ZeRO stage would need."""

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trial_lib.device.this_host import kind_of
from trial_lib.inputs.places import spelling
from trial_lib.launch.processes.watchdog import bound_logs
from trial_lib.launch.trial import TrialPlan, write_unstarted
from trial_lib.messages.files import make_own_folder, write_whole
from trial_lib.messages.orders import StepWindow
from trial_lib.records.candidate import FrozenRecord, Purpose
from trial_lib.records.folders import TrialPaths
from trial_lib.records.result import ModelProfile, Outcome, ProgramProfile, TrialResult
from trial_lib.records.units import bytes_shown
from trial_lib.search.knobs import ZERO_STAGES
from trial_lib.search.zero_settings import first_guess, on_a_device, precision_of, state_bytes
from trial_lib.study.foreseen_arms import is_foreseen_unasked
from trial_lib.study.history import SUBMITTED_NUMBER
from trial_lib.study.limits import SizeLimit
from trial_lib.study.setup import StudySetup

_MOST_NAMED = 4


class StageEstimate(FrozenRecord):
    """The memory of one ZeRO stage."""

    stage: int  # the ZeRO stage
    states: int  # bytes of parameters, gradients and optimizer states on one device
    largest_micro_batch: int  # the samples that fit beside them, as a first guess, and not above the report's limit


class ProfileReport(FrozenRecord):
    """The model and the memory of each stage."""

    profile: ModelProfile  # the model
    stages: list[StageEstimate]  # the estimates
    # The largest micro-batch that may be tried. None if nothing says so: the estimates are memory's alone.
    limit: SizeLimit | None = None

    def lines(self) -> list[str]:
        profile = self.profile
        return [
            f"parameters: {profile.num_params:,}, trainable: {profile.trainable_num_params:,}",
            f"device memory for the model: {bytes_shown(profile.gpu_mem)}; "
            f"activations of one sample: {bytes_shown(profile.activation_mem_per_gpu)}",
            *(
                f"ZeRO {stage.stage}: states {bytes_shown(stage.states)}, {self._largest(stage.largest_micro_batch)}"
                for stage in self.stages
            ),
        ]

    def _largest(self, size: int) -> str:
        if self.limit is None:
            return f"memory would hold a micro-batch of about {size}"
        if size < self.limit.size:
            return f"largest micro-batch about {size}"
        return f"largest micro-batch {size}, bounded by {self.limit.by}"


def report_profile(
    profile: ModelProfile, base_config: Mapping[str, Any], slots: int, limit: SizeLimit | None
) -> ProfileReport:
    """The model, and the memory that each ZeRO stage would need."""
    precision = precision_of(base_config, profile.bytes_per_param)
    own, shards = on_a_device(profile, slots)
    guesses = {stage: first_guess(stage, profile, precision, slots) for stage in ZERO_STAGES}
    return ProfileReport(
        profile=profile,
        stages=[
            StageEstimate(
                stage=stage,
                states=state_bytes(stage, own.num_params, own.trainable_num_params, precision, shards),
                largest_micro_batch=guess if limit is None else min(guess, limit.size),
            )
            for stage, guess in guesses.items()
        ],
        limit=limit,
    )


def program_notes(program: ProgramProfile | None, arg_mappings: Mapping[Any, str] | None = None) -> list[str]:
    """Notes on the program that the user may want to act on, a sentence each."""
    if program is None:
        return []
    notes = [_TWO_CONFIGS] if program.hands_over_two_configs else []
    seen = {spelling(target): key for key, target in program.arg_mappings.items()}
    notes += [
        f"{target} sets {seen[spelling(target)]}. The mapping that says {key} is left out."
        for key, target in (arg_mappings or {}).items()
        if seen.get(spelling(target), key) != key
    ]
    if program.divided_among > 1:
        notes.append(_DIVIDED.format(program.divided_among))
    if program.devices_in_code:
        notes.append(_DEVICES.format(program.devices_in_code))
    if program.resumed_stage is not None:
        # Stages 1 and 2 have one form (deepspeed/runtime/zero/stage_1_and_2.py).
        can = "ZeRO 1 or 2" if program.resumed_stage in (1, 2) else f"ZeRO {program.resumed_stage}"
        ranks = " on as many ranks as before" if program.resumed_stage else ""
        notes.append(_RESUMES.format(program.resumed_stage, can, ranks))
    return notes


_TWO_CONFIGS = (
    "The code hands deepspeed.initialize two configurations, one in `args` and one as `config`. Trials use `config`. "
    "Present versions of DeepSpeed refuse two, so remove one of them to train without ZeroTune."
)
_DIVIDED = (
    "The {0} ranks divide a batch of the typed size among them (split_batches). Here a micro-batch is what arrives at "
    "one rank, so the typed size is {0} times as large."
)
_DEVICES = (
    "The code sets {}. In a trial these numbers count the trial's own devices, and one that it has not means all of "
    "them. To keep trials off a device, set the variable before the command."
)
_RESUMES = (
    "The code resumes from a checkpoint of ZeRO {}. Trials load no weights and no states from it. DeepSpeed resumes it "
    "with {} alone{}. Another answer needs it as a universal checkpoint (deepspeed/checkpoint/ds_to_universal.py), "
    "or a new start."
)


def model_notes(profile: ModelProfile) -> list[str]:
    """Notes on the model's figures, a sentence each."""
    if not profile.uncounted:
        return []
    more = len(profile.uncounted) - _MOST_NAMED
    named = ", ".join(profile.uncounted[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return [
        f"The FLOPs of {named} are not counted, because they are not known. "
        "So there is no model FLOPs utilisation (mfu)."
    ]


def had_engine(setup: StudySetup, profile: TrialResult) -> bool:
    """Whether every rank of the profile trial reached a DeepSpeed engine, in either of its runs."""
    paths = setup.paths.trial(profile.number)
    return any(all(run.engine_built(rank).exists() for rank in range(setup.slots)) for run in (paths, paths.as_typed))


def profile_failure(result: TrialResult, had_engine: bool) -> str:
    """Why the profile trial failed, as a message that the user can act on."""
    if result.elsewhere:
        return result.reason
    if result.from_outside:
        return f"The profile trial was killed twice: {result.reason} `zerotune resume` runs it again."
    ended_by_itself = result.outcome in (Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.OUT_OF_DATA)
    if not had_engine and (ended_by_itself or "import" not in result.phases):
        what = "The program does not run as it was typed: it never had a DeepSpeed engine."
    elif ended_by_itself:
        what = "The program fails as it was typed."
    elif result.outcome is Outcome.OUT_OF_MEMORY:
        what = "Not even a micro-batch of 1 fits into memory."
    elif result.outcome is Outcome.OUT_OF_HOST_MEMORY:
        what = "The host's memory, not the device's, is not enough for the program."
    elif result.micro_batch_arrived is not None:
        what = "The program's batches do not have the requested size."
    else:
        what = f"The program cannot be tuned as it was typed: {result.outcome.value}."
    return f"{what} {result.reason}"


# The user's configuration, measured by the first run of the profile trial.

# What runs beside the ranks meanwhile, in cores: ZeroTune's servers, which start, and the foreseen runs.
_SERVERS, _FORESIGHT = 1, 2
# The first run shows only what a step takes. A trial of its own has a deadline that follows from that.
_DEADLINE_S = 600.0
# The phases of a start, which the profile's second run pays as a trial of its own would: from a primed fork server.
_OF_A_START = ("start", "import", "initialize")
_LAST_PHASE = "end"


def is_measured_beside(setup: StudySetup) -> bool:
    """Whether the profile trial may measure time, because the host has cores to spare."""
    if setup.arguments.ray_address is not None or setup.experiment.config.resources.hosts:
        return False
    on_the_processor = kind_of(setup.device).computes_on_the_processor
    cores = len(setup.host.slots) if on_the_processor else len(os.sched_getaffinity(0))
    foresees = setup.arguments.foresee or is_foreseen_unasked(setup.device)
    return cores >= setup.slots + _SERVERS + (_FORESIGHT if foresees else 0)


def own_plan(typed: TrialPlan, setup: StudySetup) -> TrialPlan:
    """The measurement of the user's configuration, for ranks that run the program as typed already."""
    arguments = setup.arguments
    return replace(
        typed,
        trial_id=f"{setup.study_id}-{SUBMITTED_NUMBER:04d}",
        number=SUBMITTED_NUMBER,
        purpose=Purpose.SUBMITTED,
        window=StepWindow(start_step=arguments.start_profile_step, end_step=arguments.end_profile_step),
        traces=True,
        deadline_s=_DEADLINE_S,
        varied_options={},
        paths=setup.paths.trial(typed.number).own,
    )


def forget_own(profile: TrialPlan) -> None:
    """Removes what the profile trial has measured of the user's configuration, now or in an earlier attempt."""
    shutil.rmtree(profile.paths.own.root, ignore_errors=True)


def own_reading(plan: TrialPlan, profile: TrialResult, paths: TrialPaths) -> TrialResult | None:
    """Returns that measurement as a trial of its own, and writes it to its folder; None if none counts."""
    first, measured = _result_in(paths.as_typed), _result_in(paths.own)
    if first is None or measured is None or not _counts(plan, profile, first, measured):
        return None
    ranks = range(plan.candidate.slots)
    started = {name: profile.phases[name] for name in _OF_A_START if name in profile.phases}
    phases = {name: seconds for name, seconds in measured.phases.items() if name not in _OF_A_START}
    result = measured.model_copy(
        update={
            "name": plan.name,
            "config_hash": plan.config_hash,
            "metrics": _with_flops_of(profile, measured.metrics, plan.candidate.slots),
            "phases": {**started, **phases, _LAST_PHASE: phases.get(_LAST_PHASE, 0.0)},
            "logs": [str(plan.paths.log(rank)) for rank in ranks],
            "swept": False,
        }
    )
    # The result comes last, because a resumed study takes a trial that has one as ended.
    make_own_folder(plan.paths.root)
    for rank in ranks:
        # The program has printed the beginning before.
        said = [each.log(rank).read_text(errors="replace") for each in (paths.as_typed, paths.own)]
        write_whole(plan.paths.log(rank), "".join(said))
        bound_logs([plan.paths.log(rank)])
        write_whole(plan.paths.measurement(rank), paths.own.measurement(rank).read_text())
    write_unstarted(plan, result)
    return result


def _counts(plan: TrialPlan, profile: TrialResult, first: TrialResult, measured: TrialResult) -> bool:
    if measured.trial_id != plan.trial_id or measured.outcome is not Outcome.COMPLETED or measured.note:
        return False
    if plan.longest_sequence is not None:
        # It would warm up on longer samples.
        return False
    if first.program is None or profile.program is None or first.program.arrival != profile.program.arrival:
        # It would count samples otherwise.
        return False
    # At a micro-batch of 1 the run has read ahead.
    return first.program.typed_batch is not None and first.program.typed_batch.micro_batch_size != 1


def _result_in(paths: TrialPaths) -> TrialResult | None:
    with contextlib.suppress(OSError, ValueError):
        return TrialResult.model_validate_json(paths.result.read_text())
    return None


def _with_flops_of(profile: TrialResult, metrics: Mapping[str, float], ranks: int) -> dict[str, float]:
    # The metrics with the FLOPs of a sample that the profile has in the end, which all trials share.
    of_a_sample = 0.0 if profile.profile is None else profile.profile.flops_per_sample
    counted = metrics.get("FLOPS_per_gpu")
    if not of_a_sample or not counted:
        return dict(metrics)
    flops = of_a_sample * metrics["throughput"] / ranks
    utilisation = {"mfu": metrics["mfu"] * flops / counted} if "mfu" in metrics else {}
    return {**metrics, "FLOPS_per_gpu": flops, **utilisation}
