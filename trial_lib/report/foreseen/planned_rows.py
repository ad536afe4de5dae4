"""The foreseen figures of a study's trials beside the measured ones, as people read them."""

from dataclasses import dataclass

from trial_lib.records.planned_trials import PlannedTrials
from trial_lib.records.units import bytes_shown, quantity

_NONE = "-"


@dataclass(frozen=True)
class PlannedRow:
    """A trial that the plan foresaw.

    Attributes:
        trial: its number.
        arm: such as `z3-offload-optimizer`.
        micro_batch: samples.
        memory: foreseen, measured, and how far off the first is.
        speed: the same of the samples a second, the first with its 90 % interval.
    """

    trial: int
    arm: str
    micro_batch: int
    memory: tuple[str, str, str]
    speed: tuple[str, str, str]


def planned_rows(planned: PlannedTrials) -> list[PlannedRow]:
    """Returns a row for each trial that the plan foresaw."""
    rows = []
    for trial in planned.trials:
        speed = _NONE
        if trial.samples_per_s is not None and trial.low is not None and trial.high is not None:
            speed = f"{_rate(trial.samples_per_s)} ({_rate(trial.low)} to {_rate(trial.high)})"
        measured = _NONE if trial.measured_memory is None else bytes_shown(trial.measured_memory)
        rows.append(
            PlannedRow(
                trial=trial.number,
                arm=trial.label,
                micro_batch=trial.micro_batch,
                memory=(bytes_shown(trial.memory), measured, _off(trial.memory_off)),
                speed=(speed, _rate(trial.measured_samples_per_s), _off(trial.speed_off)),
            )
        )
    return rows


def _rate(value: float | None) -> str:
    return _NONE if value is None else quantity(value, "").rstrip()


def _off(share: float | None) -> str:
    return _NONE if share is None else f"{100 * share:+.0f} %"
