"""The profile trial: the program as it was typed, then with the smallest micro-batch that it takes.

The typed command is the user's configuration, in its flags, variables, files and code. So the first run changes
nothing, and the engine shows the configuration. The second run measures what one sample needs. Some models cannot take
a single sample (experts, BatchNorm, a contrastive loss). Such a model is profiled at the smallest size that works, at
last at its own.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trial_lib.deepspeed_config.overrides import TRAIN_BATCH
from trial_lib.launch.trial import TrialPlan, write_unstarted
from trial_lib.records.candidate import Candidate
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
    plan_for: Callable[[ProgramProfile, int], TrialPlan],
    run: Callable[[TrialPlan], TrialResult],
    prime: Callable[[Sequence[Import]], None],
) -> TrialResult:
    """Runs the profile trial to its end.

    The result is also in the trial's folder, unless the trial was cut short.

    Args:
        profile: the trial as it was decided on.
        typed: its first run, of the program as it was typed.
        plan_for: returns the run at a micro-batch size (samples), from what the first run has found.
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
    for size in () if is_seen and program.batch_varies else sizes_below(own):
        plan = plan_for(program, size)
        result = run(plan)
        if result.outcome is Outcome.COMPLETED or _is_cut_short(result) or _is_ignored(result):
            return _kept(plan, result, seen, program)
        failed = failed or result
        if result.outcome in _AT_EVERY_SIZE:
            break
    if failed is not None and failed.outcome is Outcome.OUT_OF_MEMORY:
        return failed
    return _kept(plan_for(program, own), seen, seen, program)


def sizes_below(own: int) -> Iterator[int]:
    """Yields the micro-batch sizes below the program's own to profile at, smallest first."""
    size = 1
    while size < own:
        yield size
        size *= 2


def profile_candidate(program: ProgramProfile, size: int, slots: int, arg_mappings: dict[str, str]) -> Candidate:
    """Returns the candidate of the profile trial: a micro-batch size, and everything else as typed.

    Args:
        program: what the run of the program as typed has found.
        size: the micro-batch size, in samples.
        slots: devices of the trial.
        arg_mappings: the option or the environment variable that sets each DeepSpeed key.
    """
    typed = program.typed_batch
    assert typed is not None
    replicas = typed.train_batch_size // (typed.micro_batch_size * typed.gradient_accumulation_steps)
    return Candidate(
        micro_batch_size=size,
        gradient_accumulation_steps=typed.gradient_accumulation_steps,
        slots=slots,
        # A program with a flag for the whole batch needs its value.
        data_parallel_size=replicas if TRAIN_BATCH in arg_mappings else None,
    )


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
