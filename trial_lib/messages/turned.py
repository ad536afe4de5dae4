"""Switches that ZeroTune itself turns inside a rank, because the program's command has no place for them.

Such a switch is named by the object that it belongs to: `model:compile`. A search varies it beside the switches of the
program (`trial_lib/records/switches.py`). `trial_lib/rank/model_transforms.py` turns it.

A rank imports this module from the user's environment: standard library only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHECKPOINTING, COMPILE, ATTENTION = "model:activation_checkpointing", "model:compile", "model:attention"
WORKERS, PREFETCH = "loader:num_workers", "loader:prefetch_factor"
PINNED, PERSISTENT = "loader:pin_memory", "loader:persistent_workers"
FUSED = "optimizer:fused"

FORESEEN = (CHECKPOINTING, ATTENTION, COMPILE)
"""The switches whose memory and time are foreseen. A compiled model runs as it is written, and its kernels are fused
afterwards (`trial_lib/plan/step_time.py`)."""

BESIDE = {"ddp": "engine:ddp", "fsdp2": "engine:fsdp2"}
"""Trainings without DeepSpeed, by the switch with which a rank trains so. No search varies them: trials that confirm
the winner measure them beside it."""

# The module of torch that a rank imports to compile a model. It takes a second or two.
COMPILER = "torch._inductor.compile_fx"

# Options of a Hugging Face Trainer's program that set the switches of a loader that the Trainer makes.
LOADER_OPTIONS = {place: f"--dataloader_{place.partition(':')[2]}" for place in (WORKERS, PREFETCH, PINNED, PERSISTENT)}

COMPILE_OPTION = "--torch_compile"  # the option of a Hugging Face Trainer's program that compiles the model
COMPILE_PLACES = (COMPILE, COMPILE_OPTION)  # the switches that are known to compile the model
OPTIMIZER_OPTION = "--optim"  # the option that sets the form of an Adam that the Trainer makes

# All options of a Hugging Face Trainer's program that set such switches, if its parser has them.
TRAINER_OPTIONS = (
    "--activation_checkpointing",
    "--attn_implementation",
    "--gradient_checkpointing",
    "--gradient_checkpointing_kwargs",
    COMPILE_OPTION,
    OPTIMIZER_OPTION,
    *LOADER_OPTIONS.values(),
)

TURNED_PLACE = r"(model|loader|optimizer):[a-z_]+"  # how such a switch is written


@dataclass(frozen=True)
class TurnedSwitch:
    # The values that a search tries if the user names none. The program decides which of them it can have.
    values: tuple[Any, ...]
    coarse: bool = True  # whether it decides memory, and so the arm of a candidate
    any_number: bool = False  # whether every whole number from 0 on is a value as well

    def has(self, value: Any) -> bool:
        if self.any_number and isinstance(value, int) and not isinstance(value, bool):
            return value >= 0
        return any(type(known) is type(value) and known == value for known in self.values)


# The switches by name.
TURNED: dict[str, TurnedSwitch] = {
    CHECKPOINTING: TurnedSwitch(("none", "full", "every_second")),
    COMPILE: TurnedSwitch((False, True)),
    ATTENTION: TurnedSwitch(("eager", "sdpa", "flash_attention_2")),
    # Only a program that waits for its loader has these, and then workers are the best guess. Few values keep a search
    # short.
    WORKERS: TurnedSwitch((4, 1, 0), coarse=False, any_number=True),
    PREFETCH: TurnedSwitch((2, 4, 8), coarse=False, any_number=True),
    PINNED: TurnedSwitch((True, False), coarse=False),
    PERSISTENT: TurnedSwitch((False, True), coarse=False),
    FUSED: TurnedSwitch((True, False), coarse=False),
}


def is_turned(place: str) -> bool:
    return place in TURNED


def is_by_rank(place: str) -> bool:
    """Whether a rank sets a switch, and not the program's command."""
    return is_turned(place) or place in BESIDE.values()


def beside_kind(switches: Mapping[str, Any]) -> str:
    """What takes DeepSpeed's place, as in `BESIDE`; empty if DeepSpeed trains."""
    return next((kind for kind, place in BESIDE.items() if switches.get(place)), "")


def turned_among(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the switches that a rank has to turn. One whose value is None stays as it is in the program."""
    return {place: value for place, value in switches.items() if is_by_rank(place) and value is not None}


def in_command(switches: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the switches that have a place in the program's command."""
    return {place: value for place, value in switches.items() if not is_by_rank(place)}


def compiles(switches: Mapping[str, Any]) -> bool:
    """Whether a known switch, of ZeroTune or of a Trainer's program, compiles the model. Values may be text."""
    return any(str(switches.get(place)).lower() == "true" for place in COMPILE_PLACES)


def settings_of(owner: str, turned: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of `loader` or `optimizer` among some switches, by the names that torch has for them."""
    names = (place.partition(":") for place in turned)
    return {name: turned[f"{of}:{name}"] for of, _, name in names if of == owner}


def turned_word(place: str, value: Any) -> str:
    """Returns the word for such a switch in the name of a candidate. It is empty for one that is off."""
    name = place.partition(":")[2].replace("_", "-")
    if value in (None, False, "none"):
        return ""
    return name if value is True else f"{name}={value}"
