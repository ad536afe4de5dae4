"""Runs DeepSpeed's autotuner and ZeroTune in turn on the same training, and measures both winners with one harness."""

import argparse
import json
import math
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "hello_deepspeed"
RESULTS = ROOT / "benchmarks" / "results" / "peer_deepspeed_autotuner.json"
BIN = Path(sys.executable).parent
SCRIPT = ["--layers", "2", "--hidden", "128", "--log_every", "1"]
CAP = 32
BASE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000},
}
# Of the neutral harness: the steps that do not count, and the samples of those that do.
NEUTRAL_WARM_UP, NEUTRAL_SAMPLES = 5, 6_000
LINE, DOWN = re.compile(r"(\S+ \S+) +[A-Z]+ (.*)"), "everything is down"
LOGGED = re.compile(r"^step \d+ loss \S+ samples/s (\S+)$", re.MULTILINE)


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def shared_buffers() -> set[Path]:
    """Returns what DeepSpeed's CPU collectives hold in shared memory, 69 MB a rank; its launcher leaves it there."""
    return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))


def timed(command: list[str], cwd: Path, log: Path, **variables: str) -> float:
    before = shared_buffers()
    started = time.perf_counter()
    try:
        with log.open("w") as output:
            subprocess.run(
                command, cwd=cwd, env={**environment(), **variables}, stdout=output, stderr=output, check=True
            )
        return time.perf_counter() - started
    finally:
        for left_behind in shared_buffers() - before:
            left_behind.unlink(missing_ok=True)


def samples_per_step(config: dict[str, Any]) -> int:
    return int(config["train_micro_batch_size_per_gpu"]) * int(config.get("gradient_accumulation_steps", 1))


def record(wall: float, trials: list[tuple[Path, dict[str, Any]]], winner: dict[str, Any]) -> dict[str, Any]:
    """Returns what both tuners are compared by, from the log and the DeepSpeed configuration of each trial."""
    training = sum(
        samples_per_step(config) / float(rate)
        for log, config in trials
        for rate in LOGGED.findall(log.read_text(errors="replace"))
    )
    return {
        "wall_s": wall,
        "trials": len(trials),
        "s_per_trial": wall / len(trials),
        "training_s": training,
        "training_share": training / wall,
        "winner": winner,
    }


def run_peer(trials: int, work: Path) -> dict[str, Any]:
    """Tunes with DeepSpeed's autotuner, `trials` experiments over the stages 0 to 3."""
    shutil.copytree(EXAMPLE, work, ignore=shutil.ignore_patterns("__pycache__"))
    sizes = trials // 4
    micro_batches = sorted({max(1, round(CAP * (position + 1) / sizes)) for position in range(sizes)})
    config = {
        **BASE,
        "train_micro_batch_size_per_gpu": micro_batches,
        "zero_optimization": {**BASE["zero_optimization"], "stage": [0, 1, 2, 3]},
        "autotuning": {"enabled": True, "max_train_micro_batch_size_per_gpu": CAP, "metric": "throughput"},
    }
    (work / "ds_config.json").write_text(json.dumps(config))
    # Where MLflow is installed the autotuner ends in KeyError: 'MLFLOW_RUN_ID'; without it it also imports faster.
    hidden = work / "without_mlflow"
    hidden.mkdir()
    (hidden / "mlflow.py").write_text("raise ImportError\n")
    launch = ["deepspeed", "--num_accelerators", "1", "--master_port", str(free_port()), "--autotuning", "tune"]
    wall = timed(
        [str(BIN / launch[0]), *launch[1:], "train.py", "--deepspeed_config", "ds_config.json", *SCRIPT],
        work,
        work / "tuner.log",
        PYTHONPATH=str(hidden),
    )
    results = work / "autotuning_results"
    ran = [
        (folder / "stdout.log", json.loads((folder / "exp.json").read_text())["ds_config"])
        for folder in results.iterdir()
        if (folder / "stdout.log").exists() and (folder / "exp.json").exists()
    ]
    winner = json.loads((results / "ds_config_optimal.json").read_text())
    winner.pop("autotuning", None)
    return record(wall, ran, winner)


def study(work: Path, method: str, *flags: str) -> tuple[float, dict[str, Any]]:
    """Runs `zerotune METHOD` and returns its wall time and its JSON document."""
    work.mkdir(exist_ok=True)
    (work / "experiment.yaml").write_text(
        json.dumps(
            {
                "name": "peer",
                "entrypoint": ["deepspeed", "train.py", "--deepspeed_config", "ds_config.json", *SCRIPT],
                "hyperparameters": {"deepspeed_config": "ds_config.json"},
                "resources": {"slots_per_trial": 1},
            }
        )
    )
    model = work / "model"
    if not model.exists():
        shutil.copytree(EXAMPLE, model, ignore=shutil.ignore_patterns("__pycache__"))
    (model / "ds_config.json").write_text(json.dumps(BASE))
    command = [str(BIN / "zerotune"), method, "experiment.yaml", "model", "-z", "0", "1", "2", "3", "-mct", "1"]
    started = time.perf_counter()
    run = subprocess.run(
        [*command, "-m", "throughput", "--json", *flags],
        cwd=work,
        env=environment(),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return time.perf_counter() - started, json.loads(run.stdout)


def run_zerotune(trials: int, work: Path) -> dict[str, Any]:
    """Tunes with the default method, at most `trials` of its search, the cap on the micro-batch as the peer's."""
    limits = ("--max-trials", str(trials), "--max-micro-batch", str(CAP), "--free-batch")
    wall, document = study(work, "adaptive", *limits)
    folder = Path(document["folder"])
    ran = [
        (trial / "rank0.log", json.loads((trial / "ds_config.json").read_text()))
        for trial in sorted((folder / "trials").iterdir())
        if (trial / "rank0.log").exists()
    ]
    parts = seconds_by_part(folder, wall)
    return {
        **record(wall, ran, document["best_ds_config"]),
        "searched_s": said_at(folder, "The search is over", wall),
        "seconds_by_part": parts,
    }


def said_at(folder: Path, words: str, wall: float) -> float:
    """Returns the seconds from the command to a line of the study's log, which the terminal shows as well.

    Args:
        folder: of the study.
        words: that the line begins with.
        wall: seconds of the whole command. Its last line comes when everything is down.
    """
    clock = said(folder)
    return wall - (clock[DOWN] - next(stamp for message, stamp in clock.items() if message.startswith(words)))


def said(folder: Path) -> dict[str, float]:
    """Returns when each line of a study's log was written, in seconds since the epoch."""
    clock = {}
    for line in (folder / "study.log").read_text().splitlines():
        if found := LINE.match(line):
            clock[found[2]] = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
    return clock


def end_of(result: dict[str, Any]) -> float:
    """Returns when a trial ended, in seconds since the epoch."""
    return float(result["started_at"] + sum(result["phases"].values()))


def seconds_by_part(folder: Path, wall: float) -> dict[str, float]:
    """Returns where the time of a study went; the parts add up to the wall time."""
    phases: dict[str, float] = {}
    results = [json.loads(path.read_text()) for path in sorted((folder / "trials").glob("*/result.json"))]
    for result in results:
        for phase, seconds in result["phases"].items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    first = min(result["started_at"] for result in results)
    last = max(map(end_of, results))
    clock = said(folder)
    opened = clock["the study is open, and its servers are starting"]
    down = clock[DOWN]
    parts = {
        "command, until the servers start": wall - (down - opened),
        "until the profile trial (fork server primed, Prefect's server starting beside it)": first - opened,
        "ranks starting": phases.get("start", 0.0),
        "the script's imports, data and model": phases.get("import", 0.0),
        "engine": phases.get("initialize", 0.0),
        "steps": phases.get("first_step", 0.0) + phases.get("steps", 0.0),
        "the traces of two trials": phases.get("trace", 0.0),
        "ranks ending": phases.get("end", 0.0),
        "waits for Prefect's server, asks, records, between trials": (last - first) - sum(phases.values()),
        "report, Prefect's and MLflow's last records": clock["Prefect has the whole history"] - last,
        "shutdown": down - clock["Prefect has the whole history"],
    }
    return {name: round(seconds, 3) for name, seconds in parts.items()}


def neutral(configs: dict[str, dict[str, Any]], work: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """Measures configurations by plain `deepspeed` runs: the winners side by side, the submitted one beside itself.

    Yields what there is after each round.

    Each of two runs has a core of its own, and the other one in the next round: the speed of a shared machine wanders
    by more than two good configurations differ, and side by side it does so for both. What counts is the script's own
    samples/s over the steps that follow its first ones.
    """
    rates: dict[str, list[float]] = {name: [] for name in configs}
    for number in range(repeats):
        for pair in (("peer", "zerotune"), ("submitted", "submitted")):
            placed = [(name, core, work / str(core)) for core, name in enumerate(pair[:: 1 if number % 2 else -1])]
            with ThreadPoolExecutor() as both:
                jobs = [both.submit(trained_rate, configs[name], core, folder) for name, core, folder in placed]
            for (name, *_), job in zip(placed, jobs, strict=True):
                rates[name].append(job.result())
        print({name: round(values[-1], 1) for name, values in rates.items()}, file=sys.stderr, flush=True)
        measured: dict[str, Any] = {
            name: {"samples_per_s": statistics.median(values), "runs": [round(value, 1) for value in values]}
            for name, values in rates.items()
        }
        yield {**measured, "zerotune_over_peer": compared(measured)} if number else measured


def trained_rate(config: dict[str, Any], core: int, folder: Path) -> float:
    """Trains on one core; returns samples/s."""
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / "ds_config.json", folder / "train.log"
    path.write_text(json.dumps(config))
    steps = NEUTRAL_WARM_UP + NEUTRAL_SAMPLES // samples_per_step(config)
    launch = ["--num_accelerators", "1", "--master_port", str(free_port()), str(EXAMPLE / "train.py")]
    arguments = ["--deepspeed_config", str(path), *SCRIPT, "--num_steps", str(steps)]
    timed(["taskset", "-c", str(core), str(BIN / "deepspeed"), *launch, *arguments], folder, log)
    return statistics.harmonic_mean([float(rate) for rate in LOGGED.findall(log.read_text())[NEUTRAL_WARM_UP:]])


def compared(measured: dict[str, Any]) -> dict[str, float]:
    """Returns how much faster ZeroTune's winner trained than the peer's beside it, and its standard error."""
    pairs = zip(measured["zerotune"]["runs"], measured["peer"]["runs"], strict=True)
    logs = [math.log(ours / peers) for ours, peers in pairs]
    return {
        "faster": round(math.exp(statistics.fmean(logs)), 4),
        "standard_error": round(statistics.stdev(logs) / math.sqrt(len(logs)), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, action="append", help="of each tuner; may be given more than once")
    parser.add_argument("--studies", type=int, default=5, help="of ZeroTune, of which the median by wall time counts")
    parser.add_argument("--repeats", type=int, default=12, help="rounds of the neutral harness")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--only-neutral", action="store_true", help="measure the winners of the result file again")
    only.add_argument("--only-zerotune", action="store_true", help="leave the peer out, to see the cost of a trial")
    arguments = parser.parse_args()
    if arguments.repeats < 2:
        parser.error("--repeats: two at least, for a standard error")
    work = Path(tempfile.mkdtemp(prefix="peer-"))
    report: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    def save() -> None:
        """Keeps what has been measured: a run takes half an hour, and may be cut off."""
        RESULTS.write_text(json.dumps(report, indent=2) + "\n")

    if not arguments.only_neutral:
        # The first command of a machine builds DeepSpeed's ops and migrates Prefect's database: no part of tuning.
        study(work / "first", "binary", "--max-trials", "2", "--max-micro-batch", "2")
    for trials in arguments.trials or [8]:
        entry: dict[str, Any] = report.setdefault(str(trials), {})
        if not arguments.only_neutral:
            # The peer repeats within a percent; how many trials a study needs depends on what the first ones read.
            folders = [work / f"zerotune-{trials}-{number}" for number in range(arguments.studies)]
            studies = [run_zerotune(trials, folder) for folder in folders]
            entry["zerotune"] = ours = sorted(studies, key=lambda study: study["wall_s"])[len(studies) // 2]
            ours["walls_s"] = [round(study["wall_s"], 1) for study in studies]
            # Of another study, and of other winners.
            entry.pop("peer_over_zerotune_wall", None)
            entry.pop("peer_over_zerotune_search", None)
            entry.pop("neutral", None)
        if not arguments.only_zerotune and not arguments.only_neutral:
            entry["peer"] = run_peer(trials, work / f"peer-{trials}")
            entry["peer_over_zerotune_wall"] = entry["peer"]["wall_s"] / entry["zerotune"]["wall_s"]
            entry["peer_over_zerotune_search"] = entry["peer"]["wall_s"] / entry["zerotune"]["searched_s"]
        save()
        if not arguments.only_zerotune:
            configs = {"submitted": BASE, **{name: entry[name]["winner"] for name in ("peer", "zerotune")}}
            known = len(entry.get("neutral", {}).get("zerotune", {}).get("runs", ()))
            for rounds, measured in enumerate(neutral(configs, work / f"neutral-{trials}", arguments.repeats), start=1):
                if rounds >= min(known, arguments.repeats):  # else what has been measured before says more
                    entry["neutral"] = measured
                    save()
        print(json.dumps(entry, indent=2), flush=True)


if __name__ == "__main__":
    main()
