"""Kernels: compiled programs compile in trials, whatever attention they use, and their FLOPs are counted."""

import importlib.util

from benchmarks.gpu.kit import Kit
from benchmarks.gpu.models.llama import counted
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Purpose

ELEVEN_STEPS = StepWindow(start_step=5, end_step=11, max_steps=11)
MOST_OFF = 0.02
COMPILED = ("model", "module", "engine", "fullgraph")


def run(kit: Kit) -> None:
    shape = kit.shape("125m")
    expected = counted(shape)
    kit.report.figure("FLOPs of a sample by the formula", expected)
    backend = () if kit.is_cuda else ("--backend", "aot_eager")
    # Of each case: the program's options, the FLOPs of a sample (None where torch has no formula), and whether it
    # compiles.
    cases: dict[str, tuple[tuple[str, ...], int | None, bool]] = {"compile: no": (("--compile", "no"), expected, False)}
    cases |= {f"compile: {how}": (("--compile", how, *backend), expected, True) for how in COMPILED}
    if kit.is_cuda:
        cases["attention: flex"] = ("--attention", "flex"), None, True
    else:
        kit.report.leave_out("attention: flex", "torch has no backward pass of it on a processor")
    attentions = ["eager", "math"] if not kit.is_cuda else ["eager", "math", "flash", "efficient", "cudnn"]
    cases |= {f"attention: {attention}": (("--attention", attention), expected, False) for attention in attentions}
    if importlib.util.find_spec("flash_attn") is None:
        kit.report.leave_out("attention: flash_attn", "the package is not installed")
    else:
        cases["attention: flash_attn"] = ("--attention", "flash_attn"), None, False
    for name, case in kit.part_of(cases.items()):
        one(kit, name, *case)


def one(kit: Kit, name: str, options: tuple[str, ...], expected: int | None, compiles: bool) -> None:
    """Runs a profile trial, which counts, and one of the search, which times.

    Args:
        kit: the stage's.
        name: of the case.
        options: of the program.
        expected: the FLOPs of a sample; None where torch has no formula for what is called.
        compiles: whether there are graphs to count.
    """
    shape, report = kit.shape("125m"), kit.report
    profile = kit.run(shape, *options, purpose=Purpose.PROFILE, window=StepWindow(1, 1, 1))
    if not report.check(f"{name}: the profile trial completes", profile.profile is not None, profile.reason):
        return
    assert profile.profile is not None
    flops = profile.profile.flops_per_sample
    report.figure(f"{name}: FLOPs of a sample", flops)
    if expected is not None:
        ratio = flops / expected
        report.check(f"{name}: its FLOPs are the formula's", abs(ratio - 1) < MOST_OFF, f"{ratio:.4f} of it")
    formats = None if profile.program is None else tuple(profile.program.formats)
    known = {"profile": profile.profile, "formats": formats}
    result = kit.completed(f"{name}: a trial", shape, *options, micro_batch=4, window=ELEVEN_STEPS, **known)
    if result is None:
        return
    report.figure(f"{name}: metrics", result.metrics)
    report.figure(f"{name}: note", result.note)
    if compiles:
        told = kit.said(result, "compiled")
        graphs = [said["graphs"] for said in told]
        report.check(f"{name}: graphs are compiled", bool(graphs) and max(graphs) > 0, f"{graphs} by steps 3 and 10")
    if kit.is_cuda and expected is not None:
        mfu = result.metrics.get("mfu")
        report.check(f"{name}: the device's share of its peak is told", mfu is not None and 0 < mfu < 1, f"{mfu}")
