"""The search space that a table was recorded over, rebuilt from its families."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import AUTOTP
from zerotune.trial_lib.inputs.search_space import coarse_switches
from zerotune.trial_lib.messages.turned import is_turned
from zerotune.trial_lib.records.switches import PROGRAM, switches_of
from zerotune.trial_lib.search.knobs import LEFT_OPEN, Arm, Knob, SearchSpace, get_knob

_ZERO, _LAYOUT = "zero_optimization", AUTOTP.partition(".")[0]
_COARSE = ("stage", "offload_optimizer", "offload_param")

# The best guess, which stands first, as in `trial_lib/search/catalogue.py`: DeepSpeed's defaults
# (deepspeed/runtime/zero/config.py, `DeepSpeedZeroConfig`; `overlap_comm` is None there, which its validator makes True
# at stage 3 and False below), and on a CPU, where all tables come from, gradients that are not copied.
_FIRST: Mapping[str, float] = {
    "reduce_bucket_size": 5e8,
    "allgather_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_param_persistence_threshold": 1e5,
    "overlap_comm": False,
    "contiguous_gradients": False,
    "reduce_scatter": True,
}


def space_of(families: Iterable[Mapping[str, Any]]) -> SearchSpace:
    """Returns the space whose families are the given knobs.

    Raises:
        ValueError: they are no full grid of each arm.
    """
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for knobs in families:
        arms.setdefault(json.dumps(_coarse(knobs), sort_keys=True), []).append(knobs)
    space = SearchSpace.of_arms(_arm(json.loads(coarse), of_arm) for coarse, of_arm in sorted(arms.items()))
    if sum(arm.size for arm in space.arms) != sum(map(len, arms.values())):
        raise ValueError("the table is no full grid of each arm's knobs")
    return space


def nearest(space: SearchSpace, base_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the family that is nearest to the user's configuration, in the arm of its stage without offload.

    A recorded bucket is clamped to the model's size, which changes nothing (see `SearchSpace.for_model`). Switches are
    as in the command, and ranks are divided as in the configuration.
    """
    stage, typed = get_knob(base_config, f"{_ZERO}.stage", 0), switches_of(base_config)
    group = get_knob(base_config, AUTOTP, 1)

    def is_near(arm: Arm) -> bool:
        own = all(typed.get(place) == value for place, value in switches_of(arm.knobs).items())
        is_divided_so = get_knob(arm.knobs, AUTOTP, group) == group
        return arm.stage == stage and len(arm.knobs[_ZERO]) == 1 and own and is_divided_so

    arm = next(filter(is_near, space.arms), space.arms[0])
    wanted = {}
    for knob in arm.fine:
        own = get_knob(base_config, knob.path, LEFT_OPEN.get(knob.path))
        # A switch as typed, and a setting that is left to DeepSpeed, are None, which may be a value of the knob.
        if own is not None or None in knob.values:
            wanted[knob.path] = _by_distance(knob.values, own)[0]
    return arm.with_fine(wanted)


def _coarse(knobs: Mapping[str, Any]) -> dict[str, Any]:
    zero = {key: value for key, value in knobs[_ZERO].items() if key in _COARSE}
    is_coarse = coarse_switches(switches_of(knobs))
    switches = {place: value for place, value in switches_of(knobs).items() if is_coarse[place]}
    layout = {_LAYOUT: knobs[_LAYOUT]} if _LAYOUT in knobs else {}
    return {_ZERO: zero, **layout, **({PROGRAM: switches} if switches else {})}


def _arm(coarse: dict[str, Any], settings: Sequence[Mapping[str, Any]]) -> Arm:
    fine = []
    for section in (_ZERO, PROGRAM):
        for key in settings[0].get(section, {}):
            if key not in coarse.get(section, {}):
                values = {knobs[section][key] for knobs in settings}
                if section != PROGRAM:
                    default = _FIRST.get(key, settings[0][section][key])
                else:
                    # A search tries the most workers first, because only a program that waits has the knob. The order
                    # of the program's own switches is not in a table.
                    default = max(values) if is_turned(key) else min(values, key=repr)
                fine.append(Knob(f"{section}.{key}", tuple(_by_distance(values, default))))
    return Arm(coarse, tuple(fine))


def _by_distance(values: Iterable[Any], wanted: Any) -> list[Any]:
    """Returns values by their distance from the wanted one. Texts have none, and follow by the alphabet."""

    def place(value: Any) -> tuple[float, str]:
        if value == wanted:
            return 0.0, ""
        are_numbers = isinstance(value, int | float) and isinstance(wanted, int | float)
        return (abs(value - wanted), "") if are_numbers else (math.inf, repr(value))

    return sorted(values, key=place)
