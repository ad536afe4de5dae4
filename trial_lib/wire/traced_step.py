"""Where the time of an optimizer step goes: the parts of a step that was traced. It needs only the standard library."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

TRACE = "trace"
"""The phase of a trial in which its steps are traced."""

STEP_PARTS = (
    "compute",
    "gathering",
    "reducing",
    "exchanging",
    "update",
    "host_update",
    "transfers",
    "disk",
    "data",
    "launches",
    "other",
)
"""The parts of a step. A plan names its parts alike; `other` is known only to a trace.

`compute`: forward and backward passes. `gathering`: waiting for parameters. `reducing`: waiting for sums of gradients.
`exchanging`: waiting for activations of other ranks. `update`: the optimizer on the device. `host_update`: the
optimizer on the host. `transfers`: waiting for copies between host and device. `disk`: waiting for NVMe drives. `data`:
waiting for a batch of a data loader. `launches`: the device waits for the host to issue work. `other`: the program does
something else.
"""


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """An optimizer step that was traced, as the mean over ranks and steps.

    Attributes:
        seconds: of the step, with the profiler's own cost.
        parts: seconds by the names of `STEP_PARTS`. They add up to `seconds`.
        steps: how many were traced. 0 if none could be.
        spent: seconds that the tracing took, its steps included.
        failure: why nothing was traced, in a sentence. Empty if it was.
    """

    seconds: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    steps: int = 0
    spent: float = 0.0
    failure: str = ""

    @property
    def shares(self) -> dict[str, float]:
        """The parts as shares of the step, in the order of `STEP_PARTS`; empty without a trace."""
        if self.seconds <= 0:
            return {}
        return {part: self.parts[part] / self.seconds for part in STEP_PARTS if self.parts.get(part)}

    def to_json(self) -> dict[str, Any]:
        """Returns plain data that JSON can hold."""
        return asdict(self)
