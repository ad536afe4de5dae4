"""Memory: what trials take and leave, beside what the model foresees; what no figure has; company on the card."""

import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.kit import GIB, Kit, Shape
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.memory_model import MemoryModel, measured_above_initialize
from zerotune.trial_lib.search.methods import AdaptiveSettings

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)
SIZES = (1, 4, 16)
# An interval of 90 % holds as many; of a few dozen that hang together, somewhat fewer.
LEAST_WITHIN = 0.7
CONFIDENT = 0.9
HEADROOM = AdaptiveSettings().memory_headroom
# What CUDA itself, its libraries and fragments take of a card beside what torch knows of.
MOST_UNKNOWN = 3 * GIB
COMPANY = 20 * GIB

HOLDS = """
import sys, time, torch
held = torch.ones(int(sys.argv[1]) // 4, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
time.sleep(600)
"""


def arms(kit: Kit) -> dict[str, dict[str, Any]]:
    """Returns the settings of ZeRO to measure."""
    found: dict[str, dict[str, Any]] = {f"stage {stage}": {"stage": stage} for stage in range(4)}
    if kit.is_cuda:
        place = {"device": "cpu", "pin_memory": True}
        found |= {f"stage {stage}, offloaded": {"stage": stage, "offload_optimizer": place} for stage in (1, 2, 3)}
    return found


def run(kit: Kit) -> None:
    report, shape = kit.report, kit.shape("125m")
    profile = kit.run(shape, purpose=Purpose.PROFILE, window=StepWindow(1, 1, 1))
    if not report.check("the profile trial completes", profile.profile is not None, profile.reason):
        return
    assert profile.profile is not None
    report.figure("profile", asdict(profile.profile))
    counted = profile.profile.num_params
    report.check("the profile counts the parameters", counted == shape.parameters, f"{counted} of {shape.parameters}")
    foreseen(kit, shape, profile.profile)
    if not kit.is_cuda:
        report.leave_out("company on the card", "there is no card")
    elif not kit.is_alone:
        report.leave_out("company on the card", "there is company all the time")
    else:
        company(kit, shape)


def foreseen(kit: Kit, shape: Shape, profile: ModelProfile) -> None:
    """Measures each arm at each size, and holds it against what the model foresaw of it just before."""
    model = MemoryModel(MemoryBasis(profile, kit.config(), 1, kit.host.device))
    rows: list[dict[str, Any]] = []
    for name, zero in kit.part_of(arms(kit).items()):
        for size in SIZES if kit.is_cuda else SIZES[:2]:
            candidate = Candidate(knobs={"zero_optimization": zero}, micro_batch_size=size, data_parallel_size=1)
            prediction = model.above_initialize(candidate)
            left, likely = model.available(candidate), model.probability_fits(candidate, HEADROOM)
            result = kit.run(shape, micro_batch=size, knobs=candidate.knobs, window=SHORT)
            model.observe(candidate, result)
            row = {
                "arm": name,
                "micro_batch": size,
                "outcome": result.outcome.value,
                "reason": result.reason,
                "foreseen": [prediction.low, prediction.value, prediction.high],
                "trials of the arm before": prediction.measured,
                "foreseen left by initialisation": left,
                "foreseen to fit": likely,
                "above_initialize": measured_above_initialize(result.memory),
                **asdict(result.memory),
                "device": kit.said(result, "device"),
            }
            rows.append(row)
            kit.report.figure("trials", rows)
            judge(kit, name, size, row, result)
    above = [row for row in rows if row["above_initialize"] is not None]
    within = [row for row in above if row["foreseen"][0] <= row["above_initialize"] <= row["foreseen"][2]]
    said = f"{len(within)} of {len(above)}"
    if kit.is_cuda:
        report_of_intervals = len(within) >= LEAST_WITHIN * len(above) > 0
        kit.report.check("what trials take lies within the 90 % intervals", report_of_intervals, said)
    else:
        kit.report.leave_out("what trials take lies within the 90 % intervals", f"a toy on a processor: {said}")


def judge(kit: Kit, arm: str, size: int, row: dict[str, Any], result: TrialResult) -> None:
    name = f"{arm}, micro-batch {size}"
    if row["foreseen to fit"] >= CONFIDENT:
        fits = result.outcome is Outcome.COMPLETED
        kit.report.check(f"{name}: what is foreseen to fit does", fits, f"{row['outcome']} {row['reason']}".strip())
    if not row["device"]:
        return
    retries = sum(result.memory.allocator_retries)
    kit.report.check(f"{name}: the allocator has not retried", retries == 0, f"{retries} times")
    if not kit.is_alone:
        return
    unknown = [seen["total"] - seen["free"] - seen["reserved"] for seen in row["device"]]
    kit.report.figure(f"{name}: bytes of the card that torch does not know of", unknown)
    most, first = max(unknown), unknown[0]
    kit.report.check(
        f"{name}: little lies in no figure", most < MOST_UNKNOWN, f"{first / GIB:.2f} to {most / GIB:.2f} GiB"
    )


def company(kit: Kit, shape: Shape) -> None:
    """Has another process hold memory: a trial must see that much less."""
    alone = kit.completed("a trial alone", shape, window=SHORT)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(COMPANY)], env=kit.on_first_slot, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        if not kit.report.check("another process holds memory", holder.stdout.readline() == "held\n"):
            return
        beside = kit.completed("a trial beside it", shape, window=SHORT)
    finally:
        holder.kill()
        holder.wait()
        time.sleep(1.0)
    if alone is None or beside is None:
        return
    less = alone.memory.available[0] - beside.memory.available[0]
    kit.report.check("a trial sees what others hold", COMPANY <= less < 1.1 * COMPANY, f"{less / GIB:.2f} GiB less")
