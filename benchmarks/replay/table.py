"""A recorded table as a world.

A trial of a recorded candidate is one of its repeats, drawn at random, but for its throughput: the truth is what all
repeats of the table let expect of it (`denoise.py`), and a trial reads that with a disturbance drawn from those of all
repeats. Its own few would be off the truth in every trial alike. A trial whose row ended with an error does so too, and
so do unrecorded sizes nearest to that row. Throughput is taken from CPU time (samples per CPU
second times ranks), which a busy machine disturbs less. A wait for data takes no processor time. So the time in which a
store answers, which is a constant of its program's command, is added to it. Between recorded sizes of a family, step
time and memory are linear; what lies beyond the recorded sizes does not fit.
"""

import json
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.replay.denoise import Cell, expected_logs
from benchmarks.replay.recorded import RecordedTable, TableRow, read_table
from benchmarks.replay.space_of_table import nearest, space_of
from benchmarks.replay.world import START_UP, World
from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH
from zerotune.trial_lib.messages.measurement import Memory
from zerotune.trial_lib.messages.turned import WORKERS
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.records.switches import switches_of
from zerotune.trial_lib.search.base import SearchProblem
from zerotune.trial_lib.search.knobs import SearchSpace

_ANSWER = "--answer-ms"  # of the program with a slow store (switched_programs)


class TableWorld(World):
    """A table's candidates, and the sizes between them."""

    def __init__(self, table: RecordedTable) -> None:
        """Takes over a table.

        Raises:
            ValueError: the table is no full grid, or not of one accumulation.
        """
        head = table.head
        accumulations = {candidate.gradient_accumulation_steps for candidate in table.candidates()}
        if len(accumulations) != 1:
            raise ValueError(f"the table has candidates of several accumulations: {sorted(accumulations)}")
        self.name = head.name
        by_family: dict[str, dict[int, list[TableRow]]] = {}
        for rows in table.rows.values():
            candidate = rows[0].candidate
            by_family.setdefault(_name(candidate.knobs), {})[candidate.micro_batch_size] = rows
        space = space_of(json.loads(name) for name in by_family)
        base = {key: value for key, value in head.base_config.items() if key != TRAIN_BATCH}
        base[ACCUMULATION] = accumulations.pop()
        self.problem = SearchProblem(space, head.profile, base, head.slots, head.device, can_sweep=True)
        waits = _answer_s(head.entrypoint)
        self._families = {name: _RecordedFamily(rows, head.slots, waits) for name, rows in by_family.items()}
        self._find_limits(space)
        self._find_truths(space)
        self.largest_size = max(size for rows in by_family.values() for size in rows)
        self.submitted = self.candidate(nearest(space, base), base[MICRO_BATCH])

    @classmethod
    def read(cls, path: Path) -> "TableWorld":
        """Returns the world of a table's file.

        Raises:
            InputError: it is no table.
            ValueError: the table is no full grid, or not of one accumulation.
        """
        return cls(read_table(path))

    @property
    def grid(self) -> Sequence[int]:
        """The recorded sizes."""
        return sorted({size for family in self._families.values() for size in family.rows})

    @cached_property
    def noise(self) -> float:  # type: ignore[override]
        """Pooled over the candidates that were repeated: of the logarithm, so relative."""
        return math.sqrt(fmean(each * each for each in self._disturbances)) if self._disturbances else 0.0

    @cached_property
    def _disturbances(self) -> list[float]:
        """What each repeat's logarithm was off its candidate's mean, widened by what the mean has taken of it."""
        disturbances: list[float] = []
        for family in self._families.values():
            for rows in family.completed.values():
                logs = [math.log(family.throughput(row)) for row in rows]
                if (number := len(logs)) > 1:
                    widened = math.sqrt(number / (number - 1))
                    disturbances += [widened * (each - fmean(logs)) for each in logs]
        return disturbances

    def _find_limits(self, space: SearchSpace) -> None:
        for arm in space.arms:
            families = [self._families[_name(arm.family(index))] for index in range(arm.size)]
            limit = max(family.most_needed for family in families)
            for family in families:
                family.limit = limit

    def _find_truths(self, space: SearchSpace) -> None:
        arms = {_name(arm.family(index)): place for place, arm in enumerate(space.arms) for index in range(arm.size)}
        cells = [
            Cell(arms[name], name, size, tuple(math.log(family.throughput(row)) for row in rows))
            for name, family in self._families.items()
            for size, rows in family.completed.items()
        ]
        for cell, expected in zip(cells, expected_logs(cells, self.noise), strict=True):
            self._families[cell.family].truths[cell.size] = math.exp(expected)

    def run(self, candidate: Candidate, draws: random.Random) -> TrialResult:
        """Returns how one of the candidate's repeats ended, or what lies between those of its neighbours."""
        family, size = self._families[_name(candidate.knobs)], candidate.micro_batch_size
        rows = family.rows.get(size)
        row = None if rows is None else draws.choice(rows)
        if family.crashes:
            return self.crashed(candidate, family.failed_phases(size))
        if row is not None and row.outcome is not Outcome.COMPLETED:
            return self._failed(candidate, row, row.phases)
        if row is None and not family.fits(size):
            return self._failed(candidate, family.failed_beside(size), family.failed_phases(size))
        throughput = family.true_throughput(size) * math.exp(draws.choice(self._disturbances or [0.0]))
        if row is not None:
            return self.completed(candidate, throughput, row.step_times, row.memory, row.phases)
        near = draws.choice(family.completed[min(family.sizes, key=lambda other: abs(other - size))])
        return self.completed(candidate, throughput, near.step_times, family.memory(size), family.phases(size))

    def _failed(self, candidate: Candidate, row: TableRow | None, phases: Mapping[str, float]) -> TrialResult:
        """Returns the result of a trial that ends as a row did. Beyond all rows it runs out of memory."""
        if row is not None and row.outcome is Outcome.CRASHED:
            return self.crashed(candidate, phases)
        return self.out_of_memory(candidate, phases)

    def truth(self, candidate: Candidate) -> float | None:
        """Returns what is expected of a training; None where a repeat failed: it would end so some day."""
        family, size = self._families[_name(candidate.knobs)], candidate.micro_batch_size
        return family.true_throughput(size) if family.fits(size) else None


def _answer_s(command: Sequence[str]) -> float:
    """Returns the seconds for which the store of a table's program answers; 0 if its command has none."""
    words = list(command)
    return float(words[words.index(_ANSWER) + 1]) / 1000 if _ANSWER in words else 0.0


class _RecordedFamily:
    """The rows of one family, and the lines between them.

    Attributes:
        rows: by micro-batch size.
        completed: those of the sizes of which every repeat completed, by size.
        sizes: ascending, those of `completed`.
        crashes: whether every size of it ended with an error.
        truths: throughput without noise (samples/s over all ranks), by size of `completed`.
        limit: bytes above initialisation that fit: the most that any family of the arm is known to have had.
    """

    def __init__(self, rows: dict[int, list[TableRow]], slots: int, answer_s: float) -> None:
        self.rows = rows
        self._slots = slots
        self._answer_s = answer_s
        self.completed = {
            size: repeats for size, repeats in rows.items() if all(row.outcome is Outcome.COMPLETED for row in repeats)
        }
        self.sizes = sorted(self.completed)
        self.crashes = all(row.outcome is Outcome.CRASHED for repeats in rows.values() for row in repeats)
        self.truths: dict[int, float] = {}
        self.limit = 0.0

    def throughput(self, row: TableRow) -> float:
        """Returns samples per CPU second times ranks, with the seconds for which the loader's store answers.

        A loader without workers waits for each sample. The rank computes while workers wait.
        """
        seconds = row.metrics["cpu_time_per_sample"]
        workers = switches_of(row.candidate.knobs).get(WORKERS, 0)
        return self._slots / (max(seconds, self._answer_s / workers) if workers else seconds + self._answer_s)

    def true_throughput(self, size: int) -> float:
        """Returns the throughput without noise of a size that fits."""
        return size / self._line(size, lambda other: other / self.truths[other])

    def fits(self, size: int) -> bool:
        """Returns whether a size does.

        Between the largest that ran and the smallest above it that did not, the need grows on as before, but to no
        less than the limit.
        """
        if not self.sizes:
            return False
        largest = self.sizes[-1]
        if size in self.rows or size <= largest:
            return size in self.completed or size not in self.rows
        failed = min((other for other in self.rows if other > largest), default=largest)
        if size >= failed:
            return False
        need = self._need(largest)
        at_failed = max(self.limit, self._line(failed, self._need))
        return need + (at_failed - need) * (size - largest) / (failed - largest) < self.limit

    def memory(self, size: int) -> Memory:
        """Returns the bytes of a size that was not recorded."""
        rows = [row for repeats in self.completed.values() for row in repeats]
        after = [int(median(values)) for values in zip(*(row.memory.after_initialize for row in rows), strict=True)]
        available = [int(median(values)) for values in zip(*(row.memory.available for row in rows), strict=True)]
        need = int(self._line(size, self._need))
        return Memory(peak=[bytes_ + need for bytes_ in after], after_initialize=after, available=available)

    def phases(self, size: int) -> dict[str, float]:
        """Returns the seconds of each phase of a size that was not recorded and fits."""
        names = self.completed[self.sizes[0]][0].phases
        return {name: max(0.0, self._line(size, self._median_phase(name))) for name in names}

    def failed_beside(self, size: int) -> TableRow | None:
        """Returns the failed row nearest to a size that does not fit; None if all sizes above the fitting ones ran."""
        above = [repeats for other, repeats in self.rows.items() if not self.sizes or other > self.sizes[-1]]
        failed = [row for repeats in above for row in repeats if row.outcome is not Outcome.COMPLETED]
        return min(failed, key=lambda row: abs(row.candidate.micro_batch_size - size), default=None)

    def failed_phases(self, size: int) -> dict[str, float]:
        """Returns the seconds of each phase of a size that was not recorded and does not fit."""
        if (failed := self.failed_beside(size)) is not None:
            return failed.phases
        phases = self.phases(self.sizes[-1])
        return {name: phases[name] for name in (*START_UP, "first_step", "end")}

    def _median_phase(self, name: str) -> Callable[[int], float]:
        return lambda size: median(row.phases[name] for row in self.completed[size])

    def _need(self, size: int) -> float:
        """Returns the bytes above initialisation, of the rank that needs most."""
        return median(
            max(peak - after for peak, after in zip(row.memory.peak, row.memory.after_initialize, strict=True))
            for row in self.completed[size]
        )

    @property
    def most_needed(self) -> float:
        """What there was to be had; more where a size ran that needed more: ranks share some of their peaks."""
        available = [min(row.memory.available) for repeats in self.completed.values() for row in repeats]
        return max([median(available), *(self._need(size) for size in self.sizes)]) if available else 0.0

    def _line(self, size: int, of: Callable[[int], float]) -> float:
        """Returns a quantity on the line through its neighbours among `sizes`; outside, through the nearest two."""
        if size in self.completed:
            return of(size)
        if len(self.sizes) == 1:
            return of(self.sizes[0])
        low, high = _around(self.sizes, size)
        at_low, at_high = of(low), of(high)
        if size > high:  # noise between the last two is no reason to need less
            at_high = max(at_low, at_high)
        line = at_low + (at_high - at_low) * (size - low) / (high - low)
        # Below the smallest, half of it has to be left: a smaller batch has no more than its share of the gain.
        return max(line, at_low * size / low) if size < low else line


def _around(sizes: Sequence[int], size: int) -> tuple[int, int]:
    place = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    return sizes[place - 1], sizes[place]


def _name(knobs: dict[str, Any]) -> str:
    return json.dumps(knobs, sort_keys=True)
