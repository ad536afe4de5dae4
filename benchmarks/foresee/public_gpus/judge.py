"""Compares the memory and the speed that are foreseen of any file of rows with what the rows measured.

`python -m benchmarks.foresee.public_gpus.judge FILE --to FOLDER` runs the rows' programs, and prints the figures beside
their bars. It names each row that it cannot compare, with the reason. Runs are kept in a cache, so a call that was
interrupted, or whose time was over, goes on with the next.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.foresee.public_gpus import memory, row_bytes, row_runs, speed
from benchmarks.foresee.public_gpus.foreseen_rows import code, store_of
from benchmarks.foresee.public_gpus.model_of_row import read_rows
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.devices import Efficiencies

_MINUTES = 60.0
# Name, results' part, figure, bar, and whether the bar is the least.
_BARS = (
    ("allocated, tensor parallelism 1: median error", "allocated", "median_error", 0.10, False),
    ("allocated: share in the 90 % interval, of 0.85 to 0.95", "allocated", "within_90", 0.85, True),
    ("reserved or shown: median error", "reserved or shown", "median_error", 0.15, False),
    ("fits or not: share that is right", "facts", "right", 0.90, True),
    ("... of rows whose source says what is recomputed", "facts, decided", "right", 0.90, True),
)
_SPEED_BARS = (
    ("rank correlation, mean of the groups", "rank_correlation_mean", 0.8, True),
    ("lost by the first choice, median", "lost_by_first_choice_median", 0.05, False),
)


def run_all(rows: Sequence[Mapping[str, Any]], file: Path, may_run: Callable[[], bool]) -> None:
    """Runs what the rows' files lack: rows that decide most first.

    Args:
        rows: measurements.
        file: that they are from.
        may_run: whether another run may begin.
    """
    bytes_file = store_of(file, row_bytes.STORE)
    decisive = [row for row in rows if row.get("peak_memory_gib") or row["outcome"] != "completed"]
    row_bytes.add(decisive, may_run, bytes_file)
    programs = [speed.program_for_speed(row) for row in rows if not speed.left_out(row)]
    row_runs.add(programs, may_run, store_of(file, row_runs.STORE))
    row_bytes.add(rows, may_run, bytes_file)


def results_of(rows: Sequence[Mapping[str, Any]], file: Path, mark: str = "") -> dict[str, Any]:
    """Returns the comparisons of memory and of speed, of runs by the code with a mark alone if there is one."""
    return {
        "memory": memory.results_of(rows, store_of(file, row_bytes.STORE), mark),
        "speed": speed.compared(rows, Efficiencies(), False, store_of(file, row_runs.STORE), mark),
    }


def text_of(rows: Sequence[Mapping[str, Any]], results: Mapping[str, Any]) -> str:
    """Returns the figures beside their bars, and the rows that are not compared with the reasons."""
    found = results["memory"]["summary"]
    lines = [f"{len(rows)} rows", "", "Memory"]
    for name, part, figure, bar, is_least in _BARS:
        some = found.get(part) or {}
        lines.append(_line(f"{name} ({some.get('rows', 0)} rows)", some.get(figure), bar, is_least))
    ordered, figures = results["speed"]["by_configuration_alone"], results["speed"]["absolute"]
    lines += ["", f"Speed of {figures['rows']} rows, operations by {results['speed']['operations_by'] or 'none'}"]
    lines += [
        _line(f"{name} ({ordered['groups']} groups)", ordered[key], bar, is_least)
        for name, key, bar, is_least in _SPEED_BARS
    ]
    lines.append(f"  {figures.get('median_error')}  absolute error, median (no bar)")
    lines.append(f"  {figures.get('within_90')}  share in the 90 % interval (no bar)")
    not_compared = {
        "memory": {each["id"]: each["left_out"] for each in results["memory"]["rows"] if "left_out" in each},
        "speed": {
            **{row["id"]: why for row in rows if (why := speed.left_out(row))},
            **results["speed"]["failed"],
        },
    }
    for of, reasons in not_compared.items():
        by_reason: dict[str, list[str]] = defaultdict(list)
        for number, why in reasons.items():
            by_reason[why].append(str(number))
        lines += ["", f"Not compared in {of}: {len(reasons)} rows"]
        lines += [f"  {why}: {', '.join(numbers)}" for why, numbers in sorted(by_reason.items())]
    return "\n".join(lines)


def _line(name: str, value: float | None, bar: float, is_least: bool) -> str:
    if value is None:
        return f"  none  {name}"
    reached = value >= bar if is_least else value <= bar
    return f"  {value}  {name}; bar: {'at least' if is_least else 'at most'} {bar}{'' if reached else ' (missed)'}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs and compares the rows of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="a row in each line, as JSON with the fields of `rows.jsonl`")
    parser.add_argument("--to", type=Path, required=True, help="folder for the results of each row")
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="begin no run after so many (%(default)g)")
    chosen = parser.parse_args(arguments)
    until = time.monotonic() + 60 * chosen.minutes
    try:
        rows = read_rows(chosen.file)
        chosen.to.mkdir(parents=True, exist_ok=True)
    except InputError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        print(f"{chosen.to}: {error.strerror}. Give a folder that can be written.", file=sys.stderr)
        raise SystemExit(2) from None
    run_all(rows, chosen.file, lambda: time.monotonic() < until)
    results = results_of(rows, chosen.file, code())
    for name, part in results.items():
        (chosen.to / f"{name}.json").write_text(json.dumps(part, indent=1) + "\n")
    text = text_of(rows, results)
    (chosen.to / "summary.txt").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
