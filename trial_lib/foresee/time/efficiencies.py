"""How much of a data sheet's figures a training gets, with what is unknown about it.

These are the learned constants of the foreseen time, with `attained` of a few devices in `devices.yaml`. Each is one
number for all devices and models. `benchmarks/foresee/public_gpus` has the measurements that they come from.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from trial_lib.records.frozen_record import FrozenRecord
from trial_lib.records.study_folder import StudyPaths


@dataclass(frozen=True)
class Constant:
    """A positive number that is not known exactly.

    Attributes:
        value: its median.
        spread: the standard deviation of its logarithm, from device to device and model to model.
    """

    value: float
    spread: float


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """The constants of the foreseen time. Shares are of the data sheet's figure.

    Attributes:
        matmul: share of the peak FLOP/s that products of matrices get, convolutions included.
        attention: share of it that fused causal attention seems to get, as FLOPs of the model count. It computes half.
        memory: share of the memory's bandwidth that all other operations get.
        link: share of the links within a host that collectives get.
        network: share of the network.
        to_host: share of the link to the host.
        host_update: share of the host's memory bandwidth that DeepSpeed's CPU Adam gets.
        disk: share of the figure of NVMe drives. The figure itself is assumed, so nearly nothing is known of it.
        launch: seconds in which the host issues an operation.
        collective: seconds in which the host issues a collective.
        module: seconds of the hooks with which stage 3 surrounds each module, forward or backward.
        whole: what all of this leaves out. Its value multiplies a step.
        measured: steps that it was refitted to; 0 for the defaults.
        device: that the steps are of; empty for the defaults, and for several kinds.
    """

    matmul: Constant = Constant(0.62, 0.12)
    attention: Constant = Constant(0.81, 0.3)
    memory: Constant = Constant(0.83, 0.12)
    link: Constant = Constant(0.56, 0.25)
    network: Constant = Constant(0.42, 0.35)
    to_host: Constant = Constant(0.76, 0.3)
    # The public rows say 0.12. A host with 16 cores for one H200 was 8 times as fast (`benchmarks/gpu`).
    host_update: Constant = Constant(0.12, 1.2)
    disk: Constant = Constant(1.0, 0.9)
    launch: Constant = Constant(8e-6, 0.3)
    collective: Constant = Constant(5e-5, 0.3)
    module: Constant = Constant(2.9e-4, 0.4)
    whole: Constant = Constant(1.0, 0.36)
    measured: int = 0
    device: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Efficiencies":
        """Returns what `to_json` wrote. A constant that an older file lacks has its default.

        Raises:
            TypeError: a key is unknown.
        """
        values: dict[str, Any] = {
            key: Constant(**value) if isinstance(value, Mapping) else value for key, value in plain.items()
        }
        return cls(**values)

    def changed(self, logarithms: Mapping[str, float]) -> "Efficiencies":
        """Returns these constants, each multiplied by the exponential of its entry."""
        values: dict[str, Any] = {
            name: Constant(getattr(self, name).value * math.exp(shift), getattr(self, name).spread)
            for name, shift in logarithms.items()
        }
        return replace(self, **values)


CONSTANTS = tuple(each.name for each in fields(Efficiencies) if each.name not in ("measured", "device"))
"""The names of all constants."""


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
