"""The longest batch that the data produces: looked for in the profile, trained on in the warm-up of a trial.

What fits with the batches of a few steps may not fit with those of a whole training, whose sequences may be longer.
"""

import time
from collections.abc import Callable

from trial_lib.measure.batches.loader_batches import loader_batches
from trial_lib.measure.engine_watch import EngineWatch
from trial_lib.measure.program_facts import ProgramFacts

# Looking at a loader's batches costs no training, and those of a profile hold one sample.
_MOST_LOADED, _MOST_TRAINED = 1000, 64
# Batches of one length until then: it is fixed.
_AT_FIRST = 8
_SECONDS = 20.0


class SequenceSurvey:
    """Looks for the longest sequence, once a profile's step is measured, and tries whether a batch can be made as long.

    The batches ahead are taken from the loader that feeds the engine. Where the code makes its batches in another way,
    it trains on for a while, and they are looked at as they come.

    Args:
        watch: of the engine that trains.
        facts: take up what is found.
        most: returns the largest of each value over all ranks; each of them calls it.
        keep: called with the facts complete but for the trial, before the code trains on: what the measurement so far
            is must not be lost where that goes wrong.

    Attributes:
        has_stretched: whether the code has been given batches that were made longer.
    """

    def __init__(
        self,
        watch: EngineWatch,
        facts: ProgramFacts,
        most: Callable[[list[float]], list[float]],
        keep: Callable[[], None],
    ) -> None:
        self._watch = watch
        self._facts = facts
        self._most = most
        self._keep = keep
        self.has_stretched = False
        self._steps_left = 0
        self._next = self._begin
        self._trains_until = 0.0
        self._arrived_before: int | None = None

    def step_ended(self) -> bool:
        """Returns whether the code is to train on; every rank asks after the same optimizer steps."""
        return self._next()

    def _begin(self) -> bool:
        has_source = loader_batches.has_source
        longest, lacks_source = self._most([float(self._watch.longest_sequence or 0), float(not has_source)])
        if not longest:
            return False
        if lacks_source:
            self._trains_until = time.monotonic() + _SECONDS
            self._keep()
            self._next = self._look_at_training
            return True
        if not self._note(loader_batches.lengths_ahead(_MOST_LOADED, _AT_FIRST, _SECONDS)):
            return False
        return self._try_stretching()

    def _note(self, lengths: list[int]) -> bool:
        """Takes up the lengths on all ranks, if they vary; returns whether they do."""
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
        # Accelerate holds one batch in advance: of two, one at least is a later one.
        self._steps_left = 1 if accumulation > 1 else 2
        self._watch.model.count_activations_again()
        self._keep()
        # What arrives from here on tells whether it was made longer.
        self._arrived_before, self._watch.longest_sequence = self._watch.longest_sequence, None
        self._next = self._look_at_stretched
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
    """Has one of a trial's steps before the measured ones train on batches as long as the longest of the data.

    The first, unless the code reads other batches before it trains. The steps that count see the batches as they come.

    Args:
        length: tokens in a sample of the longest batch; None to leave the batches alone.
        warm_up_steps: optimizer steps before the first that counts.
    """

    def __init__(self, length: int | None, warm_up_steps: int) -> None:
        self._length = length
        self._warm_up_steps = warm_up_steps
        self._is_on = False

    def begin(self, watch: EngineWatch) -> None:
        """Makes the next batches longer; once the engine is there, and a loader's next batch is trained on."""
        if self._length is None or not self._warm_up_steps:
            return
        self._is_on = True
        self._stretch(watch)

    def step_ended(self, watch: EngineWatch, steps: int) -> None:
        """Ends it when such a batch has come, or the warm-up is over.

        Args:
            watch: of the engine that trains.
            steps: optimizer steps so far.
        """
        if not self._is_on:
            return
        if not self._has_arrived(watch) and steps < self._warm_up_steps:
            self._stretch(watch)
            return
        self._is_on = False
        loader_batches.stretch(0, 0)

    def note(self, longest: int | None) -> str:
        """Returns what to say of a trial that saw nothing as long; empty where it did, or was not to.

        Args:
            longest: tokens in a sample of the longest batch that has come to any rank.
        """
        if self._length is None or (longest or 0) >= self._length:
            return ""
        return (
            f"Its memory is that of sequences of {longest or 0} tokens, and the data has some of {self._length}: "
            "no batch of a torch DataLoader came in its warm-up that could be made as long."
        )

    def _has_arrived(self, watch: EngineWatch) -> bool:
        assert self._length is not None
        return (watch.longest_sequence or 0) >= self._length

    def _stretch(self, watch: EngineWatch) -> None:
        assert self._length is not None
        loader_batches.stretch(self._length, int(watch.engine.gradient_accumulation_steps()))
