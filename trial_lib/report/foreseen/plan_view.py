"""A plan as its page shows it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trial_lib.report.study_view import Interval, SettingChange


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """The live bytes of one place during an optimizer step.

    Attributes:
        kinds: of memory, the bottom of the drawing first.
        events: number of each point, from the step's first event.
        bytes: of each kind at each point; as many as `events`.
        parts: the moments of the step, in order.
        peak: the index of the point with the most bytes.
        skipped: micro-batches between the first and the last one. They are left out.
    """

    kinds: tuple[str, ...]
    events: tuple[int, ...]
    bytes: tuple[tuple[float, ...], ...]
    parts: tuple["StepPart", ...]
    peak: int
    skipped: int = 0

    @property
    def most(self) -> float:
        """The live bytes at the peak."""
        return sum(self.bytes[self.peak])

    @property
    def peak_part(self) -> "StepPart":
        """The moment of the peak."""
        event = self.events[self.peak]
        return next((part for part in self.parts if part.start <= event < part.end), self.parts[-1])


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A moment of a step.

    Attributes:
        name: such as `forward`.
        micro_batch: of the step, from 0.
        start: number of its first event.
        end: number of the event after its last one.
    """

    name: str
    micro_batch: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ArmView:
    """One arm on one device, at the largest micro-batch that fits, or at one sample if none does.

    Attributes:
        name: such as `z3-offload-optimizer`.
        is_chosen: whether the plan's answer is this arm.
        is_own: whether it is the arm of the user's configuration.
        fits: the probability that this micro-batch fits.
        micro_batch: samples; 0 if not even one fits.
        accumulation: micro-batches of an optimizer step.
        samples_per_s: over all devices. None if no micro-batch fits.
        tokens_per_s: over all devices. None if the batches show no tokens.
        mfu: the share of the device's rate of dense products. None if that is not known.
        cost: of a billion tokens. None without a price or tokens.
        why: what bounds memory and speed, in a few words.
        peak: bytes on a device, all included.
        memory: bytes on a device by kind, at the moment of the peak.
        host: bytes that a rank keeps in the host's memory.
        seconds: of an optimizer step, by part. Parts that others hide count as far as they are seen.
        hidden_s: seconds of transfers that go on beside the computation.
    """

    name: str
    is_chosen: bool = False
    is_own: bool = False
    fits: float
    micro_batch: int
    accumulation: int = 1
    samples_per_s: Interval | None = None
    tokens_per_s: Interval | None = None
    mfu: float | None = None
    cost: float | None = None
    why: str = ""
    peak: Interval
    memory: Mapping[str, float] = field(default_factory=dict)
    host: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    hidden_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CountView:
    """The best arm on one number of devices.

    Attributes:
        devices: their number.
        arm: its name. Empty if no arm trains there.
        micro_batch: samples; 0 if no arm trains.
        fits: the probability that it fits.
        samples_per_s: over all devices. None if no arm trains.
        peak: bytes on a device: of that arm, or of the arm that needs least.
    """

    devices: int
    arm: str
    micro_batch: int
    fits: float
    samples_per_s: Interval | None
    peak: Interval


@dataclass(frozen=True, kw_only=True)
class TargetView:
    """One kind of device, in one number.

    Attributes:
        key: a word for addresses within the page, unique in it.
        name: for people, such as `8 × h100-80gb`.
        devices: their number.
        answer: a sentence.
        memory: bytes of one device that a process may use.
        currency: sign of the costs.
        arms: the table.
        fewest: the smallest number of these devices on which it trains. None if there is none.
        counts: by number of devices, ascending.
        line: the step of the chosen arm on a device; None if it was not foreseen.
        host_line: the same step in the host's memory; None if the arm keeps nothing there.
    """

    key: str
    name: str
    devices: int
    answer: str
    memory: float
    currency: str = "$"
    arms: tuple[ArmView, ...] = ()
    fewest: int | None = None
    counts: tuple[CountView, ...] = ()
    line: StepLine | None = None
    host_line: StepLine | None = None

    @property
    def chosen(self) -> ArmView | None:
        """The arm of the answer."""
        return next((arm for arm in self.arms if arm.is_chosen), None)


@dataclass(frozen=True)
class AskView:
    """A number that the program asked of memory without content.

    Attributes:
        asker: the function and its place.
        question: the operator.
        answer: what it got.
        count: of its asks.
    """

    asker: str
    question: str
    answer: str
    count: int


@dataclass(frozen=True, kw_only=True)
class PlanView:
    """A plan for people.

    Attributes:
        name: of the experiment.
        headline: the answer in a sentence.
        reason: why the program could not be foreseen; empty if it was.
        targets: the devices, that of the answer first.
        counts_say: what stays the same over the numbers of devices, in a sentence.
        best_command: to train with the answer. Empty without one.
        best_config: DeepSpeed's configuration of the answer.
        changes: its changes to the user's configuration.
        unknown: asks whose answers are guesses.
        known: asks whose answers are known.
        notes: sentences.
        facts: the circumstances by name.
        seconds: that the plan took.
    """

    name: str
    headline: str
    reason: str = ""
    targets: tuple[TargetView, ...] = ()
    counts_say: str = ""
    best_command: str = ""
    best_config: Mapping[str, Any] | None = None
    changes: tuple[SettingChange, ...] = ()
    unknown: tuple[AskView, ...] = ()
    known: tuple[AskView, ...] = ()
    notes: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
