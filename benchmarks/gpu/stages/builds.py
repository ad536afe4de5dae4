"""Builds: DeepSpeed's ops build in a child of the fork server, which may fork afterwards; warm and cold starts."""

import statistics
import time

from benchmarks.gpu.kit import Kit
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.result import TrialResult

ONE_STEP = StepWindow(start_step=1, end_step=1, max_steps=1)
TO_FIRST_STEP = ("start", "import", "initialize", "first_step")


def run(kit: Kit) -> None:
    report, shape = kit.report, kit.shape("125m")
    builders = ["FusedAdamBuilder", "CPUAdamBuilder", "QuantizerBuilder"] if kit.is_cuda else ["ShareMemCommBuilder"]
    began = time.monotonic()
    kit.starter("warm", builders)
    first = kit.completed("a trial behind the builds", shape, window=ONE_STEP)
    report.figure("builds and first trial, s", round(time.monotonic() - began, 1))
    failed = [note for note in kit.notes if "cannot be built" in note]
    report.check("every op is built", not failed, "; ".join(failed))
    report.figure("what was built", [note for note in kit.notes if note.startswith("building ")])
    if first is None:
        return
    if kit.is_cuda:
        offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}
        kit.completed("a trial that offloads its optimizer", shape, knobs=offload, window=ONE_STEP)
    else:
        report.leave_out("offloading", "there is no device to offload from")
    repeats = 5 if kit.is_cuda else 1
    starts: dict[str, list[float]] = {"warm": [], "cold": []}
    for _ in range(repeats):
        for name, seconds in starts.items():
            kit.starter(name, builders)
            result = kit.run(shape, starter=name, window=ONE_STEP)
            if report.check(f"a {name} trial completes", bool(result.metrics), result.reason):
                seconds.append(to_first_step(result))
    report.figure("to the end of the first step, s", starts)
    if all(starts.values()):
        warm, cold = (statistics.median(starts[name]) for name in ("warm", "cold"))
        report.check("a warm start is faster than a cold one", warm < cold, f"{warm:.2f} s and {cold:.2f} s")
    cold_notes = [note for note in kit.notes if note.startswith("starting cold")]
    report.check("the fork server may fork after its builds", not cold_notes, "; ".join(cold_notes))


def to_first_step(result: TrialResult) -> float:
    return sum(result.phases.get(phase, 0.0) for phase in TO_FIRST_STEP)
