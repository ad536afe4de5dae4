"""Sweeps: sizes that one process group measures one after another read what fresh processes read."""

import math
import statistics
from typing import Any

from benchmarks.gpu.kit import Kit
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.result import TrialResult

WINDOW = StepWindow(start_step=3, end_step=8, max_steps=20)
MOST_OFF_TIME, MOST_OFF_PEAK = 0.05, 0.05
# What each run of a program may leave behind, before a dozen of them would change what fits.
MOST_LEFT = 64 * 2**20


def run(kit: Kit) -> None:
    shape = kit.shape("125m")
    sizes = (1, 2, 4, 8, 16, 32) if kit.is_cuda else (1, 2, 4)
    compiled = ("--compile", "module", *(() if kit.is_cuda else ("--backend", "aot_eager")))
    ways: dict[str, dict[str, Any]] = {
        "a script that is run again": {},
        "a trial class": {"as_class": True},
        "a script, stage 3": {"knobs": {"zero_optimization": {"stage": 3}}},
        "a compiled model": {"options": compiled, "sizes": sizes[:3]},
    }
    for name, way in ways.items():
        sized, options = way.pop("sizes", sizes), way.pop("options", ())
        plans = [kit.plan(shape, *options, micro_batch=size, window=WINDOW, **way) for size in sized]
        ends = kit.sweep(plans)
        swept = {size: end for size, end in zip(sized, ends, strict=True) if isinstance(end, TrialResult)}
        outcomes = {size: str(getattr(end, "outcome", end)) for size, end in zip(sized, ends, strict=True)}
        kit.report.figure(f"{name}: outcomes", outcomes)
        bad = [f"{size}: {end.outcome.value} {end.reason}" for size, end in swept.items() if not end.metrics]
        kit.report.check(f"{name}: every size is measured", len(swept) == len(sized) and not bad, "; ".join(bad))
        left_behind(kit, name, list(swept.values()))
        measured = [size for size, end in swept.items() if end.metrics]
        for size in {measured[0], measured[-1]} if measured else set():
            fresh = kit.run(shape, *options, micro_batch=size, window=WINDOW, **way)
            compare(kit, f"{name}, {size} samples", swept[size], fresh)


def compare(kit: Kit, name: str, swept: TrialResult, fresh: TrialResult) -> None:
    """Holds what a size has read in a sweep against what it reads in a fresh process."""
    if not kit.report.check(f"{name}: measured afresh", bool(fresh.metrics), fresh.reason):
        return
    times = [statistics.median(result.step_times) for result in (swept, fresh)]
    peaks = [max(result.memory.peak) - max(result.memory.after_initialize) for result in (swept, fresh)]
    kit.report.figure(f"{name}: seconds a step, bytes above initialisation; swept and fresh", [times, peaks])
    ratios = times[0] / times[1], peaks[0] / peaks[1] if peaks[1] > 0 else math.nan
    said = f"time {ratios[0]:.3f}, memory {ratios[1]:.3f} of the fresh one's"
    if kit.is_cuda:
        is_near = abs(ratios[0] - 1) < MOST_OFF_TIME and abs(ratios[1] - 1) < MOST_OFF_PEAK
        kit.report.check(f"{name}: swept as afresh", is_near, said)
    else:
        kit.report.leave_out(f"{name}: swept as afresh", f"a toy on a processor: {said}")


def left_behind(kit: Kit, name: str, swept: list[TrialResult]) -> None:
    """Looks at what was free when each run of the program began: communicators and the like lie in no other figure."""
    free = [said["free"] for result in swept for said in kit.said(result, "at the start")]
    if len(free) < 2:
        kit.report.leave_out(f"{name}: what its runs leave behind", "the program does not say")
        return
    each = (free[0] - free[-1]) / (len(free) - 1)
    kit.report.figure(f"{name}: free at the start of each run", free)
    kit.report.check(f"{name}: its runs leave little behind", each < MOST_LEFT, f"{each / 2**20:.1f} MiB each")
