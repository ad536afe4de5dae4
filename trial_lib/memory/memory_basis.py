"""What the memory of a program's candidates follows from, before any trial."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trial_lib.memory.foreseen_bytes import ForeseenArm
from trial_lib.records.result import ModelProfile


@dataclass(frozen=True)
class MemoryBasis:
    """A model on some devices, which have a memory of their own and their host's.

    Attributes:
        profile: the model, the device and the host, as the profile trial found them.
        base_config: the user's DeepSpeed configuration, with which that trial ran.
        slots: devices of a trial.
        device: `cuda` or `cpu`.
        foreseen: arms that foreseen runs have found. Without any, formulas give all bytes.
    """

    profile: ModelProfile
    base_config: Mapping[str, Any]
    slots: int
    device: str
    foreseen: Sequence[ForeseenArm] = ()
