"""The head start that earlier studies of an experiment give to a search."""

from dataclasses import dataclass

from trial_lib.records.candidate import Candidate
from trial_lib.records.result import ModelProfile, Outcome, TrialResult
from trial_lib.search.base import SearchProblem
from trial_lib.search.space_coordinates import SpaceCoordinates
from trial_lib.study.earlier.earlier_studies import EarlierStudy
from trial_lib.study.earlier.fingerprint import Fingerprint

# The activations of a sample may differ by this share between runs of the same model, because its data differ.
_SAME_ACTIVATIONS = 0.01
# The sections that may have changed if a trial's speed, or its memory, is still valid.
_SAME_SPEED = {"search"}
_SAME_MEMORY = {"search", "code"}
_TELLS_OF_MEMORY = (Outcome.COMPLETED, Outcome.OUT_OF_MEMORY)


@dataclass(frozen=True)
class HeadStart:
    """The knowledge about an experiment before its search.

    Attributes:
        earlier: the studies that this one may learn from, oldest first.
        begun: the experiment when this study began.
        profile: the profile trial; None before it has ended.
    """

    earlier: tuple[EarlierStudy, ...]
    begun: Fingerprint
    profile: TrialResult | None

    @property
    def last(self) -> EarlierStudy | None:
        """The last of the earlier studies; None if there is none to learn from."""
        return self.earlier[-1] if self.earlier else None

    @property
    def now(self) -> Fingerprint:
        """The experiment now, as far as it is known."""
        return self.begun if self.profile is None else self.begun.with_profile(self.profile)

    @property
    def has_changed(self) -> bool:
        """Whether a known part of the experiment has changed since the last study. The profile trial has ended."""
        return self.last is None or bool(self.now.changed_since(self.last.fingerprint))

    def winner(self, problem: SearchProblem) -> Candidate | None:
        """Returns the first candidate of a search: the last study's winner, with this study's slots and global batch.

        Returns:
            None if there is no winner, if it is the user's configuration or outside the search's space, and if its
            micro-batch size does not divide the global batch or is another than the program's only one.
        """
        last = self.last
        if last is None or last.winner == "own":
            return None
        known, replicas = last.other.candidate, problem.replicas.of(last.other.candidate.knobs)
        if SpaceCoordinates(problem.space).locate(known.knobs) is None:
            return None
        if problem.only_micro_batch not in (None, known.micro_batch_size):
            return None
        accumulation = known.gradient_accumulation_steps
        if problem.train_batch_size is not None:
            accumulation, left = divmod(problem.train_batch_size, known.micro_batch_size * replicas)
            if left or not accumulation:
                return None
        return Candidate(
            knobs=known.knobs,
            micro_batch_size=known.micro_batch_size,
            gradient_accumulation_steps=accumulation,
            slots=problem.slots,
            data_parallel_size=replicas,
        )

    def trials(self) -> list[tuple[Candidate, TrialResult]]:
        """Returns the trials of earlier studies that are still valid, oldest first, for a search to learn from.

        A trial is valid as a whole if only the search itself has changed. If the code has changed but the model needs
        the same memory, only the trial's memory is valid. After any other change nothing is. Failures for lack of host
        memory are never valid, because the host's free memory varies.
        """
        known: list[tuple[Candidate, TrialResult]] = []
        # If nothing has changed but the known winner is slower than before, the other results are doubtful as
        # well.
        is_doubtful = not self.has_changed
        for study in self.earlier:
            changed = set(self.now.changed_since(study.fingerprint))
            if changed <= _SAME_SPEED and not is_doubtful:
                known += [
                    (trial.candidate, trial.result)
                    for trial in study.trials
                    if trial.result.outcome is not Outcome.OUT_OF_HOST_MEMORY
                ]
            elif changed <= _SAME_MEMORY and self._needs_the_same(study):
                known += [
                    (trial.candidate, trial.result.model_copy(update={"metrics": {}}))
                    for trial in study.trials
                    if trial.result.outcome in _TELLS_OF_MEMORY
                ]
        return known

    @property
    def _model(self) -> ModelProfile | None:
        return None if self.profile is None else self.profile.profile

    def _needs_the_same(self, study: EarlierStudy) -> bool:
        if self._model is None:
            return False
        before, now = study.profile.activation_mem_per_gpu, self._model.activation_mem_per_gpu
        return abs(now - before) <= _SAME_ACTIVATIONS * before
