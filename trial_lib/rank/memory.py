"""The memory of a rank, its precision, and whether the next size of a sweep will fit."""

import re
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch

from zerotune.trial_lib.messages.measurement import Memory
from zerotune.trial_lib.rank.device import Device, device_of, device_to_come


class RankMemory:
    """Follows the memory of a rank whose engine is measured."""

    def __init__(self) -> None:
        self._basis: RankMemory | None = None
        self.after_initialize = 0  # bytes in use when the engine had just been built
        self._budget: int | None = None
        self._available: int | None = None
        self._initialize_peak = self._peak = 0
        self._retries_before = 0
        self._final: Memory | None = None

    def begin(self, budget: int | None) -> None:
        """Applies the memory limit to the process from now on, if there is one. UnknownDeviceError: see `device_of`."""
        device = device_to_come()
        self._budget = None if budget is None else device.limit(budget)

    def engine_built(self, device: Device) -> None:
        self._initialize_peak = self._peak = device.peak_bytes()
        self._available = device.available_bytes()
        self.after_initialize = device.used_bytes()
        if self._basis is not None:
            self._available, self.after_initialize = self._basis._available, self._basis.after_initialize
        device.forget_peak()
        self._retries_before = _retries(device)
        if self._budget is not None:
            device.keep_what_is_freed()

    def count_from(self, first: "RankMemory") -> None:
        """Counts from the initialisation of another engine of this process, which is about to be built.

        If a program compiles, its first steps bring the compiler into the process. Fresh ranks count that as memory of
        the steps, and so does each later run in the same process.
        """
        self._basis = first

    def taken_over(self) -> "RankMemory":
        """The memory of the same engine's next measurement, counted from its initialisation, as in fresh ranks."""
        memory = RankMemory()
        memory.after_initialize, memory._budget = self.after_initialize, self._budget
        memory._available, memory._initialize_peak = self._available, self._initialize_peak
        memory._peak = self._initialize_peak
        return memory

    def step_ended(self, device: Device, counts: bool) -> None:
        """Records the peak so far, after each step. `counts`: it is no warm-up.

        At the end, a CPU's process may also hold memory of files that it has read, which is no part of the steps' peak.
        """
        if not counts:
            self._retries_before = _retries(device)
        self._peak = max(self._peak, device.peak_bytes())

    def slot_bytes(self, device: Device) -> int:
        return device.total_bytes() if self._budget is None else self._budget

    def end(self, device: Device) -> None:
        """Ignores memory from now on, because it is not the training's own."""
        self._final = self.figures(device)

    def figures(self, device: Device) -> Memory:
        if self._final is not None:
            return self._final
        found = {"peak": max(device.peak_bytes(), self._peak), "after_initialize": self.after_initialize}
        if self._available is not None:
            found["available"] = self._available
        if of_allocator := device.allocator_figures():
            left = device.left_bytes()
            may_have = min(left["free"] + left["reserved"], device.total_bytes())
            found |= of_allocator
            found["steps_peak"] = device.peak_bytes()
            found["counted_retries"] = of_allocator["allocator_retries"] - self._retries_before
            found["least_free"] = max(0, may_have - of_allocator["peak_reserved"])
        return Memory(**{name: [figure] for name, figure in found.items()})


def _retries(device: Device) -> int:
    return device.allocator_figures().get("allocator_retries", 0)


# The precision in which an engine keeps its model and computes


def settled(engine: Any) -> dict[str, Any]:
    """The engine's values for keys that may be "auto", as a part of a configuration.

    Only keys that the Hugging Face Trainer and Accelerate fill in from their own arguments, or from the model, are
    included: they are the same for every candidate. Other "auto" values differ from stage to stage.
    """
    half = {"fp16": engine.fp16_enabled(), "bf16": engine.bfloat16_enabled(), "bfloat16": engine.bfloat16_enabled()}
    # DeepSpeed 0.19.8 does not support apex any more.
    sections = {**half, "amp": getattr(engine, "amp_enabled", bool)()}
    return {
        **{name: {"enabled": bool(enabled)} for name, enabled in sections.items()},
        "zero_optimization": {"reduce_bucket_size": int(engine.zero_reduce_bucket_size())},
    }


# What DeepSpeed prints, profiles or writes, what it derives, and what it knows of its processes.
_NOT_OF_TRAINING = re.compile(
    r"^_|print|dump|log|monitor|profiler|autotuning|comms_config|breakdown|mesh|checkpoint_|world|rank|timers|datastates|"
    r"nebula|elasticity|python_gc|node_local|nvme_path"
)


def in_force(engine: Any) -> dict[str, Any]:
    """The engine's whole configuration, with DeepSpeed's defaults, as plain values: whatever decides a training."""
    found: dict[str, Any] = _plain(vars(engine._config)) if hasattr(engine, "_config") else {}
    return found


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, Mapping):
        if value.get("device") == "none":
            return None  # an offload that Accelerate and presets write out, and that is none
        return {str(key): _plain(each) for key, each in value.items() if not _NOT_OF_TRAINING.search(str(key))}
    if isinstance(value, list | tuple | set):
        return [_plain(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | int | float):
        return value
    if type(value).__module__ == "torch":
        return str(value)
    # What others have put there, such as an `mpu`, may hold the model, and lead back to itself.
    is_deepspeeds = type(value).__module__.partition(".")[0] == "deepspeed" and hasattr(value, "__dict__")
    return _plain(vars(value)) if is_deepspeeds else type(value).__name__


def formats(engine: Any) -> set[str]:
    """Number formats that an engine shows now: its parameters' formats, those of autocast, and TF32."""
    found = names(parameter.dtype for parameter in engine.module.parameters())
    kind = engine.device.type
    if torch.is_autocast_enabled(kind):
        found |= names([torch.get_autocast_dtype(kind)])
    return found | ({"tf32"} if device_of(engine.device).multiplies_in_tf32(engine.module) else set())


def names(dtypes: Iterable[torch.dtype]) -> set[str]:
    """Names of the floating-point types, such as `bfloat16`."""
    return {str(dtype).removeprefix("torch.") for dtype in dtypes if dtype.is_floating_point}


def bytes_by_code(engine: Any) -> int | None:
    """The mean bytes of a parameter as the code has made it; None if the configuration decides."""
    if engine.fp16_enabled() or engine.bfloat16_enabled():
        return None
    sizes = [(parameter.element_size(), elements(parameter)) for parameter in engine.module.parameters()]
    count = sum(number for _, number in sizes)
    return max(1, round(sum(size * number for size, number in sizes) / count)) if count else None


def elements(parameter: torch.nn.Parameter) -> int:
    """The elements of a parameter, also of one that ZeRO 3 has partitioned."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
