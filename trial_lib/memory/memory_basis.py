"""What the memory of a program's candidates follows from, before any trial."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trial_lib.command.switches import switches_of
from trial_lib.deepspeed_config.layout import LAYOUTS, PROGRAM
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

    @property
    def arms(self) -> tuple[ForeseenArm, ...]:
        """The foreseen arms, each in the layout of the command as typed, which no foreseen run changes."""
        layouts = self.base_config.get(LAYOUTS) or {}
        typed = {place: switches_of(self.base_config).get(place) for place in layouts}
        if not layouts:
            return tuple(self.foreseen)
        return tuple(
            replace(
                arm, ds_config={**arm.ds_config, PROGRAM: {**typed, **switches_of(arm.ds_config)}, LAYOUTS: layouts}
            )
            for arm in self.foreseen
        )
