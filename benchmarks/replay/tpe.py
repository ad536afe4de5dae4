"""Optuna's TPE by itself: one study over the knobs and the micro-batch size, as one would write it."""

import optuna

from trial_lib.records.candidate import Candidate
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.search.base import Search, SearchProblem
from trial_lib.search.methods import SearchSettings

_TRIES = 100


class TpeSearch(Search):
    """Asks Optuna's TPE (Bergstra et al. 2011; the sampler with its defaults) for an arm, its knobs and a size.

    An out-of-memory is told as pruned and as a violated constraint, which serves the sampler better than a failure.
    What it suggests again is answered from what is known, and costs no trial.
    """

    def __init__(self, settings: SearchSettings, problem: SearchProblem, largest_size: int) -> None:
        """Starts with nothing asked for.

        Args:
            settings: of the search.
            problem: what it is about.
            largest_size: the sizes are suggested from 1 to this one, on a logarithmic scale.
        """
        super().__init__(settings, problem)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._arms = {arm.label: arm for arm in problem.space.arms}
        self._largest = self._allowed(largest_size)
        sampler = optuna.samplers.TPESampler(seed=settings.seed)
        direction = optuna.study.StudyDirection
        self._study = optuna.create_study(
            direction=direction.MINIMIZE if self.metric.smaller_is_better else direction.MAXIMIZE, sampler=sampler
        )
        self._in_flight: dict[tuple[str, int], optuna.trial.Trial] = {}
        self._known: dict[tuple[str, int], float | None] = {}

    def ask(self) -> Candidate | None:
        """Returns the candidate to run next; None when `finished`, or until something in flight is told."""
        if self._asked >= self._budget or len(self._in_flight) >= self._concurrency:
            return None
        for _ in range(_TRIES):
            trial = self._study.ask()
            candidate = self._suggest(trial)
            key = _key(candidate)
            if key in self._known:
                self._tell(trial, self._known[key])
            elif key in self._in_flight:
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                self._asked += 1
                self._in_flight[key] = trial
                return candidate
        self._budget = self._asked  # it has nothing new to suggest
        return None

    def apply(self, asked: Candidate) -> None:
        """Raises: a replay of a table starts from nothing."""
        raise NotImplementedError

    def tell(self, candidate: Candidate, result: TrialResult) -> None:
        """Takes in how a candidate's trial ended.

        Raises:
            KeyError: the candidate is not in flight.
        """
        trial = self._in_flight.pop(_key(candidate))
        value = self._value(result) if result.outcome is Outcome.COMPLETED else None
        self._known[_key(candidate)] = value
        self._tell(trial, value)
        if value is not None:
            self._is_new_best(candidate, result, value)

    @property
    def finished(self) -> bool:
        """Whether the search has nothing more to propose and waits for nothing."""
        return self._asked >= self._budget and not self._in_flight

    def _suggest(self, trial: optuna.trial.Trial) -> Candidate:
        arm = self._arms[trial.suggest_categorical("arm", list(self._arms))]
        fine = {
            knob.path: knob.values[trial.suggest_categorical(f"{arm.label} {knob.path}", range(len(knob.values)))]
            for knob in arm.fine
        }
        size = trial.suggest_int("micro_batch_size", 1, self._largest, log=True)
        return self._with_own_accumulation(arm.with_fine(fine), size)

    def _tell(self, trial: optuna.trial.Trial, value: float | None) -> None:
        trial.set_constraint("memory", -1.0 if value is not None else 1.0)
        if value is None:
            self._study.tell(trial, state=optuna.trial.TrialState.PRUNED)
        else:
            self._study.tell(trial, value)


def _key(candidate: Candidate) -> tuple[str, int]:
    return candidate.lineage, candidate.micro_batch_size
