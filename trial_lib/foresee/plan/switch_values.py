"""The values of a program's switches that a plan foresees apart. Pure.

One run for each value shows what the value changes. Values whose runs do the same share the rows of a plan, and no arm
is run for them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from trial_lib.command.switches import PROGRAM, is_foreseeable, is_switch, place_of, shown_switch
from trial_lib.deepspeed_config.layout import GROUPS
from trial_lib.foresee.plan.arms import PlanArm, changed_word, is_planned
from trial_lib.space.arms import RequestedKnob
from trial_lib.wire.foreseen_run import ForeseenRun
from trial_lib.wire.turned import compiles, is_turned

_ONE_LAYOUT = "because a plan counts the replicas of one layout."


class NamedRun(Protocol):
    """A run to foresee, by the name that it has in a plan."""

    @property
    def name(self) -> str:
        """The name."""


RunT = TypeVar("RunT", bound=NamedRun)


class SwitchValues(Generic[RunT]):
    """The switches of a `search_space` and their values.

    Each value is tried in the user's own arm, one at a time. A switch with conditions is not tried, because the program
    may refuse it if they are not met. So is one that ZeroTune turns, whose values differ by what they are.

    Args:
        requests: the `search_space` of the experiment.
        own: the switches in the user's configuration, by their places.
        of_own: the user's own arm.
        as_run: returns the run of an arm.

    Attributes:
        wanted: the runs that show the values, that of the user's own arm first. None if there is nothing to try.
    """

    def __init__(
        self,
        requests: Sequence[RequestedKnob],
        own: Mapping[str, Any],
        of_own: PlanArm,
        as_run: Callable[[PlanArm], RunT],
    ) -> None:
        self._requests = requests
        self._own = own
        self._typed = as_run(of_own)
        self._probes = {
            (place, repr(value)): as_run(self._probe(of_own.label, place, value))
            for request in requests
            if _is_tried(request)
            for place in (place_of(request.path),)
            for value in request.values
            if value is not None and value != own.get(place)
        }
        self.wanted: list[RunT] = [self._typed, *self._probes.values()] if self._probes else []

    def _probe(self, label: str, place: str, value: Any) -> PlanArm:
        known = {each: its for each, its in self._own.items() if its is not None}
        return PlanArm(f"{label}-as-typed-{changed_word(place, value)}", {PROGRAM: {**known, place: value}})

    def apart(self, runs: Mapping[str, ForeseenRun]) -> tuple[tuple[RequestedKnob, ...], tuple[str, ...]]:
        """Returns the requests with the values that are foreseen apart, and a sentence on each that is not.

        Args:
            runs: the wanted ones, by name.
        """
        needed = {path for request in self._requests for path in request.when}
        kept: list[RequestedKnob] = []
        notes: list[str] = []
        for request in self._requests:
            if request.path in GROUPS:
                notes.append(f"{request.path} stays as you have it, {_ONE_LAYOUT}")
            elif is_switch(request.path) and not is_planned(request):
                notes.append(_why_as_typed(request))
            elif not _is_tried(request):
                kept.append(request)
            else:
                values, said = self._of_request(request, runs, keeps_all=request.path in needed)
                notes += said
                kept += [replace(request, values=values)] if values else []
        return tuple(kept), tuple(notes)

    def resizing(self, runs: Mapping[str, ForeseenRun]) -> frozenset[str]:
        """Returns the places of the switches that change the model's number of parameters.

        Args:
            runs: the wanted ones, by name.
        """
        found = ((place, runs[probe.name]) for (place, _), probe in self._probes.items())
        return frozenset(
            place for place, run in found if not run.stopped and run.parameters != runs[self._typed.name].parameters
        )

    def _of_request(
        self, request: RequestedKnob, runs: Mapping[str, ForeseenRun], keeps_all: bool
    ) -> tuple[tuple[Any, ...], list[str]]:
        """Returns the values of a switch that are foreseen apart, none if they change nothing, and the sentences.

        Args:
            request: the switch.
            runs: as in `apart`.
            keeps_all: whether values that do the same stay, because a condition names them.
        """
        place = place_of(request.path)
        values: list[Any] = []
        notes: list[str] = []
        seen = [(self._own.get(place), runs[self._typed.name])] if self._probes else []
        for value in request.values:
            probe = self._probes.get((place, repr(value)))
            if probe is None:
                values.append(value)
                continue
            run = runs[probe.name]
            if run.stopped:
                notes.append(f"{shown_switch(place, value)} cannot be foreseen: {run.stopped}")
                continue
            like = None if keeps_all else next((each for each in seen if _is_like((value, run), each, place)), None)
            if like is None:
                seen.append((value, run))
                values.append(value)
            else:
                one, other = shown_switch(place, value), shown_switch(place, like[0])
                notes.append(f"{one} has the rows of {other}: in your arm its run does the same.")
                if repr(like[0]) not in map(repr, values):
                    values.append(like[0])
        changes = [value for value in values if value is not None and value != self._own.get(place)]
        return (tuple(values) if changes else ()), notes


def _is_tried(request: RequestedKnob) -> bool:
    return is_planned(request) and not request.when and not is_turned(place_of(request.path))


def _is_like(one: tuple[Any, ForeseenRun], other: tuple[Any, ForeseenRun], place: str) -> bool:
    """Returns whether two values of a switch have the same rows. A compiled model runs as it is written."""
    return compiles({place: one[0]}) == compiles({place: other[0]}) and _does_the_same(one[1], other[1])


def _does_the_same(one: ForeseenRun, other: ForeseenRun) -> bool:
    """Returns whether two runs have the same model, memory and work."""
    return (
        (one.parameters, one.trainable, one.micro_batch) == (other.parameters, other.trainable, other.micro_batch)
        and one.storages == other.storages
        and one.events == other.events
        and one.operations == other.operations
    )


def _why_as_typed(request: RequestedKnob) -> str:
    place = place_of(request.path)
    if is_turned(place):
        return f"{place} stays as your program has it: no foreseen run shows what it changes."
    if request.layout:
        return f"{place} stays as typed, {_ONE_LAYOUT}"
    if not is_foreseeable(place):
        return f"{place} stays as typed: libraries read this variable, and no foreseen run shows what it changes."
    return f"{place} stays as typed, because it is a fine switch. With `coarse: true` its values are foreseen."
