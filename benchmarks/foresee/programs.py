"""Foresees every training of the repository, and records the outcome: `python -m benchmarks.foresee.programs`.

Each row ran as rank 0 of a pretended world, for two optimizer steps. The table has the outcome, the peak on the device,
and the numbers that the program asked of fake tensors. A row that was stopped has the reason, with the line.
"""

import argparse
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.foresee.program_list import ROOT, Foreseeable, all_programs
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.launch.rank_starter import Program, RankStarter
from zerotune.trial_lib.messages.foreseen_run import PLACES, ForeseenRun
from zerotune.trial_lib.plan.simulation import Pretended, simulate, starter_for
from zerotune.trial_lib.records.folders import TrialPaths
from zerotune.trial_lib.study.plans import trial_spec
from zerotune.trial_lib.study.program import environment_of, program_of
from zerotune.trial_lib.study.typed_command import read_command

RESULT = ROOT / "benchmarks" / "results" / "foreseen_programs.json"
DEADLINE_S = 120.0
_RANKS_PER_HOST = 8


def program_of_row(row: Foreseeable, folder: Path) -> Program:
    """Returns the program of a row, as a rank runs it.

    Args:
        row: what is typed.
        folder: the copy of its folder.
    """
    host = this_host()
    if row.experiment:
        experiment = read_experiment(folder / row.experiment, folder)
    else:
        experiment = read_command(row.typed, {}, folder, host)
    environment = {**environment_of(experiment, (), host.device), **row.variables}
    paths = TrialPaths(folder.parent / "trial")
    paths.root.mkdir()
    paths.scratch.mkdir()
    paths.ds_config.write_text(json.dumps(experiment.ds_config))
    trial_spec(experiment, experiment.ds_config, paths).write(paths.training_spec)
    return program_of(
        experiment, environment, paths.ds_config, experiment.ds_config, paths.training_spec, as_typed=True
    )


def foresee_row(row: Foreseeable, starter: RankStarter, deadline_s: float = DEADLINE_S) -> ForeseenRun:
    """Foresees one row."""
    folder = Path(tempfile.mkdtemp(prefix="foreseen-program-"))
    try:
        program = program_of_row(row, row.copy(folder))
        hardware = Pretended(world=row.world, ranks_per_host=min(row.world, _RANKS_PER_HOST))
        # A fork has the import path of its server.
        own = starter_for(program, folder / "server", print) if "PYTHONPATH" in row.variables else None
        try:
            return simulate(program, {}, hardware, folder / "run", own or starter, deadline_s)
        finally:
            if own is not None:
                own.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def peaks(run: ForeseenRun) -> dict[str, int]:
    """Returns the most bytes that are alive at once, by place."""
    live, most = dict.fromkeys(PLACES, 0), dict.fromkeys(PLACES, 0)
    for event in run.events:
        storage = run.storages[event.storage]
        place = PLACES[storage.place]
        live[place] += storage.size if event.is_made else -storage.size
        most[place] = max(most[place], live[place])
    return most


def outcome(row: Foreseeable, run: ForeseenRun, seconds: float) -> dict[str, Any]:
    """Returns a row of the table."""
    return {
        "program": row.name,
        "is_foreseen": not run.stopped,
        "why_not": row.is_no_training or _without_copy(run.stopped),
        "world": run.world,
        "stage": run.stage,
        "micro_batch": run.micro_batch,
        "accumulation": run.accumulation,
        "parameters": run.parameters,
        "trainable": run.trainable,
        "peak_bytes": peaks(run),
        "operations": len(run.operations),
        "unknown_asks": [f"{ask.question}: {_without_copy(ask.asker)}" for ask in run.asks if not ask.is_known],
        "known_asks": sum(ask.count for ask in run.asks if ask.is_known),
        "notes": list(run.notes),
        "seconds": round(seconds, 1),
    }


def _without_copy(text: str) -> str:
    """Returns a text without the folder that the program was copied to."""
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/foreseen-program-[^/]*/program/", "", text)


def foresee_all(only: list[str], show: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Foresees the rows whose names contain one of the words; all without words."""
    rows = [row for row in all_programs() if not only or any(word in row.name for word in only)]
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="foreseen-server-") as folder:
        first = Path(folder) / "first"
        first.mkdir()
        starter = starter_for(program_of_row(rows[0], rows[0].copy(first)), Path(folder) / "server", print)
        try:
            for row in rows:
                began = time.time()
                table.append(outcome(row, foresee_row(row, starter), time.time() - began))
                show(table[-1])
        finally:
            starter.close()
    return table


def _show(line: dict[str, Any]) -> None:
    said = f"{line['peak_bytes']['device'] / 2**20:8.1f} MiB" if line["is_foreseen"] else line["why_not"]
    print(f"{line['program']:50} {line['seconds']:6.1f} s  {said}", flush=True)
    for ask in line["unknown_asks"]:
        print(f"{'':60} asks {ask}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of rows; the result is not written")
    only = parser.parse_args().only
    table = foresee_all(only, _show)
    trainings = [line for line in table if line["program"] not in _no_trainings()]
    print(f"{sum(line['is_foreseen'] for line in trainings)} of {len(trainings)} trainings are foreseen")
    if not only:
        RESULT.write_text(json.dumps(table, indent=1) + "\n")


def _no_trainings() -> set[str]:
    return {row.name for row in all_programs() if row.is_no_training}


if __name__ == "__main__":
    main()
