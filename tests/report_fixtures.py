"""A study that was recorded, as a folder: what people are shown of it can be tested without a rank."""

import json
import shutil
from pathlib import Path
from typing import Any

from zerotune.trial_lib.records.folders import StudyPaths

RECORDED = Path(__file__).parent / "recorded_study"
PICTURED = Path(__file__).parents[1] / "docs" / "images" / "study"
STUDY_ID = "programs-20261122-043110-37dd"
SECRET = "hf_SECRETsecret123"
MARKUP = "</pre><script>document.title = 'broken'</script><img src=x onerror=alert(1)>"
CRASH, RUNNING = 37, 38
OUT_OF_MEMORY = {35: 128, 36: 96}  # number -> micro-batch size
_OOM = "RuntimeError: can't allocate memory: you tried to allocate {} bytes. Log: {}"


def recorded_study(folder: Path, recorded: Path = RECORDED, **changes: Any) -> StudyPaths:
    """Returns a recorded study, written into a folder; `changes` are fields of its record."""
    study_id = json.loads((recorded / "study.json").read_text())["study_id"]
    paths = StudyPaths(folder / "zerotune-studies" / study_id)
    shutil.copytree(recorded, paths.root)
    for line in paths.history.read_text().splitlines():
        told = json.loads(line)
        if "tell" in told:
            trial = paths.trial(told["tell"])
            trial.root.mkdir(parents=True)
            for rank in (0, 1):
                trial.log(rank).write_text(f"step 1 of rank {rank}\nstep 2 of rank {rank}\n")
    change_record(paths, **changes)
    return paths


def change_record(paths: StudyPaths, **changes: Any) -> None:
    """Changes fields of a study's record."""
    record = json.loads(paths.record.read_text())
    paths.record.write_text(json.dumps({**record, **changes}))


def study_with_failures(folder: Path, **changes: Any) -> StudyPaths:
    """Returns the recorded study with trials that failed, and one that has not ended.

    Its program knows a secret and prints it, and markup besides.
    """
    paths = recorded_study(folder, **changes)
    with paths.experiment.open("a") as file:
        file.write(f"environment:\n  environment_variables:\n    - HF_TOKEN={SECRET}\n")
    for number, size in OUT_OF_MEMORY.items():
        reason = _OOM.format(size * 1000, paths.trial(number).log(1))
        _fail(paths, number, size, "out_of_memory", reason, f"rank 1 gave up at {size}\n")
    log = (
        f"logging in with {SECRET}\npostgres://me:hunter22@db/x\n{MARKUP}\n\x1b[31mValueError: no such column\x1b[0m\n"
    )
    _fail(paths, CRASH, 8, "crashed", f"ValueError: no such column {MARKUP}", log)
    _append(paths, {"ask": RUNNING, "purpose": "search", "candidate": _candidate(16)})
    return paths


def with_results(paths: StudyPaths) -> StudyPaths:
    """Writes the candidate and the result of each trial that the study's history records, as a driver does."""
    candidates = {}
    for line in map(json.loads, paths.history.read_text().splitlines()):
        if "ask" in line:
            candidates[line["ask"]] = line["candidate"]
        elif "tell" in line:
            trial = paths.trial(line["tell"])
            trial.candidate.write_text(json.dumps(candidates[line["tell"]]))
            trial.result.write_text(json.dumps(line["result"]))
    return paths


def only_history(paths: StudyPaths, lines: int) -> None:
    """Cuts a study off after so many lines of its history; what it had answered is gone."""
    paths.history.write_text("".join(paths.history.read_text().splitlines(keepends=True)[:lines]))
    for file in (paths.best_ds_config, paths.best_ds_metrics, paths.best_command):
        file.unlink()
    change_record(paths, best_number=None, gain=None, gain_interval=None, finding="")


def _candidate(size: int) -> dict[str, Any]:
    knobs = {"zero_optimization": {"stage": 2}}
    return {
        "knobs": knobs,
        "micro_batch_size": size,
        "gradient_accumulation_steps": 2,
        "slots": 2,
        "data_parallel_size": 2,
    }


def _fail(paths: StudyPaths, number: int, size: int, outcome: str, reason: str, log: str) -> None:
    trial = paths.trial(number)
    trial.root.mkdir()
    for rank in (0, 1):
        trial.log(rank).write_text("gloo: connection closed by peer\n" if rank == 0 else log)
    result = {
        "trial_id": f"{STUDY_ID}-{number:04d}",
        "number": number,
        "purpose": "search",
        "config_hash": f"{number}",
        "outcome": outcome,
        "reason": f"{reason} Log: {trial.log(1)}",
        "failed_rank": 1,
        "phases": {"start": 1.0, "steps": 2.0},
        "logs": [str(trial.log(rank)) for rank in (0, 1)],
        "host": "node-1",
        "started_at": 1_800_000_000 + 60 + number,
    }
    _append(paths, {"ask": number, "purpose": "search", "candidate": _candidate(size)})
    _append(paths, {"tell": number, "result": result})


def _append(paths: StudyPaths, line: dict[str, Any]) -> None:
    with paths.history.open("a") as file:
        file.write(json.dumps(line) + "\n")
