"""The layout of a configuration: the ranks that hold one replica of the model together. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AUTOTP = "tensor_parallel.autotp_size"
SEQUENCE = "sequence_parallel_size"

GROUPS = {AUTOTP: "tensor-parallel", SEQUENCE: "sequence"}
"""The settings that divide the ranks into groups, with the word for a group. A group holds one replica of the model."""


def group_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of the groups that a DeepSpeed configuration asks for, by setting. A group of one is none."""
    sizes = {path: _size(config, path) for path in GROUPS}
    return {path: size for path, size in sizes.items() if size is not None and size > 1}


def ranks_of_a_replica(config: Mapping[str, Any]) -> int:
    """Returns the ranks that hold one replica of the model together, as far as the configuration says so."""
    ranks = 1
    for size in group_sizes(config).values():
        ranks *= size
    return ranks


@dataclass(frozen=True)
class Replicas:
    """The model replicas of each candidate of a study.

    The profile trial counts those of the user's configuration. The program may divide its ranks too, such as among the
    stages of a pipeline. So a candidate has them by its groups beside the user's.

    Attributes:
        slots: devices of a trial.
        own: replicas with the user's configuration.
        base_config: the user's DeepSpeed configuration.
    """

    slots: int
    own: int
    base_config: Mapping[str, Any]

    def of(self, settings: Mapping[str, Any]) -> int:
        """Returns the replicas of a candidate. If its groups do not divide the devices, some devices have no replica.

        Args:
            settings: its knobs or its complete configuration, in sections or by path.
        """
        ranks, others = 1, max(1, self.slots // self.own)
        for path in GROUPS:
            base = _size(self.base_config, path) or 1
            own = _size(settings, path)
            ranks *= base if own is None else max(1, own)
            # A group of the configuration that the engine does not have is none.
            others = others // base if others % base == 0 else others
        return max(1, self.slots // (ranks * others))


def _size(settings: Mapping[str, Any], path: str) -> int | None:
    """Returns the size of a group; None if the settings leave it open."""
    value: Any = settings
    for key in [path] if path in settings else path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value if isinstance(value, int) and not isinstance(value, bool) else None
