"""How far below the best a replay's answers are: after so many trials, after so much time, and when for good. Pure."""

from bisect import bisect_right
from dataclasses import dataclass

from benchmarks.replay.driver import Replay
from benchmarks.replay.world import World
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome


@dataclass(frozen=True)
class Course:
    """The regret of a replay as it goes on: the share that the answer's true throughput is below the best.

    Attributes:
        start: the regret of the submitted configuration.
        times: virtual seconds at which the search's trials ended.
        regrets: after each of them.
        out_of_memory: how many of the trials ended so, as a fraction.
    """

    start: float
    times: tuple[float, ...]
    regrets: tuple[float, ...]
    out_of_memory: float

    @classmethod
    def of(cls, replay: Replay, world: World) -> "Course":
        """Returns the course of a replay."""

        def regret(candidate: Candidate) -> float:
            return 1 - (world.truth(candidate) or 0.0) / world.best

        failed = sum(trial.outcome is Outcome.OUT_OF_MEMORY for trial in replay.trials)
        return cls(
            regret(replay.submitted),
            tuple(trial.ended_at for trial in replay.trials),
            tuple(regret(trial.reported) for trial in replay.trials),
            failed / max(1, len(replay.trials)),
        )

    def after_trials(self, trials: int) -> float:
        """Returns the regret after so many trials, the profile trial the first of them; the last one's if it ended."""
        return self._after(min(trials - 1, len(self.regrets)))

    def after_seconds(self, seconds: float) -> float:
        """Returns the regret after so many virtual seconds."""
        return self._after(bisect_right(self.times, seconds))

    def seconds_of_trial(self, trial: int) -> float:
        """Returns when a trial of the search ended, counted from 1, in virtual seconds; when the last one did."""
        return self.times[min(trial, len(self.times)) - 1]

    def seconds_within(self, share: float) -> float:
        """Returns the virtual seconds after which the regret is never above a share again; infinite if never."""
        at = float("inf")
        for time, regret in zip(reversed(self.times), reversed(self.regrets), strict=True):
            if regret > share:
                break
            at = time
        return at

    def trials_within(self, share: float) -> float:
        """Returns the trials, the profile trial the first, after which the regret is never above a share again."""
        above = [place for place, regret in enumerate((self.start, *self.regrets), start=1) if regret > share]
        last = above[-1] if above else 0
        return float("inf") if last > len(self.regrets) else last + 1.0

    def _after(self, searched: int) -> float:
        return self.regrets[searched - 1] if searched else self.start
