"""The known knobs, each with the place where DeepSpeed reads it. A knob without an effect is not searched.

Read from DeepSpeed 0.19.8. Each effect names its place below `deepspeed/runtime`. Pure: standard library only.
"""

from collections.abc import Mapping
from typing import Any

from trial_lib.deepspeed_config.rules import ZERO_KEYS
from trial_lib.space.effects import KnownKnob
from trial_lib.space.knobs import STAGE, get_knob
from trial_lib.space.known_knobs.activations import ACTIVATIONS
from trial_lib.space.known_knobs.adam import ADAM
from trial_lib.space.known_knobs.engine import ENGINE
from trial_lib.space.known_knobs.layout import LAYOUT
from trial_lib.space.known_knobs.offload import OFFLOAD
from trial_lib.space.known_knobs.partitioned_parameters import PARTITIONED_PARAMETERS
from trial_lib.space.known_knobs.precision import PRECISION
from trial_lib.space.known_knobs.reduction import REDUCTION
from trial_lib.space.known_knobs.zero_plus_plus import ZERO_PLUS_PLUS

KNOBS: dict[str, KnownKnob] = {
    **OFFLOAD,
    **REDUCTION,
    **PARTITIONED_PARAMETERS,
    **ZERO_PLUS_PLUS,
    **PRECISION,
    **ACTIVATIONS,
    **ENGINE,
    **LAYOUT,
    **ADAM,
}

# Sections whose every setting decides memory or mathematics, whether the catalogue has it or not.
_COARSE_SECTIONS = {
    "activation_checkpointing",
    "bf16",
    "bfloat16",
    "compression_training",
    "data_types",
    "fp16",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "tensor_parallel",
}

# Sections that DeepSpeed hands to the optimizer, the scheduler and the loss scaling as they are.
_ALWAYS_READ = {"fp16", "gradient_clipping", "optimizer", "scheduler"}

STAGE_3_NAMES = {
    f"zero_optimization.{key.removeprefix('stage3_')}": f"zero_optimization.{key}"
    for key in ZERO_KEYS
    if key.startswith("stage3_") and key.removeprefix("stage3_") in ZERO_KEYS
}
"""The short names of stage 3's settings, with the documented names that the catalogue has."""


def is_coarse(path: str) -> bool:
    """Returns whether a setting decides memory or mathematics, and so the arm of a candidate."""
    known = KNOBS.get(path)
    return path == STAGE or (known.is_coarse if known else path.partition(".")[0] in _COARSE_SECTIONS)


def is_known(path: str) -> bool:
    """Returns whether a setting is known to have an effect in some candidate."""
    return path in KNOBS or path == STAGE or path.partition(".")[0] in _ALWAYS_READ


def catalogues_name(path: str) -> str:
    """Returns the catalogue's name for a setting."""
    return STAGE_3_NAMES.get(path, path)


def spelled(path: str, base_config: Mapping[str, Any]) -> str:
    """Returns the name of a setting in the user's configuration. DeepSpeed refuses both names side by side."""
    for short, name in STAGE_3_NAMES.items():
        if path in (short, name):
            return name if get_knob(base_config, short) is None else short
    return path
