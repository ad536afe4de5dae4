"""What a driver asks of a probe."""

from dataclasses import dataclass, field
from typing import Any

from trial_lib.measure.batches.batch_source import BatchSource
from trial_lib.wire.arrival import Arrival
from trial_lib.wire.step_window import StepWindow


@dataclass(frozen=True)
class ProbeSettings:
    """What a driver asks of the probe.

    Attributes:
        overrides: the candidate's part of the DeepSpeed configuration. What stands in for DeepSpeed's functions reads
            this one mapping: another candidate's are put into it.
        window: the steps to measure.
        memory_limit: bytes that the rank may use of its slot; None for all of it.
        with_profile: whether to profile the model too.
        batch_source: where the program may have its batch size from.
        to_beat: the best throughput so far, in samples/s over all ranks: a trial that cannot reach it any more ends.
            None to measure to the end.
        longest_sequence: tokens in a sample of the longest batch of the data, on which a step of the warm-up is to
            train; None for batches as they come.
        flops_per_sample: FLOPs that a sample counts for; None for a profile, which counts them.
        formats: as `CountedSteps.metrics` has them.
        arrival: how samples show in the batches that arrive.
        as_typed: whether the program runs as it was typed to show facts that only such a run shows.
    """

    overrides: dict[str, Any]
    window: StepWindow
    memory_limit: int | None
    with_profile: bool
    batch_source: BatchSource
    to_beat: float | None = None
    longest_sequence: int | None = None
    flops_per_sample: float | None = None
    formats: tuple[str, ...] | None = None
    arrival: Arrival = field(default_factory=Arrival)
    as_typed: bool = False
