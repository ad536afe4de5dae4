"""How well the memory model foresees recorded trials: its error, its intervals, and what it would have let run."""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

from rich.console import Console
from rich.table import Table

from benchmarks.replay.recorded import RecordedTable, TableRow, read_table
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.allocations import ForeseenArm
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.memory_model import MemoryModel
from zerotune.trial_lib.search.methods import AdaptiveSettings
from zerotune.trial_lib.search.zero_settings import arm_label

TABLES = Path(__file__).parents[1] / "replay" / "tables"
FORESEEN = Path(__file__).parent / "foreseen"
RESULTS = Path(__file__).parents[1] / "results" / "memory_model.json"
CONFIDENCE = 0.9
HEADROOM = AdaptiveSettings().memory_headroom
OTHER_TRIALS = 2  # of each other arm, as a race between arms leaves behind

SHOWN = (
    "median_error",
    "median_error_of_a_constant",
    "coverage_90",
    "let_run_out_of_memory",
    "completed_held_back",
)

# What the model had been told when it was asked about an arm.
PROFILE, ALONE, OTHERS, TWO_ALONE, TWO = (
    "the profile's figures alone",
    "one trial of the user's own stage",
    "two trials of each other arm",
    "two trials of the arm, none of others",
    "two trials of each arm",
)
# The same with the bytes of foreseen runs as the prior, which `foresee.py` has written.
FORESEEN_ALONE, FORESEEN_ONE, FORESEEN_OTHERS, FORESEEN_TWO = (
    "foreseen bytes alone",
    f"foreseen bytes, {ALONE}",
    f"foreseen bytes, {OTHERS}",
    f"foreseen bytes, {TWO}",
)
WITH_FORESEEN = {FORESEEN_ALONE: PROFILE, FORESEEN_ONE: ALONE, FORESEEN_OTHERS: OTHERS, FORESEEN_TWO: TWO}


@dataclass
class Tally:
    """What was foreseen of an arm's trials.

    Attributes:
        errors: of the memory above initialisation, as shares of what was measured.
        inside: whether the measured value was in the 90 % interval.
        let_run: of candidates that the model would have let run, whether they completed.
        held_back: of candidates that completed, whether the model would have held them back.
        constant: errors of a constant guess, the mean of what was told.
    """

    errors: list[float] = field(default_factory=list)
    inside: list[bool] = field(default_factory=list)
    let_run: list[bool] = field(default_factory=list)
    held_back: list[bool] = field(default_factory=list)
    constant: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, float | int | None]:
        """Returns what the results file has of it."""
        return {
            "predictions": len(self.errors),
            "median_error": _rounded(median(self.errors)) if self.errors else None,
            "median_error_of_a_constant": _rounded(median(self.constant)) if self.constant else None,
            "coverage_90": _share(self.inside),
            "let_run": len(self.let_run),
            "let_run_out_of_memory": _share([not completed for completed in self.let_run]),
            "completed_held_back": _share(self.held_back),
        }


def measured(row: TableRow) -> float:
    """Returns the memory above initialisation of a completed trial, on the rank that took most."""
    return max(peak - after for peak, after in zip(row.memory.peak, row.memory.after_initialize, strict=True))


def observe(model: MemoryModel, row: TableRow) -> None:
    """Tells the model one recorded trial."""
    result = TrialResult(
        trial_id="recorded",
        number=0,
        purpose=Purpose.RECORD,
        config_hash="",
        outcome=row.outcome,
        memory=row.memory,
    )
    model.observe(row.candidate, result)


def new_model(table: RecordedTable, foreseen: Sequence[ForeseenArm] = ()) -> MemoryModel:
    """Returns a model that knows what the profile trial found of the model and the device."""
    head = table.head
    return MemoryModel(MemoryBasis(head.profile, head.base_config, head.slots, head.device, foreseen))


def foreseen_arms(name: str) -> list[ForeseenArm]:
    """Returns the foreseen arms of a table; none if it was not foreseen."""
    path = FORESEEN / f"{name}.json"
    return [ForeseenArm.from_json(arm) for arm in json.loads(path.read_text())] if path.exists() else []


def rows_by_arm(table: RecordedTable) -> dict[str, list[TableRow]]:
    """Returns a table's trials by the arm that they belong to."""
    arms: dict[str, list[TableRow]] = {}
    for rows in table.rows.values():
        arms.setdefault(arm_label(rows[0].candidate.complete(table.head.base_config)), []).extend(rows)
    return dict(sorted(arms.items()))


def foresee(model: MemoryModel, told: Sequence[TableRow], rows: Sequence[TableRow], tally: Tally) -> None:
    """Compares what the model says of trials, after what it was told, with what was recorded of them."""
    guess = mean(measured(row) for row in told) if told else None
    for row in rows:
        fits = model.probability_fits(row.candidate, HEADROOM) >= CONFIDENCE
        completed = row.outcome is Outcome.COMPLETED
        if fits:
            tally.let_run.append(completed)
        if completed:
            prediction = model.above_initialize(row.candidate)
            tally.errors.append(abs(prediction.value / measured(row) - 1))
            tally.inside.append(prediction.low <= measured(row) <= prediction.high)
            tally.held_back.append(not fits)
            if guess is not None:
                tally.constant.append(abs(guess / measured(row) - 1))


def completed_of(rows: Sequence[TableRow]) -> list[TableRow]:
    """Returns the trials that completed."""
    return [row for row in rows if row.outcome is Outcome.COMPLETED]


def one_order(table: RecordedTable, rng: random.Random, tallies: Callable[[str, str], Tally]) -> None:
    """Draws the trials that the model is told, and compares it with all the others."""
    arms = {arm: rng.sample(rows, len(rows)) for arm, rows in rows_by_arm(table).items()}
    first = {arm: completed_of(rows)[:OTHER_TRIALS] for arm, rows in arms.items()}
    own_arm = arm_label(table.head.base_config)
    smallest = min(completed_of(arms.get(own_arm) or next(iter(arms.values()))), key=_size)
    for arm, rows in arms.items():
        others = [row for other, told in first.items() if other != arm for row in told]
        rng.shuffle(others)
        told: dict[str, list[TableRow]] = {
            PROFILE: [],
            ALONE: [smallest],
            OTHERS: [smallest, *others],
            TWO_ALONE: first[arm],
            TWO: [smallest, *others, *first[arm]],
        }
        foreseen = foreseen_arms(table.head.name)
        if foreseen:
            told |= {situation: told[plain] for situation, plain in WITH_FORESEEN.items()}
        for situation, history in told.items():
            model = new_model(table, foreseen if situation in WITH_FORESEEN else ())
            for row in history:
                observe(model, row)
            rest = [row for row in rows if all(row is not known for known in history)]
            foresee(model, history, rest, tallies(arm, situation))


def evaluate(table: RecordedTable, orders: int) -> dict[str, object]:
    """Returns the figures of a table, by arm and by what the model had been told."""
    by_arm: dict[str, dict[str, Tally]] = {}

    def tallies(arm: str, situation: str) -> Tally:
        return by_arm.setdefault(arm, {}).setdefault(situation, Tally())

    for seed in range(orders):
        one_order(table, random.Random(seed), tallies)
    recorded = [row for rows in table.rows.values() for row in rows]
    together: dict[str, Tally] = {}
    for situations in by_arm.values():
        for situation, tally in situations.items():
            whole = together.setdefault(situation, Tally())
            for name, values in vars(tally).items():
                getattr(whole, name).extend(values)
    return {
        "trials": len(recorded),
        "completed": len(completed_of(recorded)),
        "arms": {
            arm: {situation: tally.figures() for situation, tally in situations.items()}
            for arm, situations in [*by_arm.items(), ("all", together)]
        },
    }


def show(name: str, figures: dict[str, object]) -> None:
    """Prints the figures of a table."""
    table = Table(title=f"{name}: {figures['trials']} trials, {figures['completed']} of them completed")
    for column in ("arm", "the model had been told", "median error", "of a constant", "in the 90 % interval"):
        table.add_column(column)
    table.add_column("let run: out of memory")
    table.add_column("completed, held back")
    arms = figures["arms"]
    assert isinstance(arms, dict)
    for arm, situations in arms.items():
        for situation, values in situations.items():
            shown = ["" if values[share] is None else f"{values[share]:.1%}" for share in SHOWN]
            table.add_row(arm, situation, *shown)
        table.add_section()
    Console(width=160).print(table)


def _size(row: TableRow) -> int:
    return row.candidate.micro_batch_size


def _share(cases: Sequence[bool]) -> float | None:
    return _rounded(sum(cases) / len(cases)) if cases else None


def _rounded(share: float) -> float:
    return round(share, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", type=Path, help="recorded tables; all of benchmarks/replay/tables if none")
    parser.add_argument("--orders", type=int, default=20, help="random orders of the trials")
    arguments = parser.parse_args()
    paths = arguments.tables or sorted(TABLES.glob("*.jsonl"))
    results = {path.stem: evaluate(read_table(path), arguments.orders) for path in paths}
    for name, figures in results.items():
        show(name, figures)
    RESULTS.write_text(json.dumps({"orders": arguments.orders, "tables": results}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
