"""The end of a trial that traces some steps: its measurement is complete, and the trace is added to it."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from trial_lib.measure.engine_watch import EngineWatch
from trial_lib.measure.figures.over_ranks import total
from trial_lib.measure.trace.step_trace import StepTrace, untraced
from trial_lib.wire.traced_step import TracedStep

_CUT_SHORT = "The rank ended while its steps were traced."
_DATA_OVER = "The program ended before enough steps could be traced."


def with_data_over(measurement: dict[str, Any]) -> dict[str, Any]:
    """Returns the measurement of a program that has ended before the steps that would have been traced."""
    return {**measurement, "traced": TracedStep(failure=_DATA_OVER).to_json()}


class TracedEnd:
    """Traces steps after the counted ones. Every rank makes one after the same step.

    Args:
        watch: of the engine that trains.
        measurement: of the trial. It is kept at once, because the trace may end the rank.
        seconds: of the counted steps, which all ranks have agreed on.
        keep: called with a measurement that counts if the rank gets no further.
    """

    def __init__(
        self,
        watch: EngineWatch,
        measurement: dict[str, Any],
        seconds: Sequence[float],
        keep: Callable[[dict[str, Any]], None],
    ) -> None:
        self._watch = watch
        self._measurement = measurement
        self._keep = keep
        self._step_s = statistics.median(seconds)
        self._trace: StepTrace | None = None

    def go_on(self) -> dict[str, Any] | None:
        """Returns the measurement with its trace; None if the code has to train on.

        Call it first after the last counted step, and then after each step.
        """
        if self._trace is not None:
            traced = self._trace.step_ended()
            return None if traced is None else self._with(traced)
        reason = untraced(self._step_s)
        if reason:
            return self._with(TracedStep(failure=reason))
        self._keep(self._with(TracedStep(failure=_CUT_SHORT)))
        self._trace = StepTrace(self._watch, self._step_s, lambda values: total(values, self._watch.engine))
        return None

    def cut_short(self) -> dict[str, Any]:
        """Returns the measurement if the program ends during the trace."""
        if self._trace is not None:
            self._trace.close()
        return with_data_over(self._measurement)

    def _with(self, traced: TracedStep) -> dict[str, Any]:
        return {**self._measurement, "traced": traced.to_json()}
