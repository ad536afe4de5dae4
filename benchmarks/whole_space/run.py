"""Tunes two public programs over DeepSpeed's settings and their own switches, and trains by each answer's command."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.whole_space.inputs import make_inputs
from benchmarks.whole_space.plain_training import trained
from benchmarks.whole_space.public_programs import PROGRAMS, TAG, URL, checkout_of
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.folders import StudyPaths

RESULTS = Path(__file__).resolve().parents[1] / "results" / "whole_space.json"
BIN = Path(sys.executable).parent


def environment(work: Path) -> dict[str, str]:
    """Returns the environment of the user's shell. Caches are in the work folder, and no hub is asked."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HOME": str(work / "hf"), "HF_HUB_OFFLINE": "1"}


def tune(name: str, program: Path, folder: Path, shell: Mapping[str, str], trials: int) -> dict[str, Any]:
    """Tunes by the command that a user types; returns its result."""
    vary = [word for place in PROGRAMS[name].vary for word in ("--vary", place)]
    options = ["-m", "throughput", "--json", "--max-trials", str(trials), "--max-micro-batch", "16", *vary]
    typed = ["deepspeed", "--num_gpus", "2", str(program), *PROGRAMS[name].words]
    command = [str(BIN / "zerotune"), "tune", *options, "--", *typed]
    run = subprocess.run(command, cwd=folder, env=dict(shell), stdout=subprocess.PIPE, check=True, text=True)
    document: dict[str, Any] = json.loads(run.stdout)
    return document


def measure(name: str, checkout: Path, work: Path, trials: int, steps: int, repeats: int) -> dict[str, Any]:
    """Tunes a program, and trains by the answer's command without ZeroTune."""
    program, folder, shell = PROGRAMS[name].of(checkout), work / name, environment(work)
    make_inputs(name, folder)
    document = tune(name, program, folder, shell, trials)
    study = StudyPaths(Path(document["folder"]))
    winner: Mapping[str, Any] = document["confirmation"]["winner"]
    candidate = Candidate.model_validate_json(study.trial(winner["trials"][0]).candidate.read_text())
    text = study.best_command.read_text()
    assert "zerotune train" not in text, f"the answer asks for a change of the code:\n{text}"
    report = {
        "program": [URL, TAG, PROGRAMS[name].path, *PROGRAMS[name].words],
        "varied": PROGRAMS[name].vary,
        "winner": winner["name"],
        "switches": candidate.knobs.get("program", {}),
        "quantity": document["confirmation"]["quantity"],
        "gain": winner["gain"],
        "losses": winner["losses"],
        "promised": {
            "wall_s_per_sample_of_a_rank": 2 / winner["metrics"]["throughput"],
            "processor_s_per_sample": winner["metrics"]["cpu_time_per_sample"],
        },
        "best_command": [
            line.replace(str(checkout), "transformers").replace(str(folder), ".") for line in text.splitlines()
        ],
    }
    samples = 2 * candidate.micro_batch_size * candidate.gradient_accumulation_steps
    report["trained"] = [trained(study.best_command, samples, steps, shell) for _ in range(repeats)]
    for key in report["promised"]:
        found = statistics.median(each[key] for each in report["trained"])
        report[f"trained_over_promised, {key}"] = found / report["promised"][key]
    return report


def keep(name: str, report: Mapping[str, Any]) -> None:
    """Writes a report beside those of the other programs."""
    reports = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept = {each: report if each == name else reports.get(each) for each in PROGRAMS}
    RESULTS.write_text(json.dumps({each: value for each, value in kept.items() if value}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--transformers", type=Path, help=f"a checkout of {URL} at {TAG}; it is cloned if missing")
    parser.add_argument("--work", type=Path, help="keeps inputs, caches and studies there")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--steps", type=int, default=25, help="a multiple of 5")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="whole-space-") as temporary:
        work = (arguments.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        checkout = checkout_of(arguments.transformers, work)
        for name in arguments.programs:
            report = measure(name, checkout, work, arguments.trials, arguments.steps, arguments.repeats)
            keep(name, report)
            print(json.dumps({name: report}, indent=2), flush=True)


if __name__ == "__main__":
    main()
