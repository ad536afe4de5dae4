"""The longest batch of the data. The profile looks for it, and the warm-up of a trial trains on one as long.

A configuration may fit with the batches of a few steps, and not with the longer sequences of a whole training.
"""

import time
from collections.abc import Callable

from trial_lib.rank.engine_watch import EngineWatch
from trial_lib.rank.loader_batches import loader_batches
from trial_lib.rank.program_facts import ProgramFacts

# A look at a loader's batches costs no training, and a profile's batches have one sample.
_MOST_LOADED, _MOST_TRAINED = 1000, 64
# If all batches until then have one length, the length is fixed.
_AT_FIRST = 8
_SECONDS = 20.0


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
            self._trains_until = time.monotonic() + _SECONDS
            self._keep()
            self.step_ended = self._look_at_training
            return True
        if not self._note(loader_batches.lengths_ahead(_MOST_LOADED, _AT_FIRST, _SECONDS)):
            return False
        return self._try_stretching()

    def _note(self, lengths: list[int]) -> bool:
        # Records the lengths on all ranks if they vary; returns whether they do.
        arrived = (self._watch.shortest_sequence, self._watch.longest_sequence)
        own = [*lengths, *(length for length in arrived if length is not None)]
        longest, negative_shortest = self._most([float(max(own, default=0)), -float(min(own, default=2**62))])
        if longest == -negative_shortest:
            return False
        self._facts.longest_sequence, self._facts.shortest_sequence = int(longest), int(-negative_shortest)
        return True

    def _look_at_training(self) -> bool:
        varies = self._note([])
        (is_over,) = self._most([float(time.monotonic() > self._trains_until)])
        micro_batches = self._watch.micro_batches
        return not is_over and micro_batches < (_MOST_TRAINED if varies else _AT_FIRST)

    def _try_stretching(self) -> bool:
        assert self._facts.longest_sequence is not None
        accumulation = int(self._watch.engine.gradient_accumulation_steps())
        loader_batches.stretch(self._facts.longest_sequence, accumulation)
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
        has_arrived = arrived == self._facts.longest_sequence
        self._watch.longest_sequence = max(arrived or 0, self._arrived_before or 0) or None
        (is_missing,) = self._most([float(not has_arrived)])
        self._facts.is_stretchable = not is_missing
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
