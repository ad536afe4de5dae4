"""The profile trial: the program as it was typed, then with the smallest micro-batch that it takes.

The typed command is the user's configuration, in its flags, variables, files and code. So the first run changes
nothing, and the engine shows the configuration. The second run measures what one sample needs. Some models cannot take
a single sample (experts, BatchNorm, a contrastive loss). Such a model is profiled at the smallest size that works, at
last at its own.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trial_lib.launch.trial import TrialPlan, write_unstarted
from trial_lib.records.candidate import Candidate
from trial_lib.records.failure_cause import as_sentence, without_log
from trial_lib.records.result import Outcome, ProgramProfile, TrialResult
from trial_lib.wire.imported import Import

# Facts that only the run at a small size looks for, or that two sizes show better than one.
_OF_THE_DATA = (
    "longest_sequence",
    "shortest_sequence",
    "is_stretchable",
    "rows_per_sample",
    "batch_dimension",
    "other_rows_per_sample",
)
# Outcomes that another small size would not change.
_AT_EVERY_SIZE = (Outcome.OUT_OF_MEMORY, Outcome.OUT_OF_HOST_MEMORY, Outcome.TIMED_OUT)


def run_profile(
    profile: TrialPlan,
    typed: TrialPlan,
    plans_for: Callable[[ProgramProfile, int], Sequence[TrialPlan]],
    run: Callable[[TrialPlan], TrialResult],
    prime: Callable[[Sequence[Import]], None],
) -> TrialResult:
    """Runs the profile trial to its end.

    The result is also in the trial's folder, unless the trial was cut short.

    Args:
        profile: the trial as it was decided on.
        typed: its first run, of the program as it was typed.
        plans_for: returns the runs at a micro-batch size (samples), from what the first run has found. Each one is for
            a program that the one before has failed.
        run: runs a plan.
        prime: called with what the first run has imported.
    """
    seen = run(typed)
    program = seen.program
    if _is_cut_short(seen):
        return seen
    if program is None or program.typed_batch is None:
        write_unstarted(profile, seen)
        return seen
    prime(seen.imported)
    own = program.typed_batch.micro_batch_size
    is_seen = seen.outcome is Outcome.COMPLETED
    failed: TrialResult | None = None
    sizes = () if is_seen and program.batch_varies else sizes_below(own)
    for plan in (plan for size in sizes for plan in plans_for(program, size)):
        result = run(plan)
        if is_seen and _is_ignored(result) and program.rows_per_sample == 1 and result.micro_batch_arrived == own:
            # What was typed agrees with what arrives, so everything but the size can be tuned.
            program = program.model_copy(update={"fixed_batch": result.reason})
            break
        if result.outcome is Outcome.COMPLETED or _is_cut_short(result) or _is_ignored(result):
            return _kept(plan, _noted(result, plan, failed), seen, program)
        failed = failed or result
        if result.outcome in _AT_EVERY_SIZE:
            break
    if failed is not None and failed.outcome is Outcome.OUT_OF_MEMORY:
        return failed
    plan = plans_for(program, own)[0]
    return _kept(plan, _noted(seen, plan, failed), seen, program)


def _noted(result: TrialResult, plan: TrialPlan, failed: TrialResult | None) -> TrialResult:
    """Returns the result of a profile trial with a note on a run before it that failed, if one did."""
    if failed is None or result.outcome is not Outcome.COMPLETED:
        return result
    size, accumulation = plan.candidate.micro_batch_size, plan.candidate.gradient_accumulation_steps
    why = as_sentence(without_log(failed.reason))
    said = f"The profile is of a micro-batch of {size} x {accumulation}, because a run of a smaller batch failed. {why}"
    return result.model_copy(update={"note": " ".join(filter(None, (result.note, said.rstrip())))})


def sizes_below(own: int) -> Iterator[int]:
    """Yields the micro-batch sizes below the program's own to profile at, smallest first."""
    size = 1
    while size < own:
        yield size
        size *= 2


def profile_candidates(program: ProgramProfile, size: int, slots: int, types_batch: bool) -> list[Candidate]:
    """Returns the candidates of the profile trial: a micro-batch size, and everything else as typed.

    The first one has the accumulation of the program. A program may compare the global batch in the configuration with
    an option of its own. So the second one has the typed global batch, at another accumulation.

    Args:
        program: what the run of the program as typed has found.
        size: the micro-batch size, in samples.
        slots: devices of the trial.
        types_batch: whether the configuration has the global batch as a number.
    """
    typed = program.typed_batch
    assert typed is not None
    replicas = typed.train_batch_size // (typed.micro_batch_size * typed.gradient_accumulation_steps)
    accumulations = [typed.gradient_accumulation_steps]
    if types_batch and size < typed.micro_batch_size and typed.train_batch_size % (size * replicas) == 0:
        accumulations.append(typed.train_batch_size // (size * replicas))
    return [
        Candidate(
            micro_batch_size=size, gradient_accumulation_steps=accumulation, slots=slots, data_parallel_size=replicas
        )
        for accumulation in accumulations
    ]


def _is_cut_short(result: TrialResult) -> bool:
    return result.from_outside or result.outcome is Outcome.CANCELLED


def _is_ignored(result: TrialResult) -> bool:
    """Returns whether the program ignored the requested micro-batch size."""
    return result.outcome is Outcome.INVALID and result.micro_batch_arrived is not None


def _kept(plan: TrialPlan, result: TrialResult, seen: TrialResult, typed: ProgramProfile) -> TrialResult:
    """Writes a result as the trial's own, with what the run of the program as typed has found. Returns it."""
    of_the_data: dict[str, Any] = {}
    if result.program is not None:
        of_the_data = {name: getattr(result.program, name) for name in _OF_THE_DATA}
        if result.program.samples_per_epoch != typed.samples_per_epoch:
            of_the_data["samples_per_epoch"] = None
        # The run of the program as typed may have ended before its backward pass.
        of_the_data["formats"] = sorted({*typed.formats, *result.program.formats})
    program = typed.model_copy(update=of_the_data)
    # A later run has found the modules of the first one imported, and not what the program had set before.
    imported = [*seen.imported, *(each for each in result.imported if each not in seen.imported)]
    kept = result.model_copy(
        update={
            "program": program,
            "config_hash": plan.config_hash,
            "trial_id": plan.trial_id,
            "imported": imported,
        }
    )
    write_unstarted(plan, kept)
    return kept
