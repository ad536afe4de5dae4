"""The state of a study: its history, folded line by line."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from trial_lib.records.candidate import Candidate, Purpose, Withdrawal
from trial_lib.records.result import TrialResult
from trial_lib.space.candidate_names import CandidateNames
from trial_lib.study.kept.history import (
    PROFILE_NUMBER,
    SUBMITTED_NUMBER,
    Asked,
    AskedSweep,
    Event,
    Told,
    Withdrawn,
)


class StudyState:
    """The trials of a study after the events so far. Only `apply` changes it.

    The driver of a study, a resumed driver, and every reader of a study's folder reach their state by this class.

    Args:
        events: the first lines of the history.
        keeps_ended: whether `candidates` and `results` keep the trials that have ended. A reader that shows each end
            once needs less memory without them.

    Attributes:
        candidates: the candidate of each trial that was not withdrawn, by trial number.
        running: those of them that have no end yet.
        names: the names of these candidates, by trial number.
        purposes: the purpose of each trial, withdrawn ones included, by trial number.
        results: the result of each trial that has ended, by trial number, in the order of their ends.
        withdrawn: why a size of a sweep was not measured, by trial number.
        searched: the number of ended trials that count towards `max_trials`: the profile trial and the search's.
        stopped: why the search ended; None while it has not.
        next_number: the number of the next trial. The first two belong to the profile and the submitted trial.
    """

    def __init__(self, events: Iterable[Event] = (), keeps_ended: bool = True) -> None:
        self._keeps_ended = keeps_ended
        self._candidates: dict[int, Candidate] = {}
        self._running: dict[int, Candidate] = {}
        self._names: dict[int, str] = {}
        self._naming = CandidateNames()
        self._purposes: dict[int, Purpose] = {}
        self._results: dict[int, TrialResult] = {}
        self._withdrawn: dict[int, Withdrawal] = {}
        self.candidates: Mapping[int, Candidate] = MappingProxyType(self._candidates)
        self.running: Mapping[int, Candidate] = MappingProxyType(self._running)
        self.names: Mapping[int, str] = MappingProxyType(self._names)
        self.purposes: Mapping[int, Purpose] = MappingProxyType(self._purposes)
        self.results: Mapping[int, TrialResult] = MappingProxyType(self._results)
        self.withdrawn: Mapping[int, Withdrawal] = MappingProxyType(self._withdrawn)
        self.searched = 0
        self.stopped: str | None = None
        self.next_number = SUBMITTED_NUMBER + 1
        for event in events:
            self.apply(event)

    def apply(self, event: Event) -> None:
        """Moves on by one line of the history."""
        if isinstance(event, Asked):
            self._ask(event.number, event.purpose, event.candidate)
        elif isinstance(event, AskedSweep):
            for number, candidate in event.numbered:
                self._ask(number, Purpose.SEARCH, candidate)
        elif isinstance(event, Withdrawn):
            del self._running[event.number], self._candidates[event.number], self._names[event.number]
            self._withdrawn[event.number] = event.reason
        elif isinstance(event, Told):
            self._end(event.number, event.result)
        else:
            self.stopped = event.reason

    def _ask(self, number: int, purpose: Purpose, candidate: Candidate) -> None:
        self._candidates[number] = self._running[number] = candidate
        self._names[number] = self._naming.of(candidate)
        self._purposes[number] = purpose
        self.next_number = max(self.next_number, number + 1)

    def _end(self, number: int, result: TrialResult) -> None:
        del self._running[number]
        self.searched += self._purposes[number] in (Purpose.PROFILE, Purpose.SEARCH)
        if self._keeps_ended:
            self._results[number] = result
        else:
            del self._candidates[number], self._names[number]

    def label(self, number: int) -> str:
        """Returns the name of a trial, such as `z2-mbs16` or `confirm-z2-mbs16`."""
        return self._purposes[number].label(self._names[number])

    @property
    def profile(self) -> TrialResult | None:
        """The result of the profile trial; None while it has not ended."""
        return self._results.get(PROFILE_NUMBER)

    @property
    def submitted(self) -> TrialResult | None:
        """The result of the user's configuration's trial; None while it has not ended."""
        return self._results.get(SUBMITTED_NUMBER)

    @property
    def profiled(self) -> tuple[TrialResult, Candidate]:
        """The profile trial, which has ended, and its candidate."""
        return self._results[PROFILE_NUMBER], self._candidates[PROFILE_NUMBER]

    @property
    def begun(self) -> list[tuple[Candidate, TrialResult]]:
        """The profile trial and the trial of the user's configuration, as far as they have ended."""
        ended = [number for number in (PROFILE_NUMBER, SUBMITTED_NUMBER) if number in self._results]
        return [(self._candidates[number], self._results[number]) for number in ended]

    @property
    def has_searched(self) -> bool:
        """Whether the search has ended."""
        return self.stopped is not None

    def of_purpose(self, purpose: Purpose) -> list[TrialResult]:
        """Returns the results of the trials of one purpose, in the order of their ends."""
        return [result for number, result in self._results.items() if self._purposes[number] is purpose]
