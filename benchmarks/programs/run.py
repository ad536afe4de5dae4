"""Runs programs plainly, tunes them, and runs the winners plainly: is what a study says what a user then gets?"""

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.programs.commands import OWN, Program, others, read, split_variables

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "programs.json"
WATCHED = Path(__file__).with_name("watched")
BIN = Path(sys.executable).parent
# The steps of a training that do not count.
WARM_UP = 3


@dataclass(frozen=True)
class Training:
    """What a plain training did.

    Attributes:
        micro_batch: of the engine.
        accumulation: of the engine.
        global_batch: of the engine.
        samples_per_s: of all ranks, by the clock, by the median step.
        cpu_s_per_sample: of processor time, both ranks, by the median step.
        steps: that count.
    """

    micro_batch: int
    accumulation: int
    global_batch: int
    samples_per_s: float
    cpu_s_per_sample: float
    steps: int


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **variables}


def trained(folder: Path, typed: Sequence[str], variables: Mapping[str, str], config: Path | None = None) -> Training:
    """Runs a command without ZeroTune, for a while.

    Args:
        folder: where it is typed.
        typed: the command.
        variables: that are typed before it.
        config: what stands in the place of the dictionary in the code, if the code is to be changed.

    Raises:
        RuntimeError: it made too few steps.
    """
    ranks, error = watched(folder, typed, variables, config)
    if "EADDRINUSE" in error:
        # Launchers have one port for all that runs on a host.
        ranks, error = watched(folder, typed, variables, config)
    common = min((len(rank) for rank in ranks), default=0)
    if common < WARM_UP + 3:
        raise RuntimeError(f"{shlex.join(typed)} made {common} steps: {error[-2000:]}")
    return summary([rank[:common] for rank in ranks])


def watched(
    folder: Path, typed: Sequence[str], variables: Mapping[str, str], config: Path | None
) -> tuple[list[list[dict[str, Any]]], str]:
    """Returns the steps of each rank, see `watched/sitecustomize.py`, and what went to standard error."""
    with tempfile.TemporaryDirectory(prefix="watch-") as steps:
        paths = os.pathsep.join(filter(None, (str(WATCHED), os.environ.get("PYTHONPATH"))))
        watch = {"WATCH_FOLDER": steps, "PYTHONPATH": paths, "WATCH_CONFIG": str(config or "")}
        run = subprocess.run(
            list(typed), cwd=folder, env=environment({**variables, **watch}), capture_output=True, text=True
        )
        files = sorted(Path(steps).iterdir())
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files], run.stderr


def summary(ranks: Sequence[Sequence[dict[str, Any]]]) -> Training:
    """Returns what the steps of all ranks come to."""
    micro_batch, accumulation, global_batch = ranks[0][WARM_UP]["batch"]
    number = range(WARM_UP, len(ranks[0]))
    rows = {sum(rank[step]["rows"] for rank in ranks) for step in number}
    seconds = [ranks[0][step]["clock"] - ranks[0][step - 1]["clock"] for step in number]
    cpu = [sum(rank[step]["cpu"] - rank[step - 1]["cpu"] for rank in ranks) for step in number]
    if len(rows) > 1:
        # Batches come as they are: only all of them together have a speed.
        samples = sum(rank[step]["rows"] for rank in ranks for step in number)
        return Training(
            micro_batch, accumulation, global_batch, samples / sum(seconds), sum(cpu) / samples, len(number)
        )
    return Training(
        micro_batch,
        accumulation,
        global_batch,
        global_batch / statistics.median(seconds),
        statistics.median(cpu) / global_batch,
        len(number),
    )


def tune(folder: Path, program: Program) -> tuple[int, dict[str, Any]]:
    """Tunes as a user would; returns the exit code and the document."""
    command = [str(BIN / "zerotune"), "tune", *program.flags, "--json", "--", *program.typed]
    run = subprocess.run(command, cwd=folder, env=environment(program.variables), capture_output=True, text=True)
    if not run.stdout.strip():
        return run.returncode, {"reason": run.stderr.strip().splitlines()[-1]}
    document: dict[str, Any] = json.loads(run.stdout)
    return run.returncode, document


def winner_command(document: dict[str, Any]) -> tuple[list[str], dict[str, str], Path | None]:
    """Returns how the winner is trained without ZeroTune, from the study's `best_command.txt`.

    Returns:
        The words, the variables before them, and the configuration for the code where that has to be changed.
    """
    text = document["command"]
    _, in_code, by_hand = text.partition("Then, without ZeroTune:\n")
    lines = [line.removeprefix("# ") for line in by_hand.splitlines()] if in_code else text.splitlines()
    variables, words = split_variables(shlex.split(next(line for line in lines if not line.startswith(("#", "cd ")))))
    return words, variables, Path(document["best_ds_config_path"]) if in_code else None


def row(program: Program, rounds: int, work: Path) -> dict[str, Any]:
    """Returns all that the table says of a program."""
    folder = program.copy(work)
    plain = [trained(folder, program.typed, program.variables)]
    code, document = tune(folder, program)
    found: dict[str, Any] = {"program": program.name, "exit_code": code, "plain": asdict(plain[0])}
    own = (document.get("confirmation") or {}).get("own")
    if own is None:
        return {**found, "answer": document["reason"]}
    candidate = json.loads(
        (Path(document["folder"]) / "trials" / f"{own['trials'][0]:04}" / "candidate.json").read_text()
    )
    found["submitted"] = {
        "micro_batch": candidate["micro_batch_size"],
        "accumulation": candidate["gradient_accumulation_steps"],
        "samples_per_s": own["metrics"]["throughput"],
        "cpu_s_per_sample": own["metrics"]["cpu_time_per_sample"],
    }
    found["answer"] = document["confirmation"]["sentence"]
    winner = document["confirmation"]["winner"]
    is_own = winner is None or winner["verdict"] == "own"
    winners = list[Training]()
    for number in range(rounds):
        if not is_own and number % 2:
            winners.append(again(folder, document, program))
        if number:
            plain.append(trained(folder, program.typed, program.variables))
        if not is_own and not number % 2:
            winners.append(again(folder, document, program))
    return {**found, **compared(plain, winners, own, winner)}


def again(folder: Path, document: dict[str, Any], program: Program) -> Training:
    words, variables, config = winner_command(document)
    return trained(folder, words, {**program.variables, **variables}, config)


def compared(
    plain: Sequence[Training], winners: Sequence[Training], own: dict[str, Any], winner: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns the ratios of what was measured to what the study says."""
    middle = _middle(plain)
    told = {
        "plain": asdict(middle),
        "plain_runs": [asdict(one) for one in plain],
        "submitted_over_plain": own["metrics"]["throughput"] / middle.samples_per_s,
        "submitted_over_plain_cpu": middle.cpu_s_per_sample / own["metrics"]["cpu_time_per_sample"],
        # How far plain runs of one command lie apart.
        "noise_of_plain": spread([one.samples_per_s for one in plain]),
        "noise_of_plain_cpu": spread([one.cpu_s_per_sample for one in plain]),
    }
    if not winners or winner is None:
        return told
    best = _middle(winners)
    gains = [one.cpu_s_per_sample / other.cpu_s_per_sample for one, other in zip(plain, winners, strict=True)]
    gain = math.exp(statistics.fmean(map(math.log, gains)))
    return {
        **told,
        "winner": winner["name"],
        "promised_gain": winner["gain"],
        "winner_plainly": asdict(best),
        "winner_runs": [asdict(one) for one in winners],
        "gain_plainly": gain,
        "gain_plainly_by_the_clock": best.samples_per_s / middle.samples_per_s,
        "kept_of_the_promise": gain / winner["gain"]["value"],
    }


def spread(values: Sequence[float]) -> float:
    return max(values) / min(values) - 1


def _middle(runs: Sequence[Training]) -> Training:
    return sorted(runs, key=lambda run: run.samples_per_s)[(len(runs) - 1) // 2]


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of the table, in Markdown."""
    yield "| program | plainly: batch, samples/s | submitted trial | answer | winner plainly, of the promise |"
    yield "|---|---|---|---|---|"
    for told in rows:
        plain, submitted = told["plain"], told.get("submitted")
        batch = f"{plain['micro_batch']} x {plain['accumulation']}, {plain['global_batch']}"
        cells = [told["program"], f"{batch}; {plain['samples_per_s']:,.0f}"]
        if submitted is None:
            yield "| " + " | ".join([*cells, "-", told["answer"], "-"]) + " |"
            continue
        ratio = told["submitted_over_plain_cpu"]
        cells.append(
            f"{submitted['micro_batch']} x {submitted['accumulation']}; {submitted['samples_per_s']:,.0f} ({ratio:.2f})"
        )
        kept = told.get("kept_of_the_promise")
        plainly = "-" if kept is None else f"{told['gain_plainly']:.2f}x, {kept:.2f}"
        yield "| " + " | ".join([*cells, told["answer"], plainly]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="*", help="of programs, each with its COMMAND; else those of tests")
    parser.add_argument("--rounds", type=int, default=3, help="plain runs of the program and of the winner, in turns")
    arguments = parser.parse_args()
    programs = [read(folder) for folder in arguments.folders] or [*others(), *OWN]
    rows: list[dict[str, Any]] = []
    for program in programs:
        with tempfile.TemporaryDirectory(prefix="programs-") as work:
            try:
                rows.append(row(program, arguments.rounds, Path(work)))
            except RuntimeError as error:
                print(f"{program.name}: {error}", file=sys.stderr)
                continue
        RESULTS.write_text(json.dumps(rows, indent=2) + "\n")
        print("\n".join(table(rows[-1:])), flush=True)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
