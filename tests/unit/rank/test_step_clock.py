"""Steps are timed as a training takes them: while the device works, the program goes on."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from zerotune.trial_lib.rank.counted_steps import CountedStep, CountedSteps
from zerotune.trial_lib.rank.engine_watch import PARTS, PartTimer, StepClock

LOAD_S, LAUNCH_S = 0.020, 0.005


@dataclass
class Clock:
    """A program and its device, by a clock that only they move.

    Attributes:
        now: of the program, in seconds.
        free_at: when the device has done what it was given.
        is_apart: see `Device`.
    """

    is_apart: bool = True
    now: float = 0.0
    free_at: float = 0.0
    waits: int = 0
    kind: str = field(default="toy")

    def program_works(self, seconds: float) -> None:
        self.now += seconds

    def give(self, seconds: float) -> None:
        """Gives work to the device, or does it where there is none apart."""
        self.free_at = max(self.free_at, self.now) + seconds
        if not self.is_apart:
            self.now = self.free_at

    def finish(self) -> None:
        self.waits += 1
        self.now = max(self.now, self.free_at)

    def instant(self) -> float:
        return max(self.now, self.free_at) if self.is_apart else self.now

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    def is_recording(self) -> bool:
        return False


def train(clock: Clock, work_s: float) -> None:
    """Takes one step: loads a batch, gives a forward pass and the rest to the device."""
    clock.program_works(LOAD_S)
    for _ in range(3):
        clock.program_works(LAUNCH_S)
        clock.give(work_s / 3)


def plain(is_apart: bool, work_s: float, steps: int = 50) -> float:
    """Returns the seconds of a step of a long training that nobody looks at."""
    clock = Clock(is_apart)
    for _ in range(steps):
        train(clock, work_s)
    clock.finish()
    return clock.now / steps


def counted(clock: Clock, work_s: float, steps: int, agree_after: tuple[int, ...]) -> CountedSteps:
    """Counts steps as a rank does, which agrees with the others after some of them."""
    watch = SimpleNamespace(
        engine=SimpleNamespace(
            dp_world_size=1, train_micro_batch_size_per_gpu=lambda: 1, gradient_accumulation_steps=lambda: 1
        ),
        samples_in=lambda arrived: 1.0,
    )
    found, clock_of_steps = CountedSteps(), StepClock(clock)
    parts = PartTimer(clock)
    step = parts.timed("step", lambda: train(clock, work_s))
    step()
    parts.take()
    clock_of_steps.mark()
    while len(found) < steps:
        step()
        if found.add(CountedStep(clock_of_steps.step_ended(parts.take()), {}), None) and len(found) in agree_after:
            found.agree(watch)
        clock_of_steps.mark()
    found.agree(watch)
    return found


@pytest.mark.parametrize("work_s", [0.005, 0.030, 0.200])
@pytest.mark.parametrize("agree_after", [(), (3,), (3, 4, 5, 6, 7)])
def test_a_step_takes_what_it_takes_in_a_plain_training(work_s: float, agree_after: tuple[int, ...]) -> None:
    found = counted(Clock(), work_s, 10, agree_after)
    assert found.slowest == pytest.approx([plain(is_apart=True, work_s=work_s)] * 10, rel=0.02)


def test_nothing_waits_for_the_device_between_decisions() -> None:
    clock = Clock()
    counted(clock, 0.030, 10, agree_after=(3, 6))
    # Two decisions, and the last one.
    assert clock.waits == 3


def test_on_a_cpu_every_step_counts_as_it_comes() -> None:
    clock = Clock(is_apart=False)
    found = counted(clock, 0.030, 10, agree_after=(3, 4, 5))
    assert found.slowest == pytest.approx([LOAD_S + 3 * LAUNCH_S + 0.030] * 10)
    assert clock.now == pytest.approx(11 * (LOAD_S + 3 * LAUNCH_S + 0.030))


def test_a_part_is_the_sum_of_its_calls() -> None:
    clock = Clock(is_apart=False)
    parts = PartTimer(clock)
    forward = parts.timed("forward", lambda: clock.program_works(0.5))
    clock_of_steps = StepClock(clock)
    forward()
    forward()
    seconds = clock_of_steps.step_ended(parts.take()).seconds()
    assert (seconds["forward"], seconds["backward"]) == (1.0, 0.0)
    assert clock_of_steps.step_ended(parts.take()).seconds()["forward"] == 0.0


def test_what_is_recorded_for_later_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(clock, "is_recording", lambda: True)
    parts = PartTimer(clock)
    assert parts.timed("forward", lambda: "done")() == "done"
    assert parts.take() == {part: [] for part in PARTS}
