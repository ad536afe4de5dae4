"""The rule of DeepSpeed's autotuner (0.19.8, deepspeed/autotuning), as a search.

Names in comments are those of `autotuner.py` there unless they say otherwise. What it does besides, such as starting
processes, is left out, and so is the fault that ends its tuning of other knobs in an error (KeyError 'hostfile').
"""

import math
import random
from collections.abc import Generator
from typing import Any

from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.search.base import Search, SearchProblem
from zerotune.trial_lib.search.knobs import LEFT_OPEN, Arm
from zerotune.trial_lib.search.methods import SearchSettings

PERCENT_DIFF = 0.05  # constants.METRIC_PERCENT_DIFF_CONST
TUNING_SIZES = 3  # constants.AUTOTUNING_NUM_TUNING_MICRO_BATCH_SIZES_DEFAULT
EARLY_STOPPING, TUNER_TRIALS = 5, 50  # constants.AUTOTUNING_TUNER_EARLY_STOPPING_DEFAULT, ..._NUM_TRIALS_DEFAULT

_Plan = Generator[Candidate, float | None, None]


class DeepSpeedRule(Search):
    """Stages in ascending order, in each first the micro-batch size, then a grid of the other knobs.

    It runs one trial at a time, and drops offload. The rule lets the accumulation grow as sizes shrink; here it stays
    the configuration's. A trial is run once: where the rule would repeat one, it is answered from what is known.
    """

    def __init__(self, settings: SearchSettings, problem: SearchProblem, largest_size: int) -> None:
        """Starts with nothing asked for.

        Args:
            settings: of the search.
            problem: what it is about.
            largest_size: its `max_train_micro_batch_size_per_gpu`.
        """
        super().__init__(settings, problem)
        self._problem, self._largest = problem, self._allowed(largest_size)
        self._draws = random.Random(settings.seed)
        self._known: dict[tuple[str, int], float | None] = {}
        self._plan = self._tune()
        self._upcoming = self._advance(None)

    def _propose(self) -> Candidate | None:
        return None if self._in_flight else self._upcoming

    def _learn(self, candidate: Candidate, result: TrialResult) -> None:
        value = self._value(result)
        self._known[candidate.key] = value
        if value is not None:
            self._is_new_best(candidate, result, value)
        self._upcoming = self._advance(value)

    def _advance(self, value: float | None) -> Candidate | None:
        """Returns the next candidate of the plan that is not known yet; None at its end."""
        try:
            candidate = next(self._plan) if not self._known else self._plan.send(value)
            while candidate.key in self._known:
                candidate = self._plan.send(self._known[candidate.key])
        except StopIteration:
            return None
        return candidate

    def _tune(self) -> _Plan:
        """`tune`: the stages whose states and one sample's activations fit, in order."""
        best_size, largest, best = 0, 0, 0.0
        for arm in self._problem.space.arms:
            if "offload_optimizer" in arm.knobs["zero_optimization"] or self._room(arm.stage) <= self._sample:
                continue
            found = yield from self._tune_space(arm, largest, best_size, best)
            if found[1] > best_size:
                largest, best_size, best = found

    def _tune_space(
        self, arm: Arm, before: int, best_size_before: int, best_before: float
    ) -> Generator[Candidate, float | None, tuple[int, int, float]]:
        """`tune_space`: returns the largest size, the best one and its metric; zeros where the stage is passed over."""
        calculated = int(self._room(arm.stage) // self._sample)
        if calculated < before:
            return 0, 0, 0.0
        values: dict[int, float] = {}
        smallest, largest = yield from self._range_of_sizes(arm, before, calculated, values)
        if largest < before or smallest <= 0 or largest <= 0:
            return 0, 0, 0.0
        sizes = yield from self._tuning_sizes(arm, smallest, largest, values)
        size, best = max(values.items(), key=lambda each: each[1]) if values else (0, 0.0)
        if arm.stage == 0 or size <= best_size_before or best < best_before:
            return largest, size, best
        found = yield from self._tune_other_knobs(arm, sizes)
        if found is not None and found[1] > best:
            size, best = found
        return largest, size, best

    def _range_of_sizes(
        self, arm: Arm, before: int, calculated: int, values: dict[int, float]
    ) -> Generator[Candidate, float | None, tuple[int, int]]:
        """`get_min_max_micro_batch_size`."""
        smallest = before
        if smallest > calculated:
            return -1, -1
        own = self._problem.base_config["train_micro_batch_size_per_gpu"]
        for size in [smallest] if smallest >= 1 else list(dict.fromkeys((own, 1))):
            if (yield from self._measure(arm, size, values)) is not None:
                smallest = size
                break
        else:
            return -1, -1
        largest = min(calculated, self._largest)
        for size in (math.ceil(1.05 * largest), largest, int(0.95 * largest)):
            if size > self._largest:
                continue
            if size in values or (yield from self._measure(arm, size, values)) is not None:
                return smallest, size
        last = values[smallest]
        low, high = smallest, largest
        while low <= high:
            middle = (low + high) // 2
            if middle in values:
                low = middle + 1
                continue
            value = yield from self._measure(arm, middle, values)
            if value is None:
                high = middle - 1
                continue
            low = middle + 1
            if (value - last) / last < PERCENT_DIFF:  # "performance plateaus"
                break
            last = value
        return smallest, low - 1

    def _tuning_sizes(
        self, arm: Arm, smallest: int, largest: int, values: dict[int, float]
    ) -> Generator[Candidate, float | None, list[int]]:
        """`get_tuning_micro_batch_size_list` and `run_tuning_micro_batch_sizes`."""
        accumulation = self._accumulation
        low = max(smallest, largest // 2)
        stride = max(1, (largest - low) // TUNING_SIZES)
        a_rank = largest * accumulation
        sizes = [size for size in range(low, largest, stride) if a_rank // size != accumulation] + [largest]
        for size in sizes:
            yield from self._measure(arm, size, values)
        low = sizes[-2] + 1 if len(sizes) > 1 else smallest
        best, best_size = values.get(largest, 0.0), largest
        for size in reversed(range(low, largest, max(1, (largest - low) // 3))):
            value = yield from self._measure(arm, size, values)
            if value is None or value <= best * (1 + PERCENT_DIFF):
                break
            best, best_size = value, size
        return [*sizes[:-1], best_size]

    def _tune_other_knobs(
        self, arm: Arm, sizes: list[int]
    ) -> Generator[Candidate, float | None, tuple[int, float] | None]:
        """`_generate_experiments` and `GridSearchTuner`, its default; `remove_dupe_dicts` leaves the grid unordered."""
        grid = [(index, size) for index in range(arm.size) for size in sizes]
        self._draws.shuffle(grid)
        best: tuple[int, float] | None = None
        best_at = 0
        for at, (index, size) in enumerate(grid[:TUNER_TRIALS]):
            value = yield self._candidate(arm.family(index), size)
            if best is None:  # a failure counts until something has run
                best_at = at
            if value is not None and (best is None or value > best[1]):
                best, best_at = (size, value), at
            if at + 1 >= best_at + EARLY_STOPPING:
                break
        return best

    def _measure(
        self, arm: Arm, size: int, values: dict[int, float]
    ) -> Generator[Candidate, float | None, float | None]:
        """Yields an arm's default at a size, and returns its metric; None if it did not run."""
        value = yield self._candidate(_default(arm), size)
        if value is not None:
            values[size] = value
        return value

    def _candidate(self, knobs: dict[str, Any], size: int) -> Candidate:
        return self._with_own_accumulation(knobs, size)

    @property
    def _sample(self) -> int:
        return self._problem.profile.activation_mem_per_gpu

    def _room(self, stage: int) -> float:
        """`get_instantiation_memory_required_per_gpu`, taken from what the device has; bf16 counts as fp32 there."""
        half = bool(self._problem.base_config.get("fp16", {}).get("enabled"))
        params, slots = self._problem.profile.num_params, self._problem.slots
        weights, gradients, optimizer = (2, 2, 16) if half else (4, 4, 8)
        states = (
            weights * params / (slots if stage >= 3 else 1)
            + gradients * params / (slots if stage >= 2 else 1)
            + optimizer * params / (slots if stage >= 1 else 1)
        )
        return self._problem.profile.gpu_mem - states


def _default(arm: Arm) -> dict[str, Any]:
    """Returns DeepSpeed's default of an arm: the best guess of the space, but for what that has otherwise."""
    return arm.with_fine({knob.path: LEFT_OPEN[knob.path] for knob in arm.fine if knob.path in LEFT_OPEN})
