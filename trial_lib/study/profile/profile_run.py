"""The profile trial of a study: its two runs, the check of the mapped batch, and the build of the operators."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from trial_lib.deepspeed_config.overrides import TRAIN_BATCH
from trial_lib.launch.place import Place
from trial_lib.launch.trial import TrialPlan
from trial_lib.records.candidate import Candidate
from trial_lib.records.result import ProgramProfile, TrialResult
from trial_lib.study.known_program import KnownProgram
from trial_lib.study.opening.disk_room import with_swap_disks
from trial_lib.study.opening.mapped_values import held_against, mapped_places
from trial_lib.study.opening.needed_ops import with_ops_built
from trial_lib.study.plans import TrialPlans
from trial_lib.study.profile.own_reading import forget_own, own_plan
from trial_lib.study.profile.profiling import profile_candidates, run_profile
from trial_lib.study.setup import StudySetup


def run_profile_of_study(
    setup: StudySetup, place: Place, plan: TrialPlan, run: Callable[..., TrialResult]
) -> TrialResult:
    """Runs the profile trial of a study to its end.

    The operators that the search needs are built meanwhile. The result names those that cannot be built, and the
    free room of the disks to which arms may swap. The first run may also measure the user's configuration
    (`own_reading`).

    Args:
        setup: the study's.
        place: where its trials run.
        plan: the trial, as it was decided on.
        run: runs one plan, and perhaps another one after it in the same ranks.
    """
    plans, typed = TrialPlans(setup), KnownProgram.of(setup.experiment)

    def plans_for(program: ProgramProfile, size: int) -> list[TrialPlan]:
        known = typed.learned(program)
        types_batch = type(setup.experiment.ds_config.get(TRAIN_BATCH)) is int
        candidates = profile_candidates(program, size, plan.candidate.slots, types_batch)
        return [plans.plan(plan.number, plan.purpose, candidate, known, None) for candidate in candidates]

    def run_and_compare(plan: TrialPlan) -> TrialResult:
        if not plan.as_typed:
            return run(plan)
        result = run_with_ops(
            plan, place, lambda plan: run(plan, own_plan(plan, setup)) if plan.with_own else run(plan)
        )
        places = mapped_places(setup.experiment, setup.environment)
        return held_against(result, places, setup.experiment.config.arg_mappings, setup.experiment.ds_config)

    forget_own(plan)
    profiled = run_profile(plan, plans.typed(plan, typed.base_config), plans_for, run_and_compare, place.prime)
    complete = with_swap_disks(with_ops_built(profiled, setup, place.build), setup)
    if place.has_compiled:
        # The compilers have taken time from the ranks.
        forget_own(plan)
    return complete


def run_with_ops(plan: TrialPlan, place: Place, run: Callable[[TrialPlan], TrialResult]) -> TrialResult:
    """Runs the program as typed. Where it needs an op that is not built, has the op built, and runs it again.

    So no op is built for a program that never has an engine, and no slot waits for a compiler.
    """
    if place.starter_here is None:
        return run(plan)
    tried: set[str] = set()
    while True:
        result = run(replace(plan, ends_at_unbuilt_ops=True))
        missing = _unbuilt_ops(plan)
        if not missing or missing <= tried:
            break
        tried |= missing
        if missing & place.build(sorted(missing)).keys():
            break
    # A rank that cannot build it either says why.
    return run(plan) if missing else result


def _unbuilt_ops(plan: TrialPlan) -> set[str]:
    """Returns the builders of the ops that ended the ranks of a run."""
    found = set()
    for rank in range(plan.candidate.slots):
        with contextlib.suppress(OSError, ValueError, KeyError):
            failure = json.loads(plan.paths.failure(rank).read_text())
            if failure["type"] == "OpNotBuiltError":
                found.add(failure["message"])
    return found


def profiled_candidate(file: Path) -> Candidate | None:
    """Returns the candidate that a profile trial measured in the end; None if its file is missing or damaged.

    A study asks for the smallest micro-batch. A program that cannot take it is profiled at a larger one.
    """
    try:
        return Candidate.model_validate_json(file.read_text())
    except (OSError, ValueError):
        return None
