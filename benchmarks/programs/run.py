"""Runs programs plainly, tunes them, and runs the winners plainly: is what a study says what a user then gets?"""

import argparse
import contextlib
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.programs.commands import OWN, Program, others, read, split_variables
from benchmarks.programs.trials import Trials, trials_of
from zerotune.trial_lib.deepspeed_config.overrides import resolve_batch
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.locks import host_lock_dir
from zerotune.trial_lib.launch.slots import held_slots
from zerotune.trial_lib.records.result import Outcome

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "programs.json"
WATCHED = Path(__file__).with_name("watched")
BIN = Path(sys.executable).parent
# The steps of a training that do not count.
WARM_UP = 3
# Between two steps of a training.
STANDS_STILL_S = 30.0


@dataclass(frozen=True)
class Training:
    """What a training did.

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


@dataclass(frozen=True)
class Ratio:
    """A mean ratio.

    Attributes:
        value: the geometric mean.
        error: its relative standard error.
    """

    value: float
    error: float


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    path = os.environ["PATH"]
    if str(BIN) not in path.split(os.pathsep):
        path = f"{BIN}{os.pathsep}{path}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}


def trained(folder: Path, typed: Sequence[str], variables: Mapping[str, str], config: Path | None = None) -> Training:
    """Runs a command without ZeroTune, for a while: each rank on a core of its own, which no trial has meanwhile.

    Args:
        folder: where it is typed.
        typed: the command.
        variables: that are typed before it.
        config: what stands in the place of the dictionary in the code, if the code is to be changed.

    Raises:
        RuntimeError: it made too few steps.
    """
    return summary(steps_of_ranks(folder, typed, variables, config))


def steps_of_ranks(
    folder: Path, typed: Sequence[str], variables: Mapping[str, str], config: Path | None = None
) -> list[list[dict[str, Any]]]:
    """Returns the steps that all ranks of a command have in common. See `trained`."""
    watch = {"WATCH_CONFIG": str(config or "")}
    host = this_host()
    with held_slots(host_lock_dir(), host, len(host.slots), lambda: False):
        ranks, error = watched(folder, typed, {**variables, **watch})
        if "EADDRINUSE" in error:
            # Launchers have one port for all that runs on a host.
            ranks, error = watched(folder, typed, {**variables, **watch})
    common = min((len(rank) for rank in ranks), default=0)
    if common < WARM_UP + 3:
        raise RuntimeError(f"{shlex.join(typed)} made {common} steps: {error[-2000:]}")
    return [rank[:common] for rank in ranks]


def watched(folder: Path, typed: Sequence[str], variables: Mapping[str, str]) -> tuple[list[list[dict[str, Any]]], str]:
    """Returns the steps of each rank, see `watched/sitecustomize.py`, and what went to standard error."""
    with tempfile.TemporaryDirectory(prefix="watch-") as steps:
        paths = os.pathsep.join(filter(None, (str(WATCHED), os.environ.get("PYTHONPATH"))))
        watch = {"WATCH_FOLDER": steps, "PYTHONPATH": paths}
        with (
            tempfile.TemporaryFile("w+") as error,
            subprocess.Popen(
                list(typed),
                cwd=folder,
                env=environment({**variables, **watch}),
                stdout=subprocess.DEVNULL,
                stderr=error,
                start_new_session=True,
            ) as run,
        ):
            end_or_stand_still(run, Path(steps))
            error.seek(0)
            said = error.read()
        files = sorted(Path(steps).iterdir())
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files], said


def end_or_stand_still(run: subprocess.Popen[bytes], steps: Path) -> None:
    """Waits for the end of a training; ends one whose ranks wait for each other, as those of uneven data do."""
    while run.poll() is None:
        time.sleep(0.2)
        written = [file.stat().st_mtime for file in steps.iterdir()]
        if written and time.time() - max(written) > STANDS_STILL_S:
            processes = psutil.Process(run.pid).children(recursive=True)
            for process in [psutil.Process(run.pid), *processes]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return


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


def tune(folder: Path, program: Program, how: str = "tune") -> tuple[int, dict[str, Any]]:
    """Tunes as a user would; returns the exit code and the document."""
    # A trial class is typed as its YAML, and not as a command.
    typed = ["adaptive", *program.flags, "--json"]
    if "." not in program.flags:
        typed = [how, *program.flags, "--json", "--", *program.typed]
    # In a shell, which does not have the variables itself.
    words = [*(f"{name}={shlex.quote(value)}" for name, value in program.variables.items()), str(BIN / "zerotune")]
    command = f"{' '.join(words)} {shlex.join(typed)}; exit $?"
    run = subprocess.run(["sh", "-c", command], cwd=folder, env=environment({}), capture_output=True, text=True)
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
    code, document = tune(folder, program)
    found: dict[str, Any] = {"program": program.name, "exit_code": code}
    own = (document.get("confirmation") or {}).get("own")
    if own is None:
        plain = trained(folder, program.typed, program.variables)
        return {**found, "plain": asdict(plain), "answer": document["reason"]}
    winner = document["confirmation"]["winner"]
    is_own = winner is None or winner["verdict"] == "own"
    plain, submitted, winners = (list[Training]() for _ in range(3))

    def one_of_each() -> None:
        plain.append(trained(folder, program.typed, program.variables))
        submitted.append(tried(trials))
        if not is_own:
            words, variables, config = winner_command(document)
            winners.append(trained(folder, words, {**program.variables, **variables}, config))

    with trials_of(program, folder) as trials:
        for _ in range(rounds):
            one_of_each()
    told = {
        **found,
        "answer": document["confirmation"]["sentence"],
        "plain": asdict(middle(plain)),
        "submitted": asdict(middle(submitted)),
        "submitted_over_plain": asdict(ratio(plain, submitted, lambda run: run.cpu_s_per_sample)),
        "runs": {
            name: [asdict(run) for run in runs]
            for name, runs in {"plain": plain, "submitted": submitted, "winner": winners}.items()
        },
    }
    if is_own:
        return told
    gain = ratio(plain, winners, lambda run: run.cpu_s_per_sample)
    return {
        **told,
        "winner": winner["name"],
        "winner_plainly": asdict(middle(winners)),
        "promised_gain": winner["gain"],
        "gain_plainly": asdict(gain),
        "kept_of_the_promise": gain.value / winner["gain"]["value"],
    }


def tried(trials: Trials) -> Training:
    """Runs a trial of what the user has typed."""
    assert trials.own is not None
    result = trials.measured(trials.own)
    if result.outcome is not Outcome.COMPLETED:
        raise RuntimeError(f"a trial of what was typed: {result.reason}")
    batch = resolve_batch(trials.own.complete(trials.driver.known.base_config), trials.own.data_parallel_size)
    return Training(
        batch.micro_batch_size,
        batch.gradient_accumulation_steps,
        batch.train_batch_size,
        result.metrics["throughput"],
        result.metrics["cpu_time_per_sample"],
        int(result.metrics["measured_steps"]),
    )


def ratio(ones: Sequence[Training], others: Sequence[Training], figure: Callable[[Training], float]) -> Ratio:
    """Returns the mean ratio of a figure of runs in turn."""
    logs = [math.log(figure(one) / figure(other)) for one, other in zip(ones, others, strict=True)]
    return Ratio(math.exp(statistics.fmean(logs)), statistics.stdev(logs) / math.sqrt(len(logs)))


def middle(runs: Sequence[Training]) -> Training:
    """Returns the run of the median speed, the slower one of two."""
    return sorted(runs, key=lambda run: run.samples_per_s)[(len(runs) - 1) // 2]


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the lines of the table, in Markdown."""
    yield "| program | plain run | submitted trial; of the plain speed | answer | winner plainly, of the promise |"
    yield "|---|---|---|---|---|"
    for told in rows:
        plain, submitted = told["plain"], told.get("submitted")
        cells = [told["program"], _speed(plain)]
        if submitted is None:
            yield "| " + " | ".join([*cells, "-", told["answer"], "-"]) + " |"
            continue
        cells += [f"{_speed(submitted)}; {_ratio(told['submitted_over_plain'])}", told["answer"]]
        kept = told.get("kept_of_the_promise")
        cells.append("-" if kept is None else f"{_ratio(told['gain_plainly'])}x, {kept:.2f}")
        yield "| " + " | ".join(cells) + " |"


def _speed(run: Mapping[str, Any]) -> str:
    return f"{run['micro_batch']} x {run['accumulation']}, {run['global_batch']}; {run['samples_per_s']:,.0f}"


def _ratio(ratio: Mapping[str, float]) -> str:
    return f"{ratio['value']:.2f} ± {ratio['value'] * ratio['error']:.2f}"


def measured_before(programs: Sequence[Program]) -> list[dict[str, Any]]:
    """Returns the rows of the results that no program of these makes anew."""
    names = {program.name for program in programs}
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    return [row for row in rows if row["program"] not in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="*", help="of programs, each with its COMMAND; else those of tests")
    parser.add_argument("--rounds", type=int, default=3, help="plain runs, trials and runs of the winner, in turn")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="of the programs of tests, this one"
    )
    arguments = parser.parse_args()
    programs = [read(folder) for folder in arguments.folders] or [*others(), *OWN]
    if arguments.only:
        programs = [program for program in programs if program.name in arguments.only]
    rows = measured_before(programs)
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
