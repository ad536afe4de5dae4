"""Tunes two trainings over DeepSpeed's settings and the program's switches, and trains with each winner as told."""

import argparse
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial_lib.records.candidate import Candidate
from trial_lib.records.study_folder import StudyPaths

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "whole_space.json"
BIN = Path(sys.executable).parent
TOLD = re.compile(r"rank \d+: ([\d.]+) s a sample, ([\d.]+) s of processor time")
CHECKPOINTING, WORKERS, FUSED = "model:activation_checkpointing", "loader:num_workers", "optimizer:fused"


@dataclass(frozen=True)
class Program:
    """A training, as its user types it.

    Attributes:
        words: the command behind `deepspeed --num_gpus 2`.
        vary: the switches to vary.
        steps: the option for the length of a training.
    """

    words: tuple[str, ...]
    vary: tuple[str, ...]
    steps: str


PROGRAMS = {
    "convnet": Program(
        ("train.py", "--deepspeed_config", "ds_config.json", "--answer-ms", "12"),
        (CHECKPOINTING, WORKERS, FUSED),
        "--steps",
    ),
    "llama": Program(
        (
            *("train.py", "--deepspeed", "ds_config.json", "--report_to", "none", "--save_strategy", "no"),
            *("--use_cpu", "True"),
            *("--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "4"),
            *("--gradient_checkpointing", "True", "--optim", "adamw_torch"),
        ),
        (CHECKPOINTING, WORKERS, FUSED),
        "--max_steps",
    ),
}


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def tune(program: Program, folder: Path, trials: int) -> dict[str, Any]:
    """Tunes by the command that a user types; returns its result."""
    vary = [word for place in program.vary for word in ("--vary", place)]
    options = ["-m", "throughput", "--json", "--max-trials", str(trials), "--max-micro-batch", "32", *vary]
    command = [str(BIN / "zerotune"), "tune", *options, "--", "deepspeed", "--num_gpus", "2", *program.words]
    run = subprocess.run(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, check=True, text=True)
    document: dict[str, Any] = json.loads(run.stdout)
    return document


def apply(name: str, folder: Path, words: Sequence[str], candidate: Candidate) -> list[str]:
    """Does what the answer says: writes the switches into the code, or the command; returns the command's words."""
    switches = candidate.knobs.get("program", {})
    if name == "convnet":
        assert switches.get(CHECKPOINTING) in (None, "none"), "the program has no line for recomputation"
        code = folder / "train.py"
        text = code.read_text()
        loader, adam = "sampler=DistributedSampler(data)", "lr=1e-3"
        assert text.count(loader) == text.count(adam) == 1
        text = text.replace(loader, f"{loader}, num_workers={switches.get(WORKERS) or 0}")
        code.write_text(text.replace(adam, f"{adam}, fused={bool(switches.get(FUSED))}"))
        return list(words)
    options = {
        "--per_device_train_batch_size": candidate.micro_batch_size,
        "--gradient_accumulation_steps": candidate.gradient_accumulation_steps,
        "--gradient_checkpointing": switches.get(CHECKPOINTING, "full") != "none",
        "--optim": "adamw_torch_fused" if switches.get(FUSED) else "adamw_torch",
    }
    values = dict(zip(words[1::2], words[2::2], strict=True)) | {key: str(value) for key, value in options.items()}
    return [words[0], *(word for pair in values.items() for word in pair)]


def trained(program: Program, folder: Path, words: Sequence[str], steps: int) -> dict[str, float]:
    """Trains without ZeroTune; returns seconds a sample, by the clock of a rank and of processor time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])  # other trainings of the machine may have DeepSpeed's own
    command = [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", port, *words, program.steps, str(steps)]
    run = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=True)
    told = [(float(wall), float(processor)) for wall, processor in TOLD.findall(run.stdout)]
    assert len(told) == 2, run.stdout[-2000:] + run.stderr[-2000:]
    wall, processor = (statistics.fmean(each) for each in zip(*told, strict=True))
    return {"wall_s_per_sample_of_a_rank": wall, "processor_s_per_sample": processor}


def measure(name: str, trials: int, steps: int, repeats: int) -> dict[str, Any]:
    program = PROGRAMS[name]
    with tempfile.TemporaryDirectory(prefix="whole-space-") as work:
        folder = Path(work) / name
        shutil.copytree(HERE / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
        document = tune(program, folder, trials)
        study = StudyPaths(Path(document["folder"]))
        winner: Mapping[str, Any] = document["confirmation"]["winner"]
        candidate = Candidate.model_validate_json(study.trial(winner["trials"][0]).candidate.read_text())
        report = {
            "program": ["deepspeed", "--num_gpus", "2", *program.words],
            "winner": winner["name"],
            "switches": candidate.knobs.get("program", {}),
            "quantity": document["confirmation"]["quantity"],
            "gain": winner["gain"],
            "clock_gain": winner["clock_gain"],
            "losses": winner["losses"],
            "promised": {
                "wall_s_per_sample_of_a_rank": 2 / winner["metrics"]["throughput"],
                "processor_s_per_sample": winner["metrics"]["cpu_time_per_sample"],
            },
            "best_command": study.best_command.read_text().replace(str(folder), ".").splitlines(),
        }
        words = apply(name, folder, program.words, candidate)
        best = study.best_ds_config.read_text()
        (folder / "ds_config.json").write_text(best)
        report["trained"] = [trained(program, folder, words, steps) for _ in range(repeats)]
    for key in report["promised"]:
        found = statistics.median(each[key] for each in report["trained"])
        report[f"trained_over_promised, {key}"] = found / report["promised"][key]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    reports = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in arguments.programs:
        reports[name] = measure(name, arguments.trials, arguments.steps, arguments.repeats)
        RESULTS.write_text(json.dumps(reports, indent=2) + "\n")
    print(json.dumps(reports, indent=2))


if __name__ == "__main__":
    main()
