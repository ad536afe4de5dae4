"""The search space that a table was recorded over, rebuilt from its lineages."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from trial_lib.space.knobs import LEFT_OPEN, Arm, Knob, SearchSpace, get_knob

_ZERO = "zero_optimization"
_COARSE = ("stage", "offload_optimizer", "offload_param")

# The best guess, which stands first, as in `trial_lib/space/catalogue.py`: DeepSpeed's defaults
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


def space_of(lineages: Iterable[Mapping[str, Any]]) -> SearchSpace:
    """Returns the space whose lineages are the given knobs.

    Raises:
        ValueError: they are no full grid of each arm.
    """
    arms: dict[str, list[dict[str, Any]]] = {}
    for knobs in lineages:
        zero = knobs[_ZERO]
        coarse = {key: zero[key] for key in _COARSE if key in zero}
        arms.setdefault(json.dumps(coarse, sort_keys=True), []).append(zero)
    space = SearchSpace.of_arms(_arm(json.loads(coarse), settings) for coarse, settings in sorted(arms.items()))
    if sum(arm.size for arm in space.arms) != sum(map(len, arms.values())):
        raise ValueError("the table is no full grid of each arm's knobs")
    return space


def nearest(space: SearchSpace, base_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the lineage that is nearest to the user's configuration, in the arm of its stage without offload.

    A recorded bucket is clamped to the model's size, which changes nothing (see `SearchSpace.for_model`).
    """
    stage = get_knob(base_config, f"{_ZERO}.stage", 0)
    arm = next((arm for arm in space.arms if arm.stage == stage and len(arm.knobs[_ZERO]) == 1), space.arms[0])
    wanted = {}
    for knob in arm.fine:
        own = get_knob(base_config, knob.path, LEFT_OPEN.get(knob.path))
        if own is not None:
            wanted[knob.path] = _by_distance(knob.values, own)[0]
    return arm.with_fine(wanted)


def _arm(coarse: dict[str, Any], settings: list[dict[str, Any]]) -> Arm:
    keys = [key for key in settings[0] if key not in _COARSE]
    fine = []
    for key in keys:
        default = _FIRST.get(key, settings[0][key])
        fine.append(Knob(f"{_ZERO}.{key}", tuple(_by_distance({zero[key] for zero in settings}, default))))
    return Arm({_ZERO: coarse}, tuple(fine))


def _by_distance(values: Iterable[float], wanted: float) -> list[float]:
    return sorted(values, key=lambda value: abs(value - wanted))
