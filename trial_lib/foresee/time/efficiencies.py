"""How much of a data sheet's figures a training gets, with what is unknown about it. Pure.

These are the learned constants of the foreseen time, with `attained` of a few devices in `devices.yaml`. Each is one
number for all devices and models. `benchmarks/foresee/public_gpus` has the measurements that they come from.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any


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
        attention: share of it that fused attention gets.
        memory: share of the memory's bandwidth that all other operations get.
        link: share of the links within a host that collectives get.
        network: share of the network.
        to_host: share of the link to the host.
        host_update: share of the host's memory bandwidth that DeepSpeed's CPU Adam gets.
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
    host_update: Constant = Constant(0.12, 0.5)
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
