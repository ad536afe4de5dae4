"""Offload of the optimizer and of parameters."""

import math
from collections.abc import Mapping
from typing import Any

from trial_lib.deepspeed_config.optimizers import is_deepspeeds_cpu_adam
from trial_lib.space.effects import STAGE_1_2, STAGE_3, Effect, Kind, KnownKnob, Surroundings, switch
from trial_lib.space.knobs import get_knob

OFFLOAD_OPTIMIZER = "zero_optimization.offload_optimizer.device"
OFFLOAD_PARAM = "zero_optimization.offload_param.device"
NVME_PATHS = ("zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path")
"""The NVMe device of the optimizer, and that of parameters. They may be two disks."""
OFFLOADED = ("cpu", "nvme")
KEPT_GATHERED = ("zero_optimization.stage3_max_live_parameters", "zero_optimization.stage3_max_reuse_distance")
"""What stage 3 keeps gathered. With parameters on NVMe, DeepSpeed 0.19.8 fails unless both are 0 (its issue 3062)."""
SUPER_OFFLOAD = "zero_optimization.offload_optimizer.super_offload"
_DEVICES = ("none", "cpu", "nvme")
_SWAPPER = "swap_tensor/pipelined_optimizer_swapper.py"
_BUFFER_COUNT = "zero_optimization.offload_optimizer.buffer_count"
# Two sub-groups, each with the master copy, two moments and the gradient.
_PIPELINED_BUFFERS = 8
_SUB_GROUP = 1_000_000_000  # DeepSpeed's default
_TO_CPU, _TO_NVME = {OFFLOAD_OPTIMIZER: ("cpu",)}, {OFFLOAD_OPTIMIZER: ("nvme",)}


def nvme_path(base_config: Mapping[str, Any]) -> str | None:
    """Returns the NVMe device of the user's configuration, the optimizer's if it names two; None if it names none."""
    paths = (get_knob(base_config, path) for path in NVME_PATHS)
    return next((str(path) for path in paths if path), None)


def _cpu(here: Surroundings, own: Any) -> tuple[str, ...]:
    return "none", "cpu"


def _cpu_or_nvme(here: Surroundings, own: Any) -> tuple[str, ...]:
    return _DEVICES if nvme_path(here.base_config) else ("none", "cpu")


def _own(here: Surroundings, own: Any) -> tuple[str, ...]:
    """Varies the user's own offload and nothing else. On a CPU it runs, and gains nothing."""
    return ("none", own) if own in OFFLOADED else ()


def _ratios(here: Surroundings, own: Any) -> tuple[float, ...]:
    # zero/stage3.py subgroup_to_device: whole sub-groups stay on the device, so a model of one has no choice.
    first = 1.0 if own is None else float(own)
    shard = here.trainable_num_params / here.replicas
    sub_groups = math.ceil(shard / (here.own("zero_optimization.sub_group_size") or _SUB_GROUP))
    others = [ratio for ratio in (0.75, 0.5, 0.25) if int((1 - ratio) * sub_groups) > 0]
    return tuple(dict.fromkeys((first, *others))) if others else ()


def _pipelined(place: str) -> Effect:
    return Effect(
        f"{_SWAPPER} {place}",
        (3,),
        when=_TO_NVME,
        holds=lambda here: (here.own(_BUFFER_COUNT) or 0) >= _PIPELINED_BUFFERS,
        otherwise=f"DeepSpeed fails with fewer than {_PIPELINED_BUFFERS} buffers (`buffer_count` of offload_optimizer)",
        candidates=switch(False),
    )


def _zenflow(key: str, kind: Kind) -> dict[str, KnownKnob]:
    """Returns a setting of ZenFlow (arXiv 2505.12242), whose section turns it on: it updates some gradients later."""
    source = "zenflow/zenflow_stage_1_and_2.py, zenflow/engine_stage3.py"
    effect = Effect(f"{source} {key}", (1, 2, 3), ("cuda",), when=_TO_CPU)
    known = KnownKnob(kind, (effect,), is_coarse=True, changes_mathematics=True, since="0.17.5")
    return {f"zero_optimization.zenflow.{key}": known}


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
    "zero_optimization.offload_optimizer.ratio": KnownKnob(
        "share",
        # On a CPU the device and the host are one.
        (
            Effect(
                f"{STAGE_3} subgroup_to_device",
                (3,),
                ("cuda",),
                when=_TO_CPU,
                holds=lambda here: is_deepspeeds_cpu_adam(here.base_config, here.code_optimizer),
                otherwise="DeepSpeed splits its own Adam only, by the configuration or as DeepSpeedCPUAdam",
                candidates=_ratios,
            ),
        ),
        since="0.12.3",
        word="offloaded",
    ),
    "zero_optimization.offload_optimizer.pipeline_read": KnownKnob(
        "switch",
        (_pipelined("async_swap_in"),),
        word="pipelined-read",
    ),
    "zero_optimization.offload_optimizer.pipeline_write": KnownKnob(
        "switch",
        (_pipelined("async_swap_out"),),
        word="pipelined-write",
    ),
    # It is made for a CPU and a GPU that share a fast link, and no fact of a trial tells of one.
    SUPER_OFFLOAD: KnownKnob(
        "switch",
        (Effect("superoffload/superoffload_stage3.py", (3,), ("cuda",), when=_TO_CPU),),
        default=False,
        is_coarse=True,
        since="0.18.0",
    ),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": KnownKnob(
        "share",
        (
            Effect(
                "superoffload/superoffload_utils.py _set_cpu_affinity",
                (3,),
                ("cuda",),
                when={**_TO_CPU, SUPER_OFFLOAD: (True,)},
            ),
        ),
        since="0.18.0",
        word="adam-cores",
    ),
    **_zenflow("topk_ratio", "share"),
    **_zenflow("update_interval", "count"),
    **_zenflow("select_interval", "count"),
    **_zenflow("overlap_step", "switch"),
    **_zenflow("full_warm_up_rounds", "count"),
    **_zenflow("select_strategy", ("auto", "step", "epoch")),
}
