"""A study of the large model with offload arms, then what its answer promises, trained without ZeroTune."""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.in_process import StudyFailedError, open_study, run_to_answer
from benchmarks.gpu.kit import MODELS, Kit, Shape
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.launch.locks import host_lock_dir, reserved_port
from zerotune.trial_lib.launch.slots import held_slots
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.runner import seconds_of

# Of what is promised, by the median of the trainings.
MOST_OFF = 0.05


def run(kit: Kit) -> None:
    report, shape = kit.report, kit.shape("1b")
    model = kit.work / "model"
    shutil.copytree(MODELS, model, ignore=shutil.ignore_patterns("__pycache__"))
    # As somebody begins: accumulation for a batch that training wants, nothing tuned.
    typed = kit.config(gradient_accumulation_steps=8)
    (model / "ds_config.json").write_text(json.dumps(typed, indent=1))
    arguments = StudyArguments(
        command=("deepspeed", "--num_gpus", "1", "train.py", "--deepspeed_config", "ds_config.json", *shape.options),
        model_dir=model,
        method="adaptive",
        metric="throughput",
        max_trials=20 if kit.is_cuda else 6,
        max_minutes=3.5 if kit.is_cuda else 1.0,
        max_concurrent_trials=1,
        max_micro_batch=None if kit.is_cuda else 4,
    )
    began = time.monotonic()
    study = open_study(arguments, kit.work)
    try:
        try:
            answer = run_to_answer(study, lambda: tell_trials(kit, study.driver))
        except StudyFailedError as failed:
            report.check("the study has an answer", False, str(failed))
            return
        wall = time.monotonic() - began
        document = answer.document(study.driver)
        report.figure("answer", document)
        report.figure("configuration", json.loads(study.paths.best_ds_config.read_text()))
        report.check("the study has an answer", True, answer.finding.sentence if answer.finding else "")
        shares = shares_of(study.driver, wall)
        report.figure("where the time went", shares)
        if kit.is_cuda:
            arms = {str(zero_of(candidate)) for candidate in study.driver.state.candidates.values()}
            offloads = [arm for arm in arms if "offload" in arm]
            report.check("arms that offload were raced", bool(offloads), ", ".join(sorted(arms)))
        best = json.loads(study.paths.best_ds_config.read_text())
        promise(kit, shape, model, {"submitted": typed, "winner": best}, document)
    finally:
        study.close()


def zero_of(candidate: Any) -> dict[str, Any]:
    zero: dict[str, Any] = candidate.knobs.get("zero_optimization", {})
    return {key: value for key, value in zero.items() if key == "stage" or "offload" in key}


def tell_trials(kit: Kit, driver: StudyDriver) -> None:
    """Writes down every trial, a line each."""
    kit.report.figure(
        "trials",
        [
            {
                "number": number,
                "purpose": result.purpose.value,
                "label": driver.state.candidates[number].label,
                "zero": zero_of(driver.state.candidates[number]),
                "outcome": result.outcome.value,
                "reason": result.reason,
                "throughput": result.metrics.get("throughput"),
                "peak": max(result.memory.peak, default=None),
                "phases": result.phases,
            }
            for number, result in sorted(driver.state.results.items())
        ],
    )


def shares_of(driver: StudyDriver, wall: float) -> dict[str, float]:
    """Returns the seconds of a study, how many of them trials ran, and how many of these were training."""
    phases: dict[str, float] = {}
    for result in driver.state.results.values():
        for phase, seconds in result.phases.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    training = phases.get("first_step", 0.0) + phases.get("steps", 0.0)
    return {"wall": wall, "trials": seconds_of(driver.state.results.values()), "training": training, **phases}


def promise(
    kit: Kit, shape: Shape, model: Path, configs: Mapping[str, Mapping[str, Any]], document: Mapping[str, Any]
) -> None:
    """Trains with both configurations by plain `deepspeed`, in turn, and compares the rates with what was told."""
    repeats, steps = (3, 60) if kit.is_cuda else (1, 14)
    rates: dict[str, list[float]] = {name: [] for name in configs}
    for repeat in range(repeats):
        for name in list(configs)[:: 1 if repeat % 2 else -1]:
            rates[name].append(trained(kit, shape, model, configs[name], steps))
            kit.report.figure("samples/s under plain deepspeed", rates)
    promised, own = document["metrics"]["throughput"], document["submitted"].get("throughput", math.nan)
    winner, submitted = (statistics.median(rates[name]) for name in ("winner", "submitted"))
    ratios = {"winner": winner / promised, "submitted": submitted / own, "gain": winner / submitted}
    kit.report.figure("trained over told", ratios)
    said = f"{ratios['winner']:.3f} of what was promised; the submitted one {ratios['submitted']:.3f} of its own"
    if kit.is_cuda:
        is_kept = all(abs(ratios[name] - 1) < MOST_OFF for name in ("winner", "submitted"))
        kit.report.check("trainings take what trials have told", is_kept, said)
        told = document["gain"] or 1.0
        kit.report.check(
            "the gain is there in training",
            abs(ratios["gain"] / told - 1) < MOST_OFF,
            f"{ratios['gain']:.3f} and {told:.3f}",
        )
    else:
        kit.report.leave_out("trainings take what trials have told", f"a toy on a busy processor: {said}")


def trained(kit: Kit, shape: Shape, model: Path, config: Mapping[str, Any], steps: int) -> float:
    """Trains as it is typed, OMP_NUM_THREADS as the launcher leaves it; returns samples/s past the first steps."""
    folder = kit.work / f"trained-{time.monotonic_ns()}"
    folder.mkdir()
    (folder / "ds_config.json").write_text(json.dumps(dict(config)))
    locks, kind = host_lock_dir(), kind_of(kit.host.device)
    with held_slots(locks, kit.host, 1, lambda: False) as slots, reserved_port() as port:
        assert slots is not None
        launch = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "1", "--master_port", str(port)]
        program = ["train.py", "--deepspeed_config", str(folder / "ds_config.json"), *shape.options]
        own = {} if kit.is_cuda else {"OMP_NUM_THREADS": "1"}
        # DeepSpeed's launcher counts a host's GPUs from 0, whatever is visible.
        shown = kind.environment(slots.names) if kit.is_cuda else {}
        with (folder / "log").open("w") as log:
            subprocess.run(
                [*launch, *program, "--steps", str(steps), "--report", str(folder / "report.json")],
                cwd=model,
                env={**os.environ, **shown, **own},
                stdout=log,
                stderr=log,
                timeout=200,
                check=True,
            )
    found = json.loads((folder / "report.json").read_text())
    return float(found["samples_per_step"] / found["seconds_per_step"])
