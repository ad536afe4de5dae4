"""The measured configurations of a study. None runs twice because it has two names or two purposes. Pure."""

from trial_lib.records.candidate import Candidate, Purpose
from trial_lib.records.result import TrialResult


class MeasuredConfigs:
    """The trials of a study, by the complete configuration that they ran."""

    def __init__(self) -> None:
        """Starts with none."""
        self._first: dict[str, int] = {}
        self._searched: set[tuple[str, str]] = set()

    def add(self, result: TrialResult, candidate: Candidate) -> None:
        """Adds a trial. One that was killed from outside says nothing about its configuration, and is not added."""
        if result.from_outside:
            return
        self._first.setdefault(result.config_hash, result.number)
        if result.purpose is Purpose.SEARCH:
            self._searched.add((result.config_hash, candidate.lineage))

    def known(self, config_hash: str, candidate: Candidate) -> int | None:
        """Returns the number of the trial that has measured a candidate of the search already.

        It is None if the candidate has to run: no trial had its configuration, or the search asks for it again by the
        same name to measure it once more.

        Args:
            config_hash: the hash of the candidate's complete configuration.
            candidate: the candidate.
        """
        is_asked_again = (config_hash, candidate.lineage) in self._searched
        return None if is_asked_again else self._first.get(config_hash)
