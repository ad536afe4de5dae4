"""The profile trial: first the program as it was typed, then the smallest micro-batch that it can take.

What was typed is the user's configuration, wherever it stands: in flags, variables, files or code. So it is read off
the engine of a run in which nothing is asked of the program. A smaller micro-batch, best of a single sample, then
shows what a sample takes by itself. That is a wish: a model that cannot take so few (experts, BatchNorm, a contrastive
loss) is profiled at the smallest size that works, at last at its own.
"""

from collections.abc import Callable, Iterator
from typing import Any

from trial_lib.deepspeed_config.overrides import TRAIN_BATCH
from trial_lib.launch.trial import TrialPlan, write_unstarted
from trial_lib.records.candidate import Candidate
from trial_lib.records.result import Outcome, ProgramProfile, TrialResult

# What only the run at a small size looks for, and what two sizes tell better than one.
_OF_THE_DATA = (
    "longest_sequence",
    "shortest_sequence",
    "is_stretchable",
    "rows_per_sample",
    "batch_dimension",
    "other_rows_per_sample",
)
# What another small size would not mend.
_AT_EVERY_SIZE = (Outcome.OUT_OF_MEMORY, Outcome.OUT_OF_HOST_MEMORY, Outcome.TIMED_OUT)


def run_profile(
    profile: TrialPlan,
    typed: TrialPlan,
    plan_for: Callable[[ProgramProfile, int], TrialPlan],
    run: Callable[[TrialPlan], TrialResult],
    prime: Callable[[list[str]], None],
) -> TrialResult:
    """Runs the profile trial to its end and returns its result.

    That is also in the trial's folder, unless it was cut short.

    Args:
        profile: the trial as it was decided on.
        typed: its run of the program as it was typed.
        plan_for: returns the run at a micro-batch size (samples), given what the first one has found.
        run: runs a plan.
        prime: told what the first run has imported.
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
            return _kept(plan, result, program)
        failed = failed or result
        if result.outcome in _AT_EVERY_SIZE:
            break
    if failed is not None and failed.outcome is Outcome.OUT_OF_MEMORY:
        return failed
    return _kept(plan_for(program, own), seen, program)


def sizes_below(own: int) -> Iterator[int]:
    """Yields the micro-batch sizes to profile at, smallest first, below the program's own."""
    size = 1
    while size < own:
        yield size
        size *= 2


def profile_candidate(program: ProgramProfile, size: int, slots: int, arg_mappings: dict[str, str]) -> Candidate:
    """Returns what the profile trial runs with: a micro-batch size, and all else as it was typed.

    Args:
        program: what the run of the program as typed has found.
        size: the micro-batch size (samples).
        slots: devices that it takes.
        arg_mappings: the flag or the environment variable that sets each DeepSpeed key.
    """
    typed = program.typed_batch
    assert typed is not None
    replicas = typed.train_batch_size // (typed.micro_batch_size * typed.gradient_accumulation_steps)
    return Candidate(
        micro_batch_size=size,
        gradient_accumulation_steps=typed.gradient_accumulation_steps,
        slots=slots,
        # A program that takes the whole batch by a flag has to be told it.
        data_parallel_size=replicas if TRAIN_BATCH in arg_mappings else None,
    )


def _is_cut_short(result: TrialResult) -> bool:
    return result.from_outside or result.outcome is Outcome.CANCELLED


def _is_ignored(result: TrialResult) -> bool:
    """Returns whether the program's batches do not follow what is asked for."""
    return result.outcome is Outcome.INVALID and result.micro_batch_arrived is not None


def _kept(plan: TrialPlan, result: TrialResult, typed: ProgramProfile) -> TrialResult:
    """Writes a result as the trial's own, with what the run of the program as typed has found."""
    of_the_data: dict[str, Any] = {}
    if result.program is not None:
        of_the_data = {name: getattr(result.program, name) for name in _OF_THE_DATA}
        # The program as typed may not have come to its backward pass.
        of_the_data["formats"] = sorted({*typed.formats, *result.program.formats})
    program = typed.model_copy(update=of_the_data)
    kept = result.model_copy(update={"program": program, "config_hash": plan.config_hash, "trial_id": plan.trial_id})
    write_unstarted(plan, kept)
    return kept
