"""The order for a foreseen run. A rank imports this module, so it needs only the standard library."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trial_lib.wire.exact_record import exact_record
from trial_lib.wire.moments import HostMoment

CUDA_PACKAGES = ("bitsandbytes", "liger_kernel")
"""Packages whose code a foreseen run changes while it is loaded, so that no fork server may have imported them."""

DEVICE_NAME = "NVIDIA H100 80GB"
"""The device that a program finds, unless a plan asks for another one."""

CAPABILITY = 9.0
"""Its compute capability."""

BFLOAT16_SINCE = 8.0
"""The compute capability from which matrix units take bfloat16."""


@dataclass(frozen=True, kw_only=True)
class ForeseeOrder:
    """One run to foresee: the program, and the world that it is to find.

    Attributes:
        program: `{"script": path}` or `{"module": name}`.
        local_rank_option: as `RankOrder` has it.
        arguments: the program's command line.
        model_dir: the working directory.
        scratch: a folder that replaces the user's files for everything that the program would write.
        protected_before: seconds since the epoch. The rank never changes a file of the user's that is older.
        overrides: merged into the DeepSpeed configuration of the engine that trains.
        turned: the switches that the rank turns in the program, by name.
        varied_options: the options of the program that a search varies, with the values to try.
        world: ranks of the pretended world.
        ranks_per_host: of these, the ranks on one host.
        device_bytes: memory of the pretended device, for a program that asks.
        device_name: its name, likewise.
        capability: its compute capability, likewise. Some programs choose number formats and kernels by it.
        steps: optimizer steps after which the run ends.
        result: the file for the `ForeseenRun`.
        log: the file with the rank's output.
        launched_at: the moment of its launch.
        patience_s: seconds after which the rank records where the program is, and ends.
        hidden: as `RankOrder` has it.
    """

    program: dict[str, str]
    local_rank_option: str = ""
    arguments: list[str] = field(default_factory=list)
    model_dir: str
    scratch: str
    protected_before: float
    overrides: dict[str, Any] = field(default_factory=dict)
    turned: dict[str, Any] = field(default_factory=dict)
    varied_options: dict[str, list[Any]] = field(default_factory=dict)
    world: int
    ranks_per_host: int
    device_bytes: int
    device_name: str = DEVICE_NAME
    capability: float = CAPABILITY
    steps: int
    result: str
    log: str = ""
    launched_at: HostMoment
    patience_s: float = 600.0
    hidden: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "ForeseeOrder":
        """Returns the order that `to_json` wrote.

        Raises:
            ValueError: a key is missing or unknown.
        """
        return exact_record(cls, plain)
