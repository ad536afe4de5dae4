"""What the runs of a profile trial look for once their step is measured, while the code trains on."""

from collections.abc import Callable

from trial_lib.measure.batches.longest_batch import SequenceSurvey
from trial_lib.measure.batches.size_survey import SizeSurvey
from trial_lib.measure.engine_watch import EngineWatch, PipelineWatch
from trial_lib.measure.flop_survey import FlopSurvey
from trial_lib.measure.program_facts import ProgramFacts


class Surveys:
    """Looks at the sizes of batches where the program runs as typed, and at the lengths of sequences in a profile.

    A program that is typed with a micro-batch of 1 has both in one run. The stages of a pipeline exchange batches of
    one size. At last the FLOPs are counted.

    Args:
        watch: of the engine that trains.
        facts: take up what is found.
        as_typed: whether the program runs as it was typed.
        most: returns the largest of each value over all ranks; each of them calls it.
        keep: see `SequenceSurvey`.
        about_to_count: see `FlopSurvey`.
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
        self._lengths = SequenceSurvey(watch, facts, most, keep)
        self._flops = FlopSurvey(watch, most, about_to_count)
        self._looks_at_batches = not isinstance(watch, PipelineWatch)
        self._looks_at_sizes = as_typed

    def step_ended(self) -> bool:
        """Returns whether the code is to train on; every rank asks after the same optimizer steps."""
        self._note_of_steps()
        if self._looks_at_batches and self._look_at_batches():
            return True
        self._looks_at_batches = False
        return self._flops.step_ended(self._lengths.has_stretched)

    def _look_at_batches(self) -> bool:
        if self._looks_at_sizes:
            assert self._sizes is not None
            if self._sizes.step_ended():
                return True
            self._looks_at_sizes = False
            self.conclude()
        # A larger size is followed by a run at a smaller one, and batches by a rule of their own stay as they are.
        if self._sizes is not None and (self._watch.asked > 1 or self._facts.batch_varies):
            return False
        return self._lengths.step_ended()

    def conclude(self) -> None:
        """Takes up what is seen of sizes, backward passes and formats by now; every rank takes part."""
        self._note_of_steps()
        if self._sizes is not None and not self._watch.arrival.varies:
            self._sizes.conclude()

    def _note_of_steps(self) -> None:
        self._facts.repeats_backward |= self._watch.repeats_backward
        self._facts.note_formats(self._watch.model.formats)
