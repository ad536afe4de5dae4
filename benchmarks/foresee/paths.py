"""Compares the operators of foreseen passes with real ones: `python -m benchmarks.foresee.paths [--only WORD]`.

Each program of one rank really runs on a CPU up to its second backward pass, and is foreseen. `path_recorder.py` runs
in both and notes each operator with the shapes that it is given.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.foresee import path_recorder
from benchmarks.foresee.program_list import ROOT, Foreseeable, all_programs
from benchmarks.foresee.programs import program_of_row
from zerotune.trial_lib.launch.rank_starter import Program, RankStarter
from zerotune.trial_lib.plan.simulation import Pretended, simulate, starter_for

RESULT = ROOT / "benchmarks" / "results" / "foreseen_paths.json"
DEADLINE_S, REAL_S = 120.0, 40.0
_RANK = {
    **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    **{"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
}


def compared(program: Program, folder: Path, starter: RankStarter) -> dict[str, Any]:
    """Returns how many operators the passes of a program really have, and where the foreseen ones differ.

    Args:
        program: of one rank.
        folder: for the files of the foreseen run.
        starter: of foreseen runs.
    """
    recorder = shutil.copy(path_recorder.__file__, program.model_dir)
    words = [program.target["script"], *program.arguments]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    really = subprocess.Popen(
        [program.interpreter, recorder, *words],
        cwd=program.model_dir,
        env={**program.environment, **_RANK, "MASTER_PORT": port},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said = f"after {REAL_S:g} s"
    with contextlib.suppress(subprocess.TimeoutExpired):
        said = really.communicate(timeout=REAL_S)[1][-200:]
    with contextlib.suppress(ProcessLookupError):
        # With what the program has started.
        os.killpg(really.pid, signal.SIGKILL)
    really.wait()
    real = program.model_dir / path_recorder.FILE
    if not real.exists():
        return {"left_out": f"really has no two passes: {said}"}
    noted = replace(program, target={"script": Path(recorder).name}, arguments=words)
    run = simulate(noted, {}, Pretended(world=1, ranks_per_host=1), folder, starter, DEADLINE_S)
    counts = [len(calls) for calls in json.loads(real.read_text()).values()]
    return {"operators": sum(counts), "differs": run.stopped}


def compare_row(row: Foreseeable, starter: RankStarter) -> dict[str, Any]:
    """Compares a program of the repository."""
    with tempfile.TemporaryDirectory(prefix="foreseen-path-") as place:
        folder = Path(place)
        program = program_of_row(row, row.copy(folder))
        if "script" not in program.target or row.experiment:
            return {"left_out": "it is no script"}
        found = compared(program, folder / "run", starter)
        return {name: _plain(value, folder) for name, value in found.items()}


def _plain(value: Any, folder: Path) -> Any:
    return value.replace(f"{folder}/program/", "") if isinstance(value, str) else value


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares the programs and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of rows that the table gets")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no row after so many (%(default)g)")
    chosen = parser.parse_args(arguments)
    until = time.monotonic() + 60 * chosen.minutes
    rows = [row for row in all_programs() if not chosen.only or any(word in row.name for word in chosen.only)]
    table = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    # What the table lacks comes first.
    rows.sort(key=lambda row: row.name in table)
    with tempfile.TemporaryDirectory(prefix="foreseen-server-") as place:
        (first := Path(place) / "first").mkdir()
        starter = starter_for(program_of_row(rows[0], rows[0].copy(first)), Path(place) / "server", print)
        try:
            for row in rows:
                if time.monotonic() > until:
                    break
                table[row.name] = compare_row(row, starter)
                print(row.name, table[row.name], flush=True)
                ordered = {each.name: table[each.name] for each in all_programs() if each.name in table}
                RESULT.write_text(json.dumps(ordered, indent=1) + "\n")
        finally:
            starter.close()


if __name__ == "__main__":
    main()
