"""The user's configuration, measured by the first run of the profile trial.

That run trains the program as it was typed, which is the user's configuration. When it has shown what the profile needs
of it, it trains on and is measured like any trial. So no further start of the ranks is needed.

What it measures stays in the profile trial's folder. Only a reading that counts becomes a trial of the study.
"""

import contextlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace

from trial_lib.device.host.this_host import kind_of
from trial_lib.launch.processes.log_bounds import bound
from trial_lib.launch.trial import TrialPlan, write_unstarted
from trial_lib.records.candidate import Purpose
from trial_lib.records.result import Outcome, ProgramProfile, TrialResult
from trial_lib.records.study_folder import TrialPaths
from trial_lib.study.foresight.in_background import is_foreseen_unasked
from trial_lib.study.kept.history import SUBMITTED_NUMBER
from trial_lib.study.setup import StudySetup
from trial_lib.wire.step_window import StepWindow
from trial_lib.wire.whole_files import make_own_folder, write_whole

# What runs beside the ranks meanwhile, in cores: ZeroTune's servers, which start, and the foreseen runs.
_SERVERS, _FORESIGHT = 1, 2
# The first run shows only what a step takes. A trial of its own has a deadline that follows from that.
_DEADLINE_S = 600.0
# The phases of a start, which the profile's second run pays as a trial of its own would: from a primed fork server.
_OF_A_START = ("start", "import", "initialize")
_LAST_PHASE = "end"


def is_measured_beside(setup: StudySetup) -> bool:
    """Returns whether the profile trial may measure time, because the host has cores to spare.

    Args:
        setup: the study's.
    """
    if setup.arguments.ray_address is not None or setup.experiment.config.resources.hosts:
        return False
    on_the_processor = kind_of(setup.device).computes_on_the_processor
    cores = len(setup.host.slots) if on_the_processor else len(os.sched_getaffinity(0))
    foresees = setup.arguments.foresee or is_foreseen_unasked(setup.device)
    return cores >= setup.slots + _SERVERS + (_FORESIGHT if foresees else 0)


def own_plan(typed: TrialPlan, setup: StudySetup) -> TrialPlan:
    """Returns the measurement of the user's configuration, for ranks that run the program as typed already.

    Args:
        typed: the profile trial's first run.
        setup: the study's.
    """
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
    """Returns the result of the user's configuration as that of a trial of its own, and writes it to its folder.

    Args:
        plan: the trial of the user's configuration.
        profile: the result of the profile trial.
        paths: the files of the profile trial.

    Returns:
        The result; None if there is none that counts.
    """
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
        bound([plan.paths.log(rank)])
        write_whole(plan.paths.measurement(rank), paths.own.measurement(rank).read_text())
    write_unstarted(plan, result)
    return result


def _counts(plan: TrialPlan, profile: TrialResult, first: TrialResult, measured: TrialResult) -> bool:
    """Returns whether a trial of its own would have measured the same."""
    if measured.trial_id != plan.trial_id or measured.outcome is not Outcome.COMPLETED or measured.note:
        return False
    if plan.longest_sequence is not None:
        # It would warm up on longer samples.
        return False
    if first.program is None or profile.program is None or first.program.arrival != profile.program.arrival:
        # It would count samples otherwise.
        return False
    return not _has_read_ahead(first.program)


def _has_read_ahead(program: ProgramProfile) -> bool:
    """Returns whether the first run has surveyed the data, so that its steps have not waited for theirs."""
    return program.typed_batch is None or program.typed_batch.micro_batch_size == 1


def _result_in(paths: TrialPaths) -> TrialResult | None:
    with contextlib.suppress(OSError, ValueError):
        return TrialResult.model_validate_json(paths.result.read_text())
    return None


def _with_flops_of(profile: TrialResult, metrics: Mapping[str, float], ranks: int) -> dict[str, float]:
    """Returns the metrics with the FLOPs of a sample that the profile has in the end, which all trials share."""
    of_a_sample = 0.0 if profile.profile is None else profile.profile.flops_per_sample
    counted = metrics.get("FLOPS_per_gpu")
    if not of_a_sample or not counted:
        return dict(metrics)
    flops = of_a_sample * metrics["throughput"] / ranks
    utilisation = {"mfu": metrics["mfu"] * flops / counted} if "mfu" in metrics else {}
    return {**metrics, "FLOPS_per_gpu": flops, **utilisation}
