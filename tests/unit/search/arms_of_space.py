"""Search spaces for tests, and what is in them."""

from dataclasses import fields
from typing import Any

from zerotune.trial_lib.messages.measurement import ProgramProfile
from zerotune.trial_lib.search.arms import RequestedKnob, build_space, without_effect
from zerotune.trial_lib.search.effects import Surroundings
from zerotune.trial_lib.search.knobs import Arm, SearchSpace

ZERO = "zero_optimization"
ALL = (0, 1, 2, 3)
LARGE = 7 * 10**9


def here(device="cuda", slots=8, replicas=8, num_params=LARGE, trainable=None, base=None, **more) -> Surroundings:
    base = {"optimizer": {"type": "AdamW"}} if base is None else base
    found = {name: more.pop(name) for name in ({each.name for each in fields(ProgramProfile)} & more.keys())}
    program = ProgramProfile(**found)
    return Surroundings(device, slots, replicas, num_params, trainable or num_params, base, program=program, **more)


def adaptive(*requests: RequestedKnob, at: Surroundings | None = None, stages=ALL) -> SearchSpace:
    return build_space(stages, at or here(), requests, catalogue=True)


def told(*requests: RequestedKnob, at: Surroundings | None = None, stages=ALL) -> list[str]:
    return without_effect(stages, at or here(), requests, catalogue=True)


def labels(space: SearchSpace) -> list[str]:
    return [arm.label for arm in space.arms]


def arm(space: SearchSpace, label: str) -> Arm:
    return next(arm for arm in space.arms if arm.label == label)


def fine(space: SearchSpace, label: str) -> dict[str, tuple[Any, ...]]:
    return {knob.path.removeprefix("zero_optimization."): knob.values for knob in arm(space, label).fine}
