"""DeepSpeed's autotuner beside ZeroTune on the same small training; the whole command, where it is installed."""

import importlib.util
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.in_process import open_study, run_to_answer
from benchmarks.gpu.kit import Kit
from benchmarks.peer_deepspeed_autotuner import run as peer
from zerotune.trial_lib.study.arguments import StudyArguments

TRIALS = 8
WHOLE = ("prefect", "mlflow")


def run(kit: Kit) -> None:
    report = kit.report
    trials = TRIALS if kit.is_cuda else 4
    ours = in_process(kit, trials)
    report.figure("a study in process", ours)
    report.check("a study in process has an answer", ours["samples_per_s"] > 0, f"{ours['wall_s']:.1f} s")
    lacking = [name for name in WHOLE if importlib.util.find_spec(name) is None]
    if lacking:
        report.leave_out("the whole command", f"not installed: {', '.join(lacking)}")
    else:
        command = peer.run_zerotune(trials, kit.work / "command")
        report.figure("the whole command", command)
        report.check("the whole command has an answer", bool(command["winner"]), f"{command['wall_s']:.1f} s")
    try:
        theirs = peer.run_peer(trials, kit.work / "peer")
    except (subprocess.CalledProcessError, OSError, ValueError) as error:
        log = kit.work / "peer" / "tuner.log"
        words = log.read_text(errors="replace").strip().splitlines()[-5:] if log.exists() else []
        report.check("DeepSpeed's autotuner comes to its end", False, f"{error}; {' | '.join(words)}")
        return
    report.figure("DeepSpeed's autotuner", theirs)
    report.check("DeepSpeed's autotuner comes to its end", True, f"{theirs['wall_s']:.1f} s")
    ratio = theirs["wall_s"] / ours["wall_s"]
    report.figure("autotuner's time over ours", ratio)
    report.check("a study is faster than the autotuner", ratio > 1, f"{ratio:.1f} times")


def in_process(kit: Kit, trials: int) -> dict[str, Any]:
    """Tunes the autotuner's training over its space; returns what it took, and what it found."""
    work = kit.work / "own"
    work.mkdir()
    config = work / "experiment.json"
    experiment = {
        "name": "peer",
        "entrypoint": ["deepspeed", "train.py", "--deepspeed_config", "ds_config.json", *peer.SCRIPT],
        "hyperparameters": {"deepspeed_config": "ds_config.json"},
        "resources": {"slots_per_trial": 1},
    }
    config.write_text(json.dumps(experiment))
    model = copied(peer.EXAMPLE, work / "model")
    (model / "ds_config.json").write_text(json.dumps(peer.BASE))
    began = time.monotonic()
    study = open_study(
        StudyArguments(
            config_path=config,
            model_dir=model,
            metric="throughput",
            max_trials=trials,
            max_micro_batch=peer.CAP,
            free_batch=True,
            max_concurrent_trials=1,
        ),
        work,
    )
    try:
        answer = run_to_answer(study)
        wall = time.monotonic() - began
        return {
            "wall_s": wall,
            "trials": len(study.driver.state.results),
            "winner": json.loads(study.paths.best_ds_config.read_text()),
            "samples_per_s": answer.best.metrics["throughput"],
            "gain": answer.gain,
        }
    finally:
        study.close()


def copied(folder: Path, to: Path) -> Path:
    """Returns a copy of a program's folder."""
    to.mkdir()
    for file in folder.glob("*"):
        if file.is_file():
            (to / file.name).write_bytes(file.read_bytes())
    return to
