"""The profile trial: the program as typed first, then the smallest micro-batch that it can take."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH
from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.messages.measurement import BatchSizes, ModelProfile, ProgramProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import TrialPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.profile import profile_candidates, run_profile

TYPED = ProgramProfile(typed_batch=BatchSizes(32, 8, 2), rows_per_sample=2)
MODEL = ModelProfile(
    num_params=1,
    trainable_num_params=1,
    activation_mem_per_gpu=1,
    gpu_mem=1,
    data_parallel_size=2,
    flops_per_sample=1.0,
)


class Ranks:
    """Stands for real ranks: how the run as typed ends, and the run at each micro-batch size."""

    def __init__(self, folder: Path, typed: TrialResult, at: Callable[[int], TrialResult]) -> None:
        self.sizes: list[int] = []
        self.accumulations: list[int] = []
        self.types_batch = False
        self.primed: list[list[str]] = []
        self._typed, self._at = typed, at
        self._plan = TrialPlan(
            trial_id="study-0000",
            number=0,
            purpose=Purpose.PROFILE,
            candidate=Candidate(micro_batch_size=1, slots=2),
            ds_config={},
            config_hash="0" * 16,
            program=SimpleNamespace(files={}),  # type: ignore[arg-type]
            window=SimpleNamespace(),  # type: ignore[arg-type]
            memory_limit=None,
            deadline_s=1.0,
            paths=TrialPaths(folder),
        )

    def profile(self, **more: Any) -> TrialResult:
        typed = replace(self._plan, paths=self._plan.paths.as_typed, as_typed=True)
        return run_profile(self._plan, typed, self._plans_for, self._run, self.primed.append, **more)

    def ran_with(self) -> Candidate:
        return Candidate.model_validate_json(self._plan.paths.candidate.read_text())

    def _plans_for(self, program: ProgramProfile, size: int) -> list[TrialPlan]:
        candidates = profile_candidates(program, size, 2, self.types_batch)
        return [replace(self._plan, candidate=candidate) for candidate in candidates]

    def _run(self, plan: TrialPlan) -> TrialResult:
        if plan.as_typed:
            return self._typed
        self.sizes.append(plan.candidate.micro_batch_size)
        self.accumulations.append(plan.candidate.gradient_accumulation_steps)
        return self._at(plan.candidate.micro_batch_size)


def ended(outcome: Outcome = Outcome.COMPLETED, program: ProgramProfile | None = TYPED, **more: Any) -> TrialResult:
    return TrialResult(
        trial_id="study-0000",
        number=0,
        purpose=Purpose.PROFILE,
        config_hash="0" * 16,
        outcome=outcome,
        program=program,
        **{"profile": MODEL if outcome is Outcome.COMPLETED else None, "imported": ["transformers"], **more},
    )


def completes(size: int) -> TrialResult:
    return ended(program=ProgramProfile(longest_sequence=64, rows_per_sample=2, batch_dimension=1), reason="")


def test_the_profile_is_that_of_one_sample_and_keeps_what_was_typed(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ended(), completes)
    result = ranks.profile()
    assert ranks.sizes == [1]
    assert result.program is not None
    assert (result.program.typed_batch, result.program.rows_per_sample) == (BatchSizes(32, 8, 2), 2)
    assert result.program.longest_sequence == 64
    assert result.program.batch_dimension == 1, "two sizes tell better than one which dimension has the rows"
    expected = Candidate(micro_batch_size=1, gradient_accumulation_steps=2, slots=2, data_parallel_size=2)
    assert ranks.ran_with() == expected
    # A program may read each of the three batch keys.
    assert ranks.ran_with().overrides["train_batch_size"] == 4
    assert ranks.primed == [["transformers"]]


def test_formats_that_either_run_has_shown_are_the_program_s(tmp_path: Path) -> None:
    """The run as typed may have run out of memory before its forward pass was over."""
    typed = ended(Outcome.OUT_OF_MEMORY, replace(TYPED, formats=["float32"]))
    at_one = ended(program=ProgramProfile(formats=["bfloat16"]))
    assert Ranks(tmp_path, typed, lambda size: at_one).profile().formats == ("bfloat16", "float32")


ONE = ProgramProfile(typed_batch=BatchSizes(8, 1, 4), rows_per_sample=1)
AT_ONE = ended(program=ONE)
IGNORES = ended(Outcome.INVALID, micro_batch_arrived=1, reason="It has --size 1.")


def expect_profile_of_one(ranks: Ranks, result: TrialResult) -> None:
    """Whatever a run at two samples shows, the profile is the program's as typed."""
    assert (result.outcome, result.profile) == (Outcome.COMPLETED, MODEL)
    assert result.program is not None
    assert result.program.typed_batch == ONE.typed_batch
    expected = Candidate(micro_batch_size=1, gradient_accumulation_steps=4, slots=2, data_parallel_size=2)
    assert ranks.ran_with() == expected


@pytest.mark.parametrize(
    "program",
    [ONE, replace(ONE, batch_varies=True), replace(ONE, batch={MICRO_BATCH: 1})],
    ids=["mapped", "varies", "by a Trainer"],
)
def test_a_program_that_takes_one_sample_as_typed_is_not_run_twice(tmp_path: Path, program: ProgramProfile) -> None:
    ranks = Ranks(tmp_path, ended(program=program), completes)
    expect_profile_of_one(ranks, ranks.profile(is_placed=program is ONE))
    assert ranks.sizes == []


def test_a_program_typed_at_one_sample_begins_at_two_to_show_that_it_follows(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, AT_ONE, lambda size: ended(profile=None, program=None))
    result = ranks.profile()
    expect_profile_of_one(ranks, result)
    assert (ranks.sizes, result.note) == ([2], "")


@pytest.mark.parametrize("followed", ["--size", "conf.yaml:size", ""])
def test_the_places_of_a_program_typed_at_one_sample_are_tried_at_two(tmp_path: Path, followed: str) -> None:
    places = ["--size", "conf.yaml:size"]
    tried = places[: places.index(followed) + 1] if followed else places
    ends = [IGNORES, *(ended() if place == followed else IGNORES for place in tried)]
    ranks = Ranks(tmp_path, AT_ONE, lambda size: ends.pop(0))
    result = ranks.profile(places_of=lambda result, size: [(MICRO_BATCH, place) for place in places])
    expect_profile_of_one(ranks, result)
    assert (ranks.sizes, ends) == ([2] * (1 + len(tried)), [])
    assert result.program is not None
    assert result.program.arg_mappings == ({MICRO_BATCH: followed} if followed else {})
    none = "It has --size 1. It did not follow --size or conf.yaml:size either."
    assert result.program.fixed_batch == ("" if followed else none)
    assert result.note == (f"The program has its batch from {followed}, so trials set it there." if followed else "")


@pytest.mark.parametrize("outcome", [Outcome.OUT_OF_MEMORY, Outcome.CRASHED, Outcome.TIMED_OUT, Outcome.INVALID])
def test_what_two_samples_could_not_show_is_said_and_ends_no_profile(tmp_path: Path, outcome: Outcome) -> None:
    ranks = Ranks(tmp_path, AT_ONE, lambda size: ended(outcome, reason="No room for two. Log: /rank0.log"))
    result = ranks.profile()
    expect_profile_of_one(ranks, result)
    assert result.program is not None
    assert (ranks.sizes, result.program.fixed_batch, result.program.arg_mappings) == ([2], "", {})
    assert result.note == (
        "Whether the program follows a micro-batch of more than 1 is not known, because a run of 2 failed. "
        "No room for two."
    )


def test_a_program_typed_at_one_sample_that_insists_on_its_global_batch_begins_with_it(tmp_path: Path) -> None:
    ends = [ended(Outcome.CRASHED, reason="8 is expected."), ended()]
    ranks = Ranks(tmp_path, AT_ONE, lambda size: ends.pop(0))
    ranks.types_batch = True
    result = ranks.profile()
    expect_profile_of_one(ranks, result)
    assert (ranks.sizes, ranks.accumulations, result.note) == ([2, 2], [4, 2], "")


def test_a_program_that_does_not_fit_at_one_sample_does_not_begin_at_two(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, replace(AT_ONE, outcome=Outcome.OUT_OF_MEMORY), completes)
    assert ranks.profile().outcome is Outcome.OUT_OF_MEMORY
    assert ranks.sizes == []


def test_a_model_that_cannot_take_one_sample_is_profiled_at_the_smallest_size_that_works(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ended(), lambda size: completes(size) if size >= 4 else ended(Outcome.CRASHED))
    assert ranks.profile().outcome is Outcome.COMPLETED
    assert ranks.sizes == [1, 2, 4]
    assert ranks.ran_with().micro_batch_size == 4


def test_a_program_that_insists_on_the_typed_global_batch_is_profiled_with_it(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ended(), lambda size: ended(Outcome.CRASHED, reason="32 is expected. Log: /rank0.log"))
    ranks.types_batch = True
    result = ranks.profile()
    assert ranks.sizes == [1, 1, 2, 2, 4, 4]
    assert ranks.accumulations == [2, 16, 2, 8, 2, 4]
    # Nobody has to look for it in the trial's log.
    assert result.note == (
        "The profile is of a micro-batch of 8 x 2, because a run of a smaller batch failed. 32 is expected."
    )


def test_a_note_on_another_accumulation_blames_no_smaller_size(tmp_path: Path) -> None:
    def at(size: int) -> TrialResult:
        is_whole = size * ranks.accumulations[-1] == 16
        return completes(size) if is_whole else ended(Outcome.CRASHED, reason="32 is expected.")

    ranks = Ranks(tmp_path, ended(), at)
    ranks.types_batch = True
    result = ranks.profile()
    assert ranks.accumulations == [2, 16]
    assert result.note == (
        "The profile is of a micro-batch of 1 x 16, because a run of a smaller batch failed. 32 is expected."
    )


def test_at_last_the_program_s_own_size_is_the_profile_s(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ended(), lambda size: ended(Outcome.CRASHED))
    result = ranks.profile()
    assert result.outcome is Outcome.COMPLETED
    assert result.profile == MODEL
    assert ranks.ran_with().micro_batch_size == 8


def test_batches_that_vary_have_no_smaller_size(tmp_path: Path) -> None:
    varied = replace(TYPED, batch_varies=True)
    ranks = Ranks(tmp_path, ended(program=varied), completes)
    assert ranks.profile().outcome is Outcome.COMPLETED
    assert ranks.sizes == []


def test_a_configuration_that_does_not_fit_as_typed_is_profiled_all_the_same(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ended(Outcome.OUT_OF_MEMORY), completes)
    result = ranks.profile()
    assert result.outcome is Outcome.COMPLETED
    assert result.program is not None
    assert result.program.typed_batch == BatchSizes(32, 8, 2)


def test_a_program_that_fails_at_any_size_is_told_of_as_it_was_typed(tmp_path: Path) -> None:
    ranks = Ranks(
        tmp_path, ended(Outcome.CRASHED, reason="as typed"), lambda size: ended(Outcome.CRASHED, reason="smaller")
    )
    assert ranks.profile().reason == "as typed"


def test_a_model_of_which_one_sample_does_not_fit_ends_at_once(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ended(), lambda size: ended(Outcome.OUT_OF_MEMORY))
    assert ranks.profile().outcome is Outcome.OUT_OF_MEMORY
    assert ranks.sizes == [1]


def test_what_the_host_lacks_is_the_same_at_every_size_and_leaves_the_typed_run(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ended(), lambda size: ended(Outcome.OUT_OF_HOST_MEMORY))
    assert ranks.profile().outcome is Outcome.COMPLETED
    assert ranks.sizes == [1]
    assert ranks.ran_with().micro_batch_size == 8


def test_batches_that_do_not_follow_are_no_reason_to_try_another_size(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ended(), lambda size: ended(Outcome.INVALID, micro_batch_arrived=8))
    assert ranks.profile().outcome is Outcome.INVALID
    assert ranks.sizes == [1]


@pytest.mark.parametrize(("arrived", "rows", "outcome"), [(8, 1, "completed"), (4, 1, "invalid"), (8, 2, "invalid")])
def test_batches_that_agree_with_what_was_typed_but_follow_nothing_else_are_profiled_at_their_size(
    tmp_path: Path, arrived: int, rows: int, outcome: str
) -> None:
    typed = replace(TYPED, rows_per_sample=rows)
    ignores = ended(Outcome.INVALID, micro_batch_arrived=arrived, reason="It reads --size.")
    ranks = Ranks(tmp_path, ended(program=typed), lambda size: ignores)
    result = ranks.profile()
    assert result.outcome.value == outcome
    assert ranks.sizes == [1]
    assert result.program is not None
    assert result.program.fixed_batch == ("It reads --size." if outcome == "completed" else "")
    assert ranks.ran_with().micro_batch_size == (8 if outcome == "completed" else 1)


@pytest.mark.parametrize("followed", ["--size", "conf.yaml:size", ""])
def test_the_places_that_a_program_may_have_its_size_from_are_tried_in_turn(tmp_path: Path, followed: str) -> None:
    ignores = ended(Outcome.INVALID, micro_batch_arrived=8, reason="It has --size 8.")
    places = ["--size", "conf.yaml:size"]
    tried = places[: places.index(followed) + 1] if followed else places
    ends = [ignores, *(ended() if place == followed else ignores for place in tried)]
    ranks = Ranks(tmp_path, ended(program=replace(TYPED, rows_per_sample=1)), lambda size: ends.pop(0))
    result = ranks.profile(places_of=lambda result, size: [(MICRO_BATCH, place) for place in places])
    assert ranks.sizes == [1, *(1 for _ in tried)]
    assert not ends
    assert result.program is not None
    assert result.program.arg_mappings == ({MICRO_BATCH: followed} if followed else {})
    # What has been tried is no advice.
    none = "It has --size 8. It did not follow --size or conf.yaml:size either."
    assert result.program.fixed_batch == ("" if followed else none)
    assert ranks.ran_with().micro_batch_size == (1 if followed else 8)


@pytest.mark.parametrize("ending", [{"outcome": Outcome.CANCELLED}, {"outcome": Outcome.CRASHED, "from_outside": True}])
def test_a_run_that_was_cut_short_is_not_followed_by_another(tmp_path: Path, ending: dict[str, Any]) -> None:
    ranks = Ranks(tmp_path, ended(**ending), completes)
    assert ranks.profile().outcome is ending["outcome"]
    assert ranks.sizes == []
    assert not TrialPaths(tmp_path).result.exists()


def test_a_program_without_an_engine_is_not_run_again(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, ended(Outcome.CRASHED, program=None), completes)
    assert ranks.profile().outcome is Outcome.CRASHED
    assert ranks.sizes == []


@pytest.mark.parametrize(("own", "below"), [(2, [1]), (3, [1, 2]), (4, [1, 2]), (12, [1, 2, 4, 8])])
def test_sizes_double_below_the_program_s_own(tmp_path: Path, own: int, below: list[int]) -> None:
    typed = replace(TYPED, typed_batch=BatchSizes(own, own, 1))
    ranks = Ranks(tmp_path, ended(program=typed), lambda size: ended(Outcome.CRASHED))
    ranks.profile()
    assert ranks.sizes == below


@pytest.mark.parametrize("program", [None, ProgramProfile()])
def test_a_program_that_fails_as_typed_leaves_the_trial_s_result(
    tmp_path: Path, program: ProgramProfile | None
) -> None:
    failed = ended(Outcome.CRASHED, program, reason="The program raised KeyError: 'lr'")
    ranks = Ranks(tmp_path, failed, completes)
    assert ranks.profile() == failed
    assert TrialResult.from_text(TrialPaths(tmp_path).result.read_text()) == failed
    assert ranks.ran_with().micro_batch_size == 1
    assert ranks.sizes == []


@pytest.mark.parametrize(("at_one", "kept"), [(100, 100), (12, None), (None, None)])
def test_data_that_grow_with_the_micro_batch_have_no_length(tmp_path: Path, at_one: int | None, kept: int) -> None:
    typed = ended(program=replace(TYPED, samples_per_epoch=100))
    small = ended(program=ProgramProfile(samples_per_epoch=at_one))
    program = Ranks(tmp_path, typed, lambda size: small).profile().program
    assert program is not None
    assert program.samples_per_epoch == kept
