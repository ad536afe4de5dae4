"""The surveys of a profile trial's runs. They begin when the step is measured, while the code trains on."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from zerotune.trial_lib.messages.measurement import AcrossRows, Arrival, Loading
from zerotune.trial_lib.messages.turned import LOADER_OPTIONS, PERSISTENT, PINNED, PREFETCH, WORKERS
from zerotune.trial_lib.rank.engine_watch import EngineWatch, PipelineWatch
from zerotune.trial_lib.rank.loader_batches import loader_batches, refusal
from zerotune.trial_lib.rank.program_facts import ProgramFacts
from zerotune.trial_lib.rank.row_survey import RowSurvey, batch_norms, rounding_of
from zerotune.trial_lib.rank.torch_functions import can_run_eagerly, compilations, origins


class FlopSurvey:
    """Counts the FLOPs of one micro-batch, after the rest of a profile.

    A compiled function does not show its operators, so this micro-batch runs as its code is written. Its memory and its
    time are not the training's. It may even not fit: only compiled attention goes without its square of scores, for
    example. The program has compiled its functions by then, and uses them again afterwards. So the results are saved
    before, by `about_to_count`, and nothing may be added to them.
    """

    def __init__(
        self, watch: EngineWatch, most: Callable[[list[float]], list[float]], about_to_count: Callable[[], None]
    ) -> None:
        self._watch = watch
        self._most = most
        self._about_to_count = about_to_count
        self._steps_left: int | None = None

    def step_ended(self, holds_other_batches: bool) -> bool:
        if self._steps_left is None:
            # Under DeepCompile the compiled graph reduces the gradients. Code that runs as written would train nothing.
            is_deep = getattr(self._watch.engine, "is_deepcompile_active", lambda: False)()
            (cannot_count,) = self._most([float(is_deep or not can_run_eagerly())])
            if cannot_count:
                return False
            self._about_to_count()
            self._steps_left = 2 if holds_other_batches else 1
        else:
            self._steps_left -= 1
        if self._steps_left == 1:
            self._watch.model.count_flops()
        return self._steps_left > 0


# In a run as typed: the share of a step that the code waits for its data loader

# The first step shows whether the code waits at all. Further ones make the share steadier.
_STEPS, _SECONDS = 4, 5.0
_NO_WAIT = 0.01
# A smaller share cannot bring what a confirmation can tell from noise.
_LEAST_SHARE = 0.03
# More workers than this are no choice of a search.
_MOST = 16
_ALL = (WORKERS, PREFETCH, PINNED, PERSISTENT)


class LoadingSurvey:
    """Looks at some steps after the counted one: a loader's first batch takes longer.

    `is_apart`: batches are copied.
    """

    def __init__(self, facts: ProgramFacts, most: Callable[[list[float]], list[float]], is_apart: bool) -> None:
        self._facts = facts
        self._most = most
        self._is_apart = is_apart
        self._steps = -1
        self._started = self._waited_before = 0.0
        self._is_over = False

    def step_ended(self) -> bool:
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
        turnable, not_turnable = self._facts.found.turnable, self._facts.found.not_turnable
        if loader is None:
            not_turnable.update(dict.fromkeys(_ALL, "the program trains from no data loader of torch's"))
            return
        line, by_trainer = origins.of(loader)
        why_not = refusal(loader, loader_batches.gives_from_device)
        if not by_trainer:
            self._facts.forget_options(LOADER_OPTIONS.values())
        loading = Loading(
            share=share,
            num_workers=int(loader.num_workers),
            prefetch_factor=loader.prefetch_factor,
            pin_memory=bool(loader.pin_memory),
            cores=cores_of_a_rank(),
            refusal=why_not,
            made_at=line,
            by_trainer=by_trainer,
        )
        self._facts.note(loading=loading)
        # The switches of the loader, each with its values or with the reason why it has none
        for place in _ALL:
            turnable.pop(place, None)
            not_turnable.pop(place, None)
        if share < _LEAST_SHARE:
            reason = f"the program waits {share:.1%} of a step for its data loader, which is too little to gain"
            not_turnable.update(dict.fromkeys(_ALL, reason))
            return
        own = int(loader.num_workers)
        workers = [own, *(number for number in range(min(cores_of_a_rank(), _MOST) + 1) if number != own)]
        of_workers = {
            WORKERS: workers,
            PREFETCH: _own_first(loader.prefetch_factor or 2, (2, 4, 8)),
            PERSISTENT: _own_first(bool(loader.persistent_workers), (False, True)),
        }
        if why_not:
            not_turnable.update(dict.fromkeys(of_workers, why_not))
        else:
            turnable.update(of_workers)
        if self._is_apart and not loader_batches.gives_from_device:
            turnable[PINNED] = _own_first(bool(loader.pin_memory), (True, False))
        else:
            not_turnable[PINNED] = "batches are copied to no accelerator from the loader's memory"


def _own_first(own: Any, values: Sequence[Any]) -> list[Any]:
    return [own, *(value for value in values if value != own)]


def cores_of_a_rank() -> int:
    """The cores that this rank may use for itself."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cores = len(os.sched_getaffinity(0))
    # A rank of a CPU has cores of its own. Those of GPUs share the host's.
    return max(1, cores // ranks)


# In a run as typed: whether micro-batches differ in size

# Enough micro-batches to decide, and the time to wait for them.
_ENOUGH, _SIZE_SURVEY_SECONDS = 8, 10.0
_NONE = 2**62


class SizeSurvey:
    """Looks at the first micro-batches of a program.

    One is enough if a data loader of a fixed batch size gives it, with as many rows as the engine expects. Several are
    needed for batches that are made in another way, such as by a budget of tokens.
    """

    def __init__(self, watch: EngineWatch, facts: ProgramFacts, most: Callable[[list[float]], list[float]]) -> None:
        self._watch = watch
        self._facts = facts
        self._most = most
        self._ends_at = time.monotonic() + _SIZE_SURVEY_SECONDS

    def step_ended(self) -> bool:
        (is_open,) = self._most([float(not self._is_seen())])
        return bool(is_open)

    def _is_seen(self) -> bool:
        rows = self._watch.rows
        if not rows or len(rows) >= _ENOUGH or time.monotonic() > self._ends_at:
            return True
        return loader_batches.has_fixed_size and set(rows) == {self._watch.asked}

    def conclude(self) -> None:
        """Records which dimension has the rows, and whether they vary: then each is a sample. Every rank takes part.

        A second dimension that differs between batches, or between ranks, is a length.
        """
        watch = self._watch
        first, second = ([each[axis] for each in watch.sizes if axis < len(each)] for axis in (0, 1))
        figures = self._most([*_figures(first), *_figures(second)])
        first_varies, second_varies = _differ(*figures[:3]), _differ(*figures[3:])
        rows_vary, largest_second = first_varies, figures[4]
        arrival = watch.arrival
        if second_varies and watch.sizes:
            arrival = Arrival.of_typed(watch.asked, watch.sizes[0][:1], arrival.typed_tokens)
        elif first_varies and largest_second == watch.asked:
            # The second dimension is constant, and as large as the micro-batch. It has the rows, and the first one is
            # the length.
            arrival = replace(arrival, rows_per_sample=1, dimension=1, other_rows_per_sample=0)
            rows_vary = False
        if rows_vary:
            arrival = replace(arrival, rows_per_sample=1, varies=True, other_rows_per_sample=0)
        watch.arrival = arrival
        self._facts.note(batch_varies=rows_vary)
        self._facts.note_arrival(arrival)
        watch.first_micro_batch = round(watch.arrival.samples(watch.rows[0], watch.asked)) if watch.rows else None


def _figures(sizes: Sequence[int]) -> list[float]:
    # The sizes of all ranks that show whether they differ. A rank without a batch changes nothing.
    largest = max(sizes, default=0)
    return [float(vary(sizes)), float(largest), -float(largest or _NONE)]


def _differ(unsteady: float, top: float, negative_top: float) -> bool:
    return bool(unsteady) or (top > 0 and -negative_top < _NONE and top != -negative_top)


def vary(rows: Sequence[int]) -> bool:
    """Whether rows vary. A smaller last batch of the data does not count."""
    return rows.count(max(rows)) < len(rows) / 2 if rows else False


# The longest batch of the data: the profile looks for it, and the warm-up of a trial trains on one as long.
# A configuration may fit with the batches of a few steps, and not with the longer sequences of a whole training.

# A look at a loader's batches costs no training, and a profile's batches have one sample.
_MOST_LOADED, _MOST_TRAINED = 1000, 64
# If all batches until then have one length, the length is fixed.
_AT_FIRST = 8
_LOOK_SECONDS = 20.0


class SequenceSurvey:
    """After a profile's step, looks for the longest sequence, and tries to stretch a batch to that length.

    It reads ahead in the loader that feeds the engine. If the code makes its batches in another way, the code trains on
    for a while, and the survey looks at the batches as they arrive.
    """

    def __init__(
        self,
        watch: EngineWatch,
        facts: ProgramFacts,
        most: Callable[[list[float]], list[float]],
        keep: Callable[[], None],  # saves the measurement, with all other facts, in case a stretched batch fails
    ) -> None:
        self._watch = watch
        self._facts = facts
        self._most = most
        self._keep = keep
        self.has_stretched = False  # the code has been given stretched batches
        self._steps_left = 0
        # Returns whether the code has to train on. Every rank calls it after the same optimizer steps.
        self.step_ended: Callable[[], bool] = self._begin
        self._trains_until = 0.0
        self._arrived_before: int | None = None

    def _begin(self) -> bool:
        has_source = loader_batches.has_source
        longest, lacks_source = self._most([float(self._watch.longest_sequence or 0), float(not has_source)])
        if not longest:
            return False
        if lacks_source:
            self._trains_until = time.monotonic() + _LOOK_SECONDS
            self._keep()
            self.step_ended = self._look_at_training
            return True
        if not self._note(loader_batches.lengths_ahead(_MOST_LOADED, _AT_FIRST, _LOOK_SECONDS)):
            return False
        return self._try_stretching()

    def _note(self, lengths: list[int]) -> bool:
        # Records the lengths on all ranks if they vary; returns whether they do.
        arrived = (self._watch.shortest_sequence, self._watch.longest_sequence)
        own = [*lengths, *(length for length in arrived if length is not None)]
        longest, negative_shortest = self._most([float(max(own, default=0)), -float(min(own, default=2**62))])
        if longest == -negative_shortest:
            return False
        self._facts.note(longest_sequence=int(longest), shortest_sequence=int(-negative_shortest))
        return True

    def _look_at_training(self) -> bool:
        varies = self._note([])
        (is_over,) = self._most([float(time.monotonic() > self._trains_until)])
        micro_batches = self._watch.micro_batches
        return not is_over and micro_batches < (_MOST_TRAINED if varies else _AT_FIRST)

    def _try_stretching(self) -> bool:
        longest = self._facts.found.longest_sequence
        assert longest is not None
        accumulation = int(self._watch.engine.gradient_accumulation_steps())
        loader_batches.stretch(longest, accumulation)
        self.has_stretched = True
        # Accelerate holds one batch in advance. Of two batches, at least one is a later one.
        self._steps_left = 1 if accumulation > 1 else 2
        self._watch.model.count_activations_again()
        self._keep()
        # The batches that arrive from now on show whether they were stretched.
        self._arrived_before, self._watch.longest_sequence = self._watch.longest_sequence, None
        self.step_ended = self._look_at_stretched
        return True

    def _look_at_stretched(self) -> bool:
        self._steps_left -= 1
        if self._steps_left:
            return True
        loader_batches.stretch(0, 0)
        arrived = self._watch.longest_sequence
        has_arrived = arrived == self._facts.found.longest_sequence
        self._watch.longest_sequence = max(arrived or 0, self._arrived_before or 0) or None
        (is_missing,) = self._most([float(not has_arrived)])
        self._facts.note(is_stretchable=not is_missing)
        return False


class StretchedWarmUp:
    """Stretches the batches of one warm-up step of a trial to the longest length of the data.

    It is the first step, unless the code has read other batches before it trains. The steps that count get the batches
    as they come. `length` in tokens is that of the longest batch; None stretches none.
    """

    def __init__(self, length: int | None, warm_up_steps: int) -> None:
        self._length = length
        self._warm_up_steps = warm_up_steps
        self._is_on = False

    def begin(self, watch: EngineWatch) -> None:
        """Stretches the next batches, once the engine exists and the code trains on a loader's next batch."""
        if self._length is None or not self._warm_up_steps:
            return
        self._is_on = True
        self._stretch(watch)

    def step_ended(self, watch: EngineWatch, steps: int) -> None:
        """Ends the stretching when such a batch has arrived, or the warm-up has ended."""
        if not self._is_on:
            return
        assert self._length is not None
        if (watch.longest_sequence or 0) < self._length and steps < self._warm_up_steps:
            self._stretch(watch)
            return
        self._is_on = False
        loader_batches.stretch(0, 0)

    def note(self, longest: int | None) -> str:
        """Says that no stretched batch came; `longest`: tokens of the longest on any rank. Empty if all is well."""
        if self._length is None or (longest or 0) >= self._length:
            return ""
        return (
            f"Its memory was measured with sequences of {longest or 0} tokens, and the data has some of "
            f"{self._length}. No batch of a torch DataLoader in its warm-up could be made as long."
        )

    def _stretch(self, watch: EngineWatch) -> None:
        assert self._length is not None
        loader_batches.stretch(self._length, int(watch.engine.gradient_accumulation_steps()))


class Surveys:
    """Surveys loading and batch sizes if the program runs as typed, sequence lengths in a profile, and FLOPs at last.

    A program that is typed with a micro-batch of 1 has both in one run. The stages of a pipeline exchange batches of
    one size.
    """

    def __init__(
        self,
        watch: EngineWatch,
        facts: ProgramFacts,
        as_typed: bool,
        most: Callable[[list[float]], list[float]],
        keep: Callable[[], None],
        about_to_count: Callable[[], None],
    ) -> None:
        self._watch = watch
        self._facts = facts
        self._sizes = SizeSurvey(watch, facts, most) if as_typed else None
        self._loading = LoadingSurvey(facts, most, watch.device.is_apart) if as_typed else None
        self._lengths = SequenceSurvey(watch, facts, most, keep)
        self._flops = FlopSurvey(watch, most, about_to_count)
        self._looks_at_batches = not isinstance(watch, PipelineWatch)
        self._looks_at_sizes = self._as_typed = as_typed
        self._most = most
        self._rows: RowSurvey | None = None

    def step_ended(self) -> bool:
        """Whether the code has to train on. Every rank calls it after the same optimizer steps."""
        self._note_of_steps()
        if self._looks_at_batches and self._look_at_batches():
            return True
        self._looks_at_batches = False
        goes_on = self._flops.step_ended(self._lengths.has_stretched)
        if self._as_typed:
            self._look_at_rows(goes_on)
        return goes_on

    def _look_at_rows(self, goes_on: bool) -> None:
        # In the step whose FLOPs are counted, which is not the training's own either. Every rank takes part.
        watch = self._watch
        if goes_on:
            if self._rows is None:
                arrival, rounding = watch.arrival, rounding_of(self._facts.found.formats)
                per_sample = 1 if arrival.varies else arrival.rows_per_sample
                self._rows = RowSurvey(watch.engine, watch.device, rounding, per_sample, arrival.dimension, self._most)
                watch.row_survey = self._rows
            return
        watch.row_survey = None
        found = AcrossRows(undecided="the program cannot run uncompiled") if self._rows is None else self._rows.found
        norms = batch_norms(watch.engine.module)
        if found.undecided and not found.kind and norms:
            found = replace(found, kind="layers", names=norms)
        kinds = ("unequal", "loss", "layers")
        # Ranks have other samples. A dependence that one of them has seen is there.
        kind, is_undecided = self._most(
            [float(kinds.index(found.kind) + 1 if found.kind else 0), float(bool(found.undecided))]
        )
        if kind:
            found = replace(found, kind=kinds[int(kind) - 1])
        if is_undecided and not found.undecided:
            found = replace(found, undecided="another rank could not look at its micro-batch")
        self._facts.note(across_rows=found)

    def _look_at_batches(self) -> bool:
        if self._loading is not None and self._loading.step_ended():
            return True
        if self._looks_at_sizes:
            assert self._sizes is not None
            if self._sizes.step_ended():
                return True
            self._looks_at_sizes = False
            self.conclude()
        # After a larger size comes a run at a smaller one, which surveys lengths. Batches by a rule of their own are
        # never stretched.
        if self._sizes is not None and (self._watch.asked > 1 or self._facts.found.batch_varies):
            return False
        return self._lengths.step_ended()

    def conclude(self) -> None:
        """Records the findings on sizes, backward passes and formats. Every rank takes part."""
        self._note_of_steps()
        if self._sizes is not None and not self._watch.arrival.varies:
            self._sizes.conclude()

    def _note_of_steps(self) -> None:
        found = self._facts.found
        self._facts.note(
            repeats_backward=found.repeats_backward or self._watch.repeats_backward,
            compiles_engine=found.compiles_engine or bool(getattr(self._watch.engine, "is_compiled", False)),
        )
        self._facts.note_own_switches(compilations() > 0)
        self._facts.note_formats(self._watch.model.formats)
