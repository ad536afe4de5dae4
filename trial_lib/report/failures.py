"""Groups the trials that did not complete by the cause of their end."""

from collections.abc import Iterable
from dataclasses import dataclass

from trial_lib.records.failure_cause import cause_of
from trial_lib.records.result import Outcome
from trial_lib.report.study_view import TrialView


@dataclass(frozen=True)
class FailureGroup:
    """Trials that ended the same way.

    Attributes:
        outcome: of all of them.
        reason: that of the first trial. The others' differ only in numbers and paths.
        trials: in the order of their numbers.
    """

    outcome: Outcome
    reason: str
    trials: tuple[TrialView, ...]

    @property
    def micro_batches(self) -> str:
        """Their micro-batch sizes, from the smallest to the largest."""
        sizes = sorted({trial.row.micro_batch_size for trial in self.trials})
        return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"

    @property
    def arms(self) -> str:
        """The arms of the trials."""
        return ", ".join(sorted({trial.arm for trial in self.trials}))


def failure_groups(trials: Iterable[TrialView]) -> list[FailureGroup]:
    """Returns the trials that did not complete, by cause, the most frequent cause first."""
    groups: dict[tuple[Outcome, str], list[TrialView]] = {}
    for trial in trials:
        if not trial.completed:
            groups.setdefault((trial.row.outcome, cause_of(trial.row.reason)), []).append(trial)
    found = [FailureGroup(outcome, same[0].row.reason, tuple(same)) for (outcome, _), same in groups.items()]
    return sorted(found, key=lambda group: (-len(group.trials), group.trials[0].number))
