"""Surveys, in a run of the program as typed, the share of a step that the code waits for its data loader."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from trial_lib.measure.batches.loader_batches import loader_batches
from trial_lib.measure.batches.loader_refusals import refusal
from trial_lib.measure.libraries.data_loaders import origins
from trial_lib.measure.program_facts import ProgramFacts
from trial_lib.wire.turned import LOADER_OPTIONS, PERSISTENT, PINNED, PREFETCH, WORKERS

# The first step shows whether the code waits at all. Further ones make the share steadier.
_STEPS, _SECONDS = 4, 5.0
_NO_WAIT = 0.01
# A smaller share cannot bring what a confirmation can tell from noise.
_LEAST_SHARE = 0.03
# More workers than this are no choice of a search.
_MOST = 16
_ALL = (WORKERS, PREFETCH, PINNED, PERSISTENT)


class LoadingSurvey:
    """Looks at some steps after the counted one, because the first batch of a loader takes longer than the others.

    Args:
        facts: collect the findings.
        most: returns the largest of each value over all ranks; each of them calls it.
        is_apart: whether batches are copied to a device with memory of its own.
    """

    def __init__(self, facts: ProgramFacts, most: Callable[[list[float]], list[float]], is_apart: bool) -> None:
        self._facts = facts
        self._most = most
        self._is_apart = is_apart
        self._steps = -1
        self._started = self._waited_before = 0.0
        self._is_over = False

    def step_ended(self) -> bool:
        """Returns whether the code has to train on. Every rank calls it after the same optimizer steps."""
        if self._is_over:
            return False
        self._steps += 1
        if not self._steps:
            self._started, self._waited_before = time.monotonic(), loader_batches.waited_s
            loader_batches.is_surveyed = True
        elapsed = time.monotonic() - self._started
        waited = loader_batches.waited_s - self._waited_before
        is_read = float(loader_batches.training_loader is not None)
        share = waited / elapsed if self._steps else 0.0
        most_share, most_elapsed, some_read = self._most([share, elapsed, is_read])
        is_enough = self._steps >= _STEPS or most_elapsed > _SECONDS or most_share < _NO_WAIT
        self._is_over = not some_read or (self._steps > 0 and is_enough)
        if self._steps or self._is_over:
            self._note(most_share)
        loader_batches.is_surveyed = not self._is_over
        return not self._is_over

    def _note(self, share: float) -> None:
        loader = loader_batches.training_loader
        if loader is None:
            self._facts.not_turnable |= dict.fromkeys(_ALL, "the program trains from no data loader of torch's")
            return
        line, by_trainer = origins.of(loader)
        why_not = refusal(loader, loader_batches.gives_from_device)
        if not by_trainer:
            self._facts.forget_options(LOADER_OPTIONS.values())
        self._facts.loading = {
            "share": share,
            "num_workers": int(loader.num_workers),
            "prefetch_factor": loader.prefetch_factor,
            "pin_memory": bool(loader.pin_memory),
            "cores": cores_of_a_rank(),
            "refusal": why_not,
            "draws": loader_batches.draws_numbers,
            "made_at": line,
            "by_trainer": by_trainer,
        }
        for place in _ALL:
            self._facts.turnable.pop(place, None)
            self._facts.not_turnable.pop(place, None)
        if share < _LEAST_SHARE:
            reason = f"the program waits {share:.1%} of a step for its data loader, which is too little to gain"
            self._facts.not_turnable |= dict.fromkeys(_ALL, reason)
            return
        own = int(loader.num_workers)
        workers = [own, *(number for number in range(min(cores_of_a_rank(), _MOST) + 1) if number != own)]
        of_workers = {
            WORKERS: workers,
            PREFETCH: _own_first(loader.prefetch_factor or 2, (2, 4, 8)),
            PERSISTENT: _own_first(bool(loader.persistent_workers), (False, True)),
        }
        if why_not:
            self._facts.not_turnable |= dict.fromkeys(of_workers, why_not)
        else:
            self._facts.turnable |= of_workers
        if self._is_apart and not loader_batches.gives_from_device:
            self._facts.turnable[PINNED] = _own_first(bool(loader.pin_memory), (True, False))
        else:
            self._facts.not_turnable[PINNED] = "batches are copied to no accelerator from the loader's memory"


def _own_first(own: Any, values: Sequence[Any]) -> list[Any]:
    return [own, *(value for value in values if value != own)]


def cores_of_a_rank() -> int:
    """Returns the cores that this rank may use for itself."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    # A rank of a CPU has cores of its own. Those of GPUs share the host's.
    return max(1, cores // ranks)
