"""Compares the first prediction of each arm, before any trial, with the recorded peaks: by formulas, and foreseen."""

import json
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.memory_model.foresee import FORESEEN, PROGRAMS
from benchmarks.memory_model.run import completed_of, measured, rows_by_arm
from benchmarks.replay.recorded import RecordedTable, read_table
from zerotune.trial_lib.search.allocations import ForeseenArm
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.memory_model import MemoryModel

RESULTS = FORESEEN.parents[1] / "results" / "first_predictions.json"
FIGURES = ("formulas", "foreseen")


def first_predictions(table: RecordedTable, arms: list[ForeseenArm]) -> dict[str, dict[str, float]]:
    """Returns the median error of each arm's trials, and the share of them in the 90 % interval."""
    head = table.head
    found: dict[str, dict[str, float]] = {}
    for label, rows in rows_by_arm(table).items():
        completed = completed_of(rows)
        figures: dict[str, float] = {"trials": len(completed)}
        for name, foreseen in zip(FIGURES, ((), arms), strict=True):
            model = MemoryModel(MemoryBasis(head.profile, head.base_config, head.slots, head.device, foreseen))
            pairs = [(model.above_initialize(row.candidate), measured(row)) for row in completed]
            figures[f"{name}_error"] = round(median(abs(guess.value / real - 1) for guess, real in pairs), 4)
            inside = sum(guess.low <= real <= guess.high for guess, real in pairs)
            figures[f"{name}_in_interval"] = round(inside / len(pairs), 4)
        found[label] = figures
    return found


def main() -> None:
    results, shown = {}, Table(title="first predictions: median error of an arm's trials (in the 90 % interval)")
    for column in ("table", "arm", *FIGURES):
        shown.add_column(column)
    for name, (path, _, _) in PROGRAMS.items():
        arms = [ForeseenArm.from_json(arm) for arm in json.loads((FORESEEN / f"{name}.json").read_text())]
        results[name] = first_predictions(read_table(path), arms)
        for label, figures in results[name].items():
            cells = (f"{figures[f'{each}_error']:.1%} ({figures[f'{each}_in_interval']:.0%})" for each in FIGURES)
            shown.add_row(name, label, *cells)
        for each in FIGURES:
            errors = [figures[f"{each}_error"] for figures in results[name].values()]
            shown.add_row(name, f"all arms by {each}", f"median {median(errors):.1%}", f"worst {max(errors):.1%}")
        shown.add_section()
    Console(width=110).print(shown)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
