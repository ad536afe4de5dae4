"""The unfinished work of a study that was cut short."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trial_lib.measure.figures.will_fit import SizeMemory, will_fit
from trial_lib.records.candidate import Purpose, Sweep, Withdrawal
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.study_folder import StudyPaths
from trial_lib.study.kept.history import Decided, Withdrawn


class ElsewhereError(Exception):
    """Ranks run on another kind of device than the study's slots. Until that is fixed, no trial can measure."""


def stays_open(result: TrialResult) -> bool:
    """Returns whether a trial must run again.

    It must if it was cut short or ran on another kind of device. The profile trial and the trial of the user's
    configuration also run again if they were killed from outside, because everything else depends on them.
    """
    is_stood_on = result.purpose in (Purpose.PROFILE, Purpose.SUBMITTED)
    return result.outcome is Outcome.CANCELLED or result.elsewhere or (is_stood_on and result.from_outside)


def unheard(paths: StudyPaths, numbers: Iterable[int]) -> Iterator[TrialResult]:
    """Yields the results of trials that had ended when the study died, but whose ends its history lacks.

    Args:
        paths: the study's files.
        numbers: of the trials without an end in the history.
    """
    for number in sorted(numbers):
        with contextlib.suppress(OSError, ValueError):
            result = TrialResult.model_validate_json(paths.trial(number).result.read_text())
            if not stays_open(result):
                yield result


def left_of(
    decided: Sequence[Decided], results: Mapping[int, TrialResult], withdrawn: Mapping[int, Withdrawal]
) -> tuple[list[Decided], list[Withdrawn]]:
    """Returns the choices that still have to run, and the sizes of sweeps that are given up.

    A sweep continues only as far as its process group would have: not beyond a size that failed, and not to a size that
    the group would have predicted not to fit.

    Args:
        decided: the choices of the search, in order.
        results: of the trials that have ended, by number.
        withdrawn: why sizes were not measured, by number.
    """
    left: list[Decided] = []
    given_up: list[Withdrawn] = []
    for decision in decided:
        rest = decision.without(results.keys() | withdrawn.keys())
        if not rest.numbered:
            continue
        reason = None if decision.sweep is None else _end_of_group(decision, decision.sweep, rest, results, withdrawn)
        if reason is None:
            left.append(rest)
        else:
            given_up += [Withdrawn(number, reason) for number, _ in rest.numbered]
    return left, given_up


def _end_of_group(
    decision: Decided,
    sweep: Sweep,
    rest: Decided,
    results: Mapping[int, TrialResult],
    withdrawn: Mapping[int, Withdrawal],
) -> Withdrawal | None:
    """Returns why a sweep's process group would have measured no further size; None if it would have."""
    next_number, next_candidate = rest.numbered[0]
    # A later size may have ended first, because its result was known already.
    measured = [
        (candidate.micro_batch_size, results[number])
        for number, candidate in decision.numbered
        if number < next_number and number in results
    ]
    reasons = [withdrawn[number] for number, _ in decision.numbered if number in withdrawn]
    if reasons:
        return reasons[-1]
    if not measured:
        return None
    if measured[-1][1].outcome not in (Outcome.COMPLETED, Outcome.TOO_SLOW):
        return Withdrawal.ENDED
    if measured[-1][1].memory.was_short:
        return Withdrawal.MEMORY
    sizes = [_memory_of(size, result) for size, result in measured if result.memory.peak]
    if sizes and not will_fit(sizes, next_candidate.micro_batch_size, sweep.bytes_per_sample, sweep.headroom):
        return Withdrawal.MEMORY
    return None


def _memory_of(size: int, result: TrialResult) -> SizeMemory:
    memory = result.memory
    return SizeMemory(
        samples=size,
        above_initialize=max(memory.above_initialize),
        available=min(memory.available, default=None),
    )
