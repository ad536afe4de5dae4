"""What earlier studies have measured of a kind of device: the constants of its foreseen time."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_lib.foresee.time.efficiencies import Efficiencies
from trial_lib.records.frozen_record import FrozenRecord
from trial_lib.records.study_folder import StudyPaths


class DeviceSpeed(FrozenRecord):
    """The constants of one kind of device, learned from the trials of a study.

    Attributes:
        study_id: of the study.
        device: the name of the kind, as `--on` has it.
        ended_at: when the study had ended, in seconds since the epoch.
        steps: measured configurations that they were learned from.
        efficiencies: the constants (`Efficiencies` as JSON).
    """

    study_id: str
    device: str
    ended_at: float
    steps: int
    efficiencies: dict[str, Any]

    @property
    def constants(self) -> Efficiencies:
        """The constants themselves."""
        return Efficiencies.from_json(self.efficiencies)

    @property
    def sentence(self) -> str:
        """Where speeds come from that were foreseen with these constants."""
        steps = "one configuration" if self.steps == 1 else f"{self.steps} configurations"
        return f"Speeds on {self.device} come from {steps} that the study {self.study_id} has measured on it."


def read_device_speed(file: Path) -> DeviceSpeed | None:
    """Returns what a study has learned of its devices; None if it has learned nothing, or the file is damaged."""
    try:
        found = DeviceSpeed.model_validate_json(file.read_text(encoding="utf-8"))
        found.constants  # noqa: B018 - a file of another version has other constants
    except (OSError, ValueError, TypeError):
        return None
    return found


def device_speeds(studies: Path) -> Mapping[str, DeviceSpeed]:
    """Returns what the latest study of each kind of device has learned, by the kind's name.

    Args:
        studies: the folder that contains the studies.
    """
    found = [read_device_speed(StudyPaths(root).device_speed) for root in sorted(studies.glob("*"))]
    in_order = sorted((each for each in found if each is not None), key=lambda each: each.ended_at)
    return {each.device: each for each in in_order}
