"""Counts which shapes of peaks recorded programs have, and prints the constants of the memory model.

python -m benchmarks.memory_model.shapes

A program's trials say how likely each shape is, whatever the other programs are. So the shares of the shapes follow
from the programs' likelihoods alone, by expectation and maximisation. Each share has half a program more than was seen
(Jeffreys' prior): what none of a few programs is, the next one may be.
"""

import argparse
import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.memory_model.foresee import FORESEEN, OTHERS, REPLAY
from benchmarks.memory_model.record import HELD_OUT, TABLES
from benchmarks.replay.recorded import RecordedTable, TableRow, read_table
from benchmarks.replay.table import TableWorld
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.allocations import ForeseenArm
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.memory_model import MULTIPLES, SHAPES, MemoryModel, Shapes

FOLDERS = (REPLAY / "tables", OTHERS, REPLAY / "switched_tables", TABLES)
# Tables of one program under two names are left out together.
SAME_PROGRAM = {"slow_store": "store", "compiled_store": "store", "small_llama": "llama", "divided_llama": "llama"}
_ROWS = 40  # of a table, at random: more say little more
_ROUNDS, _HALF = 200, 0.5


@dataclass(frozen=True)
class Program:
    """A recorded table of a program."""

    name: str
    table: RecordedTable
    world: TableWorld
    foreseen: tuple[ForeseenArm, ...]

    def model(self, shapes: Shapes | None = None) -> MemoryModel:
        """Returns a model that knows nothing of the program but its figures, with the product's shapes by default."""
        head = self.table.head
        basis = MemoryBasis(head.profile, head.base_config, head.slots, head.device, self.foreseen)
        beside = {} if shapes is None else {"shapes": shapes}
        return MemoryModel(basis, self.world.problem.space.coarse_switches, **beside)

    @property
    def rows(self) -> list[TableRow]:
        return [row for rows in self.table.rows.values() for row in rows if row.outcome is not Outcome.CRASHED]


def programs(is_foreseen: bool, names: Collection[str] = ()) -> list[Program]:
    """Returns the recorded programs with these names; by default all but those that were held out."""
    found = []
    for path in sorted(path for folder in FOLDERS for path in folder.glob("*.jsonl")):
        if path.stem not in (names or {path.stem} - {*HELD_OUT}):
            continue
        arms = FORESEEN / f"{path.stem}.json"
        foreseen = json.loads(arms.read_text()) if is_foreseen and arms.exists() else []
        if is_foreseen and not foreseen:
            continue
        table = read_table(path)
        name = SAME_PROGRAM.get(path.stem, path.stem)
        found.append(Program(name, table, TableWorld(table), tuple(map(ForeseenArm.from_json, foreseen))))
    return found


def observe(model: MemoryModel, row: TableRow) -> None:
    """Tells the model one recorded trial."""
    ended: dict[str, Any] = {"outcome": row.outcome, "memory": row.memory}
    result = TrialResult(trial_id="recorded", number=0, purpose=Purpose.RECORD, config_hash="", **ended)
    model.observe(row.candidate, result)


def log_likelihoods(program: Program) -> np.ndarray:
    """Returns the logarithm of the likelihood of some of a program's peaks, by shape: the order of `Shapes.priors`."""
    kind = SHAPES["cpu", bool(program.foreseen)]
    even = replace(kind, multiples=(1 / len(MULTIPLES),) * len(MULTIPLES), at_once=0.5, pairs=0.5)
    model = program.model(even)
    rows = [row for row in program.rows if row.outcome is Outcome.COMPLETED]
    rows = [row for row in rows if model._describe(row.candidate.knobs).switches == model._typed]
    for row in random.Random(0).sample(rows, min(_ROWS, len(rows))):
        observe(model, row)
    peaks = model._peaks_with[model._typed]
    by_shape = np.logaddexp.reduce(peaks._log_weights.reshape(len(even.priors), -1), axis=1)
    found: np.ndarray = by_shape - np.log([prior.weight for prior in even.priors])
    return found - found.max()


def shares(likelihoods: Sequence[np.ndarray], kind: Shapes) -> Shapes:
    """Returns how common the shapes are among programs with these likelihoods. The rest is as the kind has it."""
    count = len(MULTIPLES)
    known = np.exp(likelihoods)
    with_pairs = known[:, count] > np.delete(known, count, axis=1).sum(1)
    near = np.stack([known[~with_pairs, :count], known[~with_pairs, count + 1 :]], axis=2)
    multiples, at_once = np.full(count, 1 / count), 0.5
    for _ in range(_ROUNDS):
        each = near * multiples[:, None] * np.array([1 - at_once, at_once])
        each /= each.sum((1, 2), keepdims=True)
        multiples = each.sum((0, 2)) + _HALF
        multiples /= multiples.sum()
        at_once = (float(each[:, :, 1].sum()) + _HALF) / (len(near) + 2 * _HALF)
    pairs = (int(with_pairs.sum()) + _HALF) / (len(known) + 2 * _HALF)
    rounded = tuple(round(share, 3) for share in multiples.tolist())
    return replace(kind, multiples=rounded, at_once=round(at_once, 3), pairs=round(pairs, 3))


def shares_of_all(is_foreseen: bool) -> Shapes:
    """Returns how common the shapes are among all programs but those that were held out."""
    return shares([log_likelihoods(each) for each in programs(is_foreseen)], SHAPES["cpu", is_foreseen])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for is_foreseen in (False, True):
        print(f'("cpu", {is_foreseen}): {shares_of_all(is_foreseen)}')


if __name__ == "__main__":
    main()
