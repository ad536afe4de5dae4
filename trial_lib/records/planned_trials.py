"""How far off a plan was: what it foresaw for the trials of a study, beside what they measured."""

from math import exp, log
from pathlib import Path
from statistics import median
from typing import Any

from trial_lib.records.candidate import FrozenRecord
from trial_lib.records.units import percent

_RIGHT = 0.005


class PlannedTrial(FrozenRecord):
    """One trial that a plan foresaw."""

    number: int  # of the trial
    label: str  # of its arm, such as `z3-offload-optimizer`
    micro_batch: int  # samples
    memory: float  # bytes, foreseen
    measured_memory: float | None = None  # bytes on the rank that took most. None if the trial did not complete.
    samples_per_s: float | None = None  # foreseen, over all devices. None if the plan is for other devices.
    low: float | None = None  # the lower end of its 90 % interval
    high: float | None = None  # the upper end
    measured_samples_per_s: float | None = None  # None if the trial did not complete

    @property
    def memory_off(self) -> float | None:
        """The foreseen memory's error, as a share of the measured one. None if nothing was measured."""
        return None if not self.measured_memory else self.memory / self.measured_memory - 1

    @property
    def speed_off(self) -> float | None:
        """The foreseen speed's error, as a share of the measured one. None if there is no pair."""
        if not self.samples_per_s or not self.measured_samples_per_s:
            return None
        return self.samples_per_s / self.measured_samples_per_s - 1


class PlannedTrials(FrozenRecord):
    """The trials of a study that a plan foresaw."""

    plan_id: str  # of the plan
    devices: str  # that it was for, such as `h100-80gb:8`
    is_here: bool = False  # whether the study ran on devices of that kind, so that speeds can be compared
    of_steps: bool = False  # whether memory is that of the steps above initialisation (CPU), not the peak
    measured_on: str = ""  # study whose measurements the speeds come from; empty for a data sheet's
    trials: tuple[PlannedTrial, ...] = ()  # in the order of their numbers

    @classmethod
    def in_file(cls, file: Path) -> "PlannedTrials | None":
        """Returns what a study has kept; None if it has no plan, or none of its trials has ended."""
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    @property
    def memory_errors(self) -> list[float]:
        return [abs(trial.memory_off) for trial in self.trials if trial.memory_off is not None]

    @property
    def speed_error(self) -> float | None:
        """The middle error of the speeds, as a share: 0.22 is 22 % too fast. None if no speed can be compared."""
        found = [log(1 + trial.speed_off) for trial in self.trials if trial.speed_off is not None]
        return exp(median(found)) - 1 if found else None

    @property
    def sentence(self) -> str:
        errors, speed = self.memory_errors, self.speed_error
        if not errors and speed is None:
            return "No trial that the plan foresaw has completed, so nothing shows how far off it was."
        said = []
        if errors:
            worst = f" (worst {_shown(max(errors))})" if len(errors) > 1 else ""
            said.append(f"{_shown(median(errors))} off in memory{' at the median' if worst else ''}{worst}")
        if speed is not None:
            said.append(
                "right in speed"
                if abs(speed) < _RIGHT
                else f"{_shown(abs(speed))} too {'fast' if speed > 0 else 'slow'}"
            )
        found = f"The plan was {' and '.join(said)}."
        if self.is_here:
            return found
        return f"{found} It was for {self.devices}, which this host does not have, so speeds are not compared."

    def document(self) -> dict[str, Any]:
        return {"sentence": self.sentence, **self.model_dump(mode="json")}


def _shown(share: float) -> str:
    return percent(round(share, 2)) if share >= _RIGHT else "under 1 %"
