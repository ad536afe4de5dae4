"""Optuna's TPE by itself: one study over the knobs and the micro-batch size, as one would write it."""

import optuna

from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.search.base import Search, SearchProblem
from zerotune.trial_lib.search.methods import SearchSettings

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
        self._next_trial: optuna.trial.Trial | None = None
        self._running: dict[tuple[str, int], optuna.trial.Trial] = {}
        self._known: dict[tuple[str, int], float | None] = {}

    def _propose(self) -> Candidate | None:
        for _ in range(_TRIES):
            trial = self._study.ask()
            candidate = self._suggest(trial)
            if candidate.key in self._known:
                self._tell(trial, self._known[candidate.key])
            elif candidate.key in self._running:
                self._study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                self._next_trial = trial
                return candidate
        self._budget = self._asked  # it has nothing new to suggest
        return None

    def _begin(self, candidate: Candidate) -> None:
        assert self._next_trial is not None, "a replay of a table starts from nothing"
        self._running[candidate.key] = self._next_trial

    def _learn(self, candidate: Candidate, result: TrialResult) -> None:
        trial = self._running.pop(candidate.key)
        value = self._value(result)
        self._known[candidate.key] = value
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
