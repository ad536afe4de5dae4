"""What the memory of a program's candidates follows from, before any trial."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trial_lib.command.switches import switches_of
from trial_lib.deepspeed_config.layout import LAYOUTS, PROGRAM
from trial_lib.memory.foreseen_bytes import ForeseenArm
from trial_lib.records.result import ModelProfile
from trial_lib.wire.turned import COMPILE_PLACES


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
        """The foreseen arms, each in the layout of the command as typed, which no foreseen run changes.

        On a CPU the compiler stays in the resident memory of a rank. No foreseen run has it, so the arms do not say
        there whether they are compiled.
        """
        layouts = self.base_config.get(LAYOUTS) or {}
        typed = {place: switches_of(self.base_config).get(place) for place in layouts}
        hidden = frozenset(COMPILE_PLACES if self.device == "cpu" else ())

        def shown(arm: ForeseenArm) -> ForeseenArm:
            switches = switches_of(arm.ds_config)
            if not layouts and not hidden & switches.keys():
                return arm
            seen = {place: value for place, value in switches.items() if place not in hidden}
            groups = {LAYOUTS: layouts} if layouts else {}
            return replace(arm, ds_config={**arm.ds_config, PROGRAM: {**typed, **seen}, **groups})

        return tuple(map(shown, self.foreseen))
