"""The clock: a trial's steps take what the same steps take in a training that nobody watches."""

import math
import statistics
from typing import Any

from benchmarks.gpu.kit import Kit, Shape
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.messages.orders import StepWindow

# Of the training's time, by the geometric mean of the pairs, beside twice their standard error.
MOST_OFF = 0.02
# How much a card that gets warm may lose in minutes before a window of half a second tells nothing of a training.
MOST_LOST = 0.03


def run(kit: Kit) -> None:
    shape = kit.shape("125m")
    pairs, steps, seconds = (10, 60, 60.0) if kit.is_cuda else (2, 16, 5.0)
    for micro_batch in (1, 16) if kit.is_cuda else (1, 4):
        beside(kit, shape, micro_batch, pairs, steps)
    warms_up(kit, shape, seconds)
    first_steps(kit, shape)


def beside(kit: Kit, shape: Shape, micro_batch: int, pairs: int, steps: int) -> None:
    """Lets trials and plain trainings run in turn; either comes first in every other pair."""
    config = kit.config() | {"train_micro_batch_size_per_gpu": micro_batch}
    window = StepWindow(start_step=11, end_step=steps, max_steps=steps)
    ratios: list[float] = []
    read: list[tuple[float, float]] = []
    for number in range(pairs):
        trial, plain = math.nan, math.nan
        for turn in (0, 1):
            if turn == number % 2:
                result = kit.run(shape, micro_batch=micro_batch, window=window)
                trial = statistics.fmean(result.step_times) if result.step_times else math.nan
            else:
                plain = kit.train(shape, config=config, steps=steps)["seconds_per_step"]
        read.append((trial, plain))
        if trial == trial and plain == plain:
            ratios.append(math.log(trial / plain))
        kit.report.figure(f"micro-batch {micro_batch}: seconds a step in a trial and in a training", read)
    name = f"micro-batch {micro_batch}: a trial's step takes what a training's does"
    if not ratios:
        kit.report.check(name, False, "no pair was measured")
        return
    ratio = math.exp(statistics.fmean(ratios))
    error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else 0.0
    kit.report.figure(f"micro-batch {micro_batch}: ratio", {"ratio": ratio, "standard_error": error})
    said = f"{ratio:.4f} of it, standard error {error:.4f}, {len(ratios)} pairs"
    if kit.is_cuda:
        kit.report.check(name, abs(ratio - 1) <= MOST_OFF + 2 * error, said)
    else:
        # Of a toy's milliseconds most is what starts them.
        kit.report.leave_out(name, f"a toy on a busy processor: {said}")


def warms_up(kit: Kit, shape: Shape, seconds: float) -> None:
    """Holds the first second of a training, past its first steps, against the last of some minutes."""
    config = kit.config() | {"train_micro_batch_size_per_gpu": 16 if kit.is_cuda else 1}
    before = kind_of(kit.host.device).load(kit.host, kit.host.slots[:1])
    found = kit.train(shape, "--seconds", str(seconds), config=config, steps=100_000)
    ends = found["ends"][10:]
    rates = per_second(ends)
    kit.report.figure("steps in each second of a training", rates)
    kit.report.figure("load before and after", [before, kind_of(kit.host.device).load(kit.host, kit.host.slots[:1])])
    if len(rates) < 3:
        kit.report.leave_out("a training keeps its speed", f"{len(rates)} whole seconds were measured")
        return
    late = statistics.median(rates[-max(1, len(rates) // 4) :])
    said = f"{rates[0]} steps in the first second, {late} in a late one"
    if kit.is_cuda:
        kit.report.check("a training keeps the speed of its first second", late >= rates[0] * (1 - MOST_LOST), said)
    else:
        kit.report.leave_out("a training keeps the speed of its first second", f"a processor: {said}")


def per_second(ends: list[float]) -> list[int]:
    """Returns how many steps ended in each whole second since the first of them.

    A GPU is given work ahead of what it has done: by a second's end, by a few steps at most.
    """
    if not ends:
        return []
    whole = int(ends[-1] - ends[0])
    return [sum(number <= end - ends[0] < number + 1 for end in ends) for number in range(whole)]


def first_steps(kit: Kit, shape: Shape) -> None:
    """Writes down the first ten steps of what takes some to get going: which of them would a window of three hold?"""
    window = StepWindow(start_step=1, end_step=10, max_steps=10)
    backend = [] if kit.is_cuda else ["--backend", "aot_eager"]
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "compiled": {"options": ["--compile", "module", *backend]},
        "stage 3": {"knobs": {"zero_optimization": {"stage": 3}}},
        "sequences of many lengths": {"options": ["--varies"]},
    }
    for name, case in cases.items():
        options = case.pop("options", [])
        result = kit.run(shape, *options, micro_batch=4, window=window, **case)
        if not kit.report.check(f"first steps, {name}: completes", bool(result.step_times), result.reason):
            continue
        times = result.step_times
        kit.report.figure(f"first steps, {name}, s", times)
        steady = statistics.median(times[-3:])
        late = [step for step, time in enumerate(times, start=1) if step >= 3 and time > 1.5 * steady]
        if kit.is_cuda:
            said = f"steps {late} take more than half as long again" if late else ""
            kit.report.check(f"first steps, {name}: from the third on they are a training's", not late, said)
