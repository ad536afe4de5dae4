"""What a study that was cut short has still to run of what it had decided on."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trial_lib.measure.figures.will_fit import SizeMemory, will_fit
from trial_lib.records.candidate import Purpose, Sweep, Withdrawal
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.study_folder import StudyPaths
from trial_lib.study.kept.history import Decided, Withdrawn


class ElsewhereError(Exception):
    """Ranks have come to another kind of device than the study's slots are: until that is mended, none can measure."""


def stays_open(result: TrialResult) -> bool:
    """Returns whether a trial is to run again as if it never had: it was cut short, or came to another kind of device;
    or it was killed from outside, and is the profile, which all the rest stands on, or the user's configuration,
    which all gains are against.
    """
    is_stood_on = result.purpose in (Purpose.PROFILE, Purpose.SUBMITTED)
    return result.outcome is Outcome.CANCELLED or result.elsewhere or (is_stood_on and result.from_outside)


def unheard(paths: StudyPaths, numbers: Iterable[int]) -> Iterator[TrialResult]:
    """Yields the results of trials that had ended when the study died, and of which its history had not heard yet.

    Args:
        paths: the study's files.
        numbers: of the trials that were decided on and have no end in the history.
    """
    for number in sorted(numbers):
        with contextlib.suppress(OSError, ValueError):
            result = TrialResult.model_validate_json(paths.trial(number).result.read_text())
            if not stays_open(result):
                yield result


def left_of(
    decided: Sequence[Decided], results: Mapping[int, TrialResult], withdrawn: Mapping[int, Withdrawal]
) -> tuple[list[Decided], list[Withdrawn]]:
    """Returns what is to be run, and the sizes of sweeps that are not measured after all.

    A sweep goes on only where its process group would have: not beyond a size that failed, nor to one that its group
    would have foreseen not to fit.

    Args:
        decided: all that the search has asked for, in order.
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
    """Returns why a sweep's process group would have measured nothing more; None where it would."""
    next_number, next_candidate = rest.numbered[0]
    # A later size may have ended before all others: one that was known already.
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
