"""Offload of the optimizer and of parameters."""

from collections.abc import Mapping
from typing import Any

from trial_lib.space.effects import STAGE_1_2, STAGE_3, Effect, KnownKnob, Surroundings, switch
from trial_lib.space.knobs import get_knob

OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
OFFLOAD_PARAM = "zero_optimization.offload_param.device"
OFFLOADED = ("cpu", "nvme")
_DEVICES = ("none", "cpu", "nvme")


def nvme_path(base_config: Mapping[str, Any]) -> str | None:
    """Returns the NVMe device of the user's configuration; None if it names none."""
    sections = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
    paths = (get_knob(base_config, f"{section}.nvme_path") for section in sections)
    return next((str(path) for path in paths if path), None)


def _cpu(here: Surroundings, own: Any) -> tuple[str, ...]:
    return "none", "cpu"


def _cpu_or_nvme(here: Surroundings, own: Any) -> tuple[str, ...]:
    return _DEVICES if nvme_path(here.base_config) else ("none", "cpu")


def _own(here: Surroundings, own: Any) -> tuple[str, ...]:
    """Varies the user's own offload and nothing else. On a CPU it runs, and gains nothing."""
    return ("none", own) if own in OFFLOADED else ()


OFFLOAD: dict[str, KnownKnob] = {
    OFFLOAD_OPTIMIZER: KnownKnob(
        _DEVICES,
        (
            Effect(f"{STAGE_1_2} cpu_offload", (1, 2), ("cuda",), values=("none", "cpu"), candidates=_cpu),
            Effect(f"{STAGE_3} _configure_offloading", (3,), ("cuda",), candidates=_cpu_or_nvme),
            Effect(f"{STAGE_1_2} cpu_offload", (1, 2), ("cpu",), values=("none", "cpu"), candidates=_own),
            Effect(f"{STAGE_3} _configure_offloading", (3,), ("cpu",), candidates=_own),
        ),
        default="none",
        is_coarse=True,
    ),
    OFFLOAD_PARAM: KnownKnob(
        _DEVICES,
        (
            Effect(f"{STAGE_3} _configure_offloading", (3,), ("cuda",), candidates=_cpu_or_nvme),
            Effect(f"{STAGE_3} _configure_offloading", (3,), ("cpu",), candidates=_own),
        ),
        default="none",
        is_coarse=True,
    ),
    "zero_optimization.offload_optimizer.pin_memory": KnownKnob(
        "switch",
        # accelerator/cpu_accelerator.py pin_memory does nothing on a CPU.
        (
            Effect(
                f"{STAGE_1_2} cpu_offload_pin_memory, {STAGE_3} offload_optimizer_pin_memory",
                (1, 2, 3),
                ("cuda",),
                when={OFFLOAD_OPTIMIZER: OFFLOADED},
                candidates=switch(True),
            ),
        ),
        word="pinned-optimizer",
    ),
    "zero_optimization.offload_param.pin_memory": KnownKnob(
        "switch",
        (
            Effect(
                "zero/partition_parameters.py _partition_param",
                (3,),
                ("cuda",),
                when={OFFLOAD_PARAM: OFFLOADED},
                candidates=switch(True),
            ),
        ),
        word="pinned-parameters",
    ),
}
