"""The surveys of a profile trial's runs. They begin when the step is measured, while the code trains on."""

from collections.abc import Callable

from trial_lib.flops.compiled_programs import compilations
from trial_lib.measure.batches.longest_batch import SequenceSurvey
from trial_lib.measure.batches.size_survey import SizeSurvey
from trial_lib.measure.engine_watch import EngineWatch, PipelineWatch
from trial_lib.measure.flop_survey import FlopSurvey
from trial_lib.measure.loading_survey import LoadingSurvey
from trial_lib.measure.program_facts import ProgramFacts
from trial_lib.turned import own_ways


class Surveys:
    """Surveys loading and batch sizes if the program runs as typed, sequence lengths in a profile, and FLOPs at last.

    A program that is typed with a micro-batch of 1 has both in one run. The stages of a pipeline exchange batches of
    one size.

    Args:
        watch: of the engine that trains.
        facts: collect the findings.
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
        self._loading = LoadingSurvey(facts, most, watch.device.is_apart) if as_typed else None
        self._lengths = SequenceSurvey(watch, facts, most, keep)
        self._flops = FlopSurvey(watch, most, about_to_count)
        self._looks_at_batches = not isinstance(watch, PipelineWatch)
        self._looks_at_sizes = as_typed

    def step_ended(self) -> bool:
        """Returns whether the code has to train on. Every rank calls it after the same optimizer steps."""
        self._note_of_steps()
        if self._looks_at_batches and self._look_at_batches():
            return True
        self._looks_at_batches = False
        return self._flops.step_ended(self._lengths.has_stretched)

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
        if self._sizes is not None and (self._watch.asked > 1 or self._facts.batch_varies):
            return False
        return self._lengths.step_ended()

    def conclude(self) -> None:
        """Records the findings on sizes, backward passes and formats. Every rank takes part."""
        self._note_of_steps()
        if self._sizes is not None and not self._watch.arrival.varies:
            self._sizes.conclude()

    def _note_of_steps(self) -> None:
        self._facts.repeats_backward |= self._watch.repeats_backward
        self._facts.compiles_engine |= bool(getattr(self._watch.engine, "is_compiled", False))
        own_ways.note(self._facts, compilations() > 0)
        self._facts.note_formats(self._watch.model.formats)
