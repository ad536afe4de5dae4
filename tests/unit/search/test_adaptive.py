"""What the adaptive search asks for, and when it ends."""

import copy
import random
from dataclasses import replace

import pytest
from adaptive_world import (
    FINE,
    PROFILE,
    SPACE,
    SimulatedModel,
    adaptive,
    drive,
    ended,
    problem,
    repeat,
    trials,
)

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep, Withdrawal
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.knobs import get_knob, set_knob
from zerotune.trial_lib.search.memory_model import MemoryModel
from zerotune.trial_lib.search.methods import AdaptiveSettings
from zerotune.trial_lib.search.sizes import USUAL_RISK, memory_risk

FAILURES = [
    Outcome.CRASHED,
    *(pytest.param(each, marks=pytest.mark.long) for each in (Outcome.INVALID, Outcome.TIMED_OUT, Outcome.DIVERGED)),
]


def sizes_in(history):
    return [candidate.micro_batch_size for candidate, _ in trials(history)]


def is_tuned(candidate):
    """Returns whether a fine knob is not at its best guess."""
    return any(get_knob(candidate.knobs, knob.path, knob.values[0]) != knob.values[0] for knob in FINE)


def arm_of(candidate):
    """Returns the label of the arm that is left where each fine knob is at its best guess."""
    for arm in SPACE.arms:
        rest = copy.deepcopy(candidate.knobs)
        for knob in arm.fine:
            set_knob(rest, knob.path, knob.values[0])
        if rest == arm.family(0):
            return arm.label
    raise AssertionError(f"of no arm: {candidate.knobs}")


@pytest.mark.parametrize("can_sweep", [False, True])
@pytest.mark.parametrize("concurrency", [1, pytest.param(3, marks=pytest.mark.long)])
def test_it_comes_within_three_percent_of_the_best_and_ends_by_itself(concurrency, can_sweep):
    model = SimulatedModel()
    search = adaptive(problem(can_sweep=can_sweep), concurrency=concurrency)
    history = drive(search, model.run, concurrency)
    headroom = SimulatedModel(memory=int(0.95 * model.memory))
    best = max(
        model.throughput(candidate)
        for arm in SPACE.arms
        for index in range(arm.size)
        for size in range(1, 80)
        if headroom.need(candidate := Candidate(knobs=arm.family(index), micro_batch_size=size)) <= headroom.memory
    )
    assert model.throughput(search.best[0]) >= 0.97 * best
    assert len(trials(history)) < 49


@pytest.mark.long
def test_what_runs_out_of_memory_is_no_more_than_a_twentieth_of_many_trials():
    ran = [
        result.outcome
        for seed in range(3)
        for _, result in trials(drive(adaptive(seed=seed, min_gain=0, max_trials=31), SimulatedModel(memory=200).run))
    ]
    assert ran.count(Outcome.OUT_OF_MEMORY) <= 0.05 * len(ran)


def test_what_a_trial_risks_is_what_the_trials_so_far_have_left_whatever_its_arm():
    model, search = SimulatedModel(), adaptive(min_gain=0, max_trials=40)
    memory = MemoryModel(MemoryBasis(PROFILE, problem().base_config, slots=2, device="cuda"))
    risked: dict[str, list[float]] = {}
    ran_out = 0
    for asked in range(30):
        candidate = search.ask()
        risk = 1 - memory.probability_fits(candidate, headroom=0)
        assert risk <= memory_risk(asked, ran_out, in_flight=0) + 1e-9
        risked.setdefault(arm_of(candidate), []).append(risk)
        result = model.run(candidate)
        ran_out += result.outcome is Outcome.OUT_OF_MEMORY
        search.tell(candidate, result)
        memory.observe(candidate, result)
    # Once there is more left than for the first trial, more than one arm takes of it.
    assert sum(max(each) > USUAL_RISK for each in risked.values()) > 1


def test_an_arm_that_needs_no_measuring_at_small_sizes_begins_near_the_largest_that_fits():
    first = adaptive().ask()
    first = first.candidates[0] if isinstance(first, Sweep) else first
    assert first.micro_batch_size >= 10


def test_every_arm_that_can_win_is_raced_before_fine_knobs_are_tuned():
    history = drive(adaptive(), SimulatedModel().run)
    first = [arm_of(candidate) for candidate, _ in trials(history)[:6]]
    assert {"z0", "z1", "z2"} <= set(first)


@pytest.mark.long
@pytest.mark.parametrize("can_sweep", [False, True])
def test_fine_knobs_wait_until_the_arms_that_can_win_have_shown_what_their_larger_sizes_bring(can_sweep):
    model = SimulatedModel(speed={0: 1.0, 1: 1.0, 2: 1.0, 3: 0.7})
    history = trials(drive(adaptive(problem(can_sweep=can_sweep), min_gain=0, max_trials=60), model.run))
    tuned = [is_tuned(candidate) for candidate, _ in history]
    assert any(tuned)
    largest: list[dict[str, int]] = []
    for some in (history[: tuned.index(True)], history):
        sizes: dict[str, int] = {}
        for candidate, result in some:
            if result.outcome is Outcome.COMPLETED:
                sizes[arm_of(candidate)] = max(candidate.micro_batch_size, sizes.get(arm_of(candidate), 0))
        largest.append(sizes)
    raced, in_the_end = largest
    for arm in ("z0", "z1", "z2"):
        assert raced[arm] >= 0.8 * in_the_end[arm]


def test_nothing_at_or_above_a_size_that_ran_out_of_memory_is_asked_in_its_arm():
    model = SimulatedModel(memory=400)
    failed = {}
    for candidate, result in trials(drive(adaptive(min_gain=0, max_trials=41), model.run)):
        arm = arm_of(candidate)
        assert candidate.micro_batch_size < failed.get(arm, 10**9)
        if result.outcome is Outcome.OUT_OF_MEMORY:
            failed[arm] = min(candidate.micro_batch_size, failed.get(arm, 10**9))


def test_nothing_at_or_above_a_size_for_which_the_data_do_not_last_is_asked_in_any_arm():
    model, most = SimulatedModel(), 10**9

    def run(candidate):
        return ended(Outcome.OUT_OF_DATA) if candidate.micro_batch_size > 24 else model.run(candidate)

    for candidate, result in trials(drive(adaptive(min_gain=0, max_trials=41), run)):
        assert candidate.micro_batch_size < most
        if result.outcome is Outcome.OUT_OF_DATA:
            most = candidate.micro_batch_size
    assert 24 < most < 10**9


@pytest.mark.parametrize("outcome", FAILURES)
def test_a_failing_family_is_out_and_after_two_its_arm(outcome):
    model = SimulatedModel()

    def run(candidate):
        return ended(outcome) if candidate.zero_stage == 2 else model.run(candidate)

    history = drive(adaptive(min_gain=0, max_trials=41), run)
    failed = [candidate for candidate, result in trials(history) if result.outcome is outcome]
    for label in {arm_of(candidate) for candidate in failed}:
        families = [candidate.family for candidate in failed if arm_of(candidate) == label]
        assert len(families) == len(set(families)) <= 2


def test_sizes_that_fail_in_two_arms_are_left_alone_in_all():
    model = SimulatedModel()

    def run(candidate):
        return ended(Outcome.CRASHED) if candidate.micro_batch_size > 8 else model.run(candidate)

    search = adaptive(max_trials=31)
    drive(search, run)
    assert search.best is not None


def test_a_trial_too_slow_to_win_is_not_the_best_and_counts_as_worse():
    search = adaptive()
    first = search.ask()
    search.tell(first, SimulatedModel().run(first))
    second = search.ask()
    search.tell(second, ended(Outcome.TOO_SLOW))
    assert search.best[0] == first
    assert (second.family, second.micro_batch_size) != (search.ask().family, second.micro_batch_size)


def test_a_kept_batch_is_kept_exactly():
    history = drive(adaptive(problem(train_batch_size=48)), SimulatedModel().run)
    batches = {
        candidate.micro_batch_size * candidate.gradient_accumulation_steps * 2 for candidate, _ in trials(history)
    }
    assert batches == {48}
    assert set(sizes_in(history)) <= {1, 2, 3, 4, 6, 8, 12, 24}


def test_a_free_batch_keeps_the_configurations_accumulation():
    base_config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    history = drive(adaptive(problem(base_config=base_config), max_trials=8), SimulatedModel().run)
    assert {candidate.gradient_accumulation_steps for candidate, _ in trials(history)} == {3}


def test_sizes_are_multiples_of_the_divisor_and_within_the_limit():
    history = drive(adaptive(divisible_by=3, max_micro_batch=20), SimulatedModel().run)
    assert all(size % 3 == 0 and size <= 20 for size in sizes_in(history))


def test_a_batch_that_no_size_satisfies_is_refused_with_a_sentence():
    with pytest.raises(InputError, match="multiple of 5"):
        adaptive(problem(train_batch_size=48), divisible_by=5)
    with pytest.raises(InputError, match="divides a global batch of 49 samples over 2 replicas"):
        adaptive(problem(train_batch_size=49))


def test_where_sweeps_are_possible_a_sweep_begins_with_what_surely_fits_and_ascends():
    history = drive(adaptive(problem(can_sweep=True)), SimulatedModel().run)
    sweeps = [asked for what, asked, _ in history if what == "ask" and isinstance(asked, Sweep)]
    assert sweeps
    for sweep in sweeps:
        sizes = [candidate.micro_batch_size for candidate in sweep.candidates]
        assert sizes == sorted(set(sizes))
        assert len({candidate.family for candidate in sweep.candidates}) == 1
        assert sweep.bytes_per_sample > 0


def test_a_sweep_is_worth_what_it_may_come_to():
    # The profile says 16 times what a sample takes: far larger sizes than surely fit may fit.
    profile = replace(PROFILE, activation_mem_per_gpu=32 * 2**20)
    model = SimulatedModel(noise=0.0, per_sample=2.0)
    known = trials(drive(adaptive(problem(profile=profile), max_trials=3), model.run))
    asked = []
    for can_sweep in (False, True):
        search = adaptive(problem(profile=profile, can_sweep=can_sweep))
        for candidate, result in known:
            search.observe(candidate, result)
        asked.append(search.ask())
    alone, sweep = asked
    ran, _ = known[-1]
    assert (alone.family != ran.family, alone.micro_batch_size < 2 * ran.micro_batch_size) == (True, True)
    assert isinstance(sweep, Sweep)
    assert {each.family for each in sweep.candidates} == {ran.family}
    assert sweep.candidates[-1].micro_batch_size > 4 * ran.micro_batch_size


def test_a_program_that_cannot_be_run_twice_is_swept_no_more():
    search = adaptive(problem(can_sweep=True))
    while not isinstance(sweep := search.ask(), Sweep):
        search.tell(sweep, SimulatedModel().run(sweep))
    search.tell(sweep.candidates[0], SimulatedModel().run(sweep.candidates[0]))
    for candidate in sweep.candidates[1:]:
        search.withdraw(candidate, Withdrawal.NOT_REPEATABLE)
    history = drive(search, SimulatedModel().run)
    assert not any(isinstance(asked, Sweep) for _, asked, _ in history)


def test_a_size_withdrawn_for_memory_costs_no_trial_and_is_swept_to_only_when_more_is_known():
    search = adaptive(problem(can_sweep=True), max_trials=8)
    history = drive(search, SimulatedModel().run, foresees=lambda candidate: False)
    assert len(trials(history)) <= 7
    withdrawn = [candidate for what, candidate, _ in history if what == "withdraw"]
    assert withdrawn


@pytest.mark.long
def test_the_largest_sizes_grow_step_by_step_where_memory_is_no_limit():
    profile = replace(PROFILE, activation_mem_per_gpu=1, gpu_mem=2**40)
    history = drive(adaptive(problem(profile=profile)), SimulatedModel(memory=2**30, per_sample=1e-6).run)
    largest = 64
    for size in sizes_in(history):
        assert size <= largest
        largest = max(largest, 8 * size)


def test_where_nothing_seems_to_fit_the_likeliest_is_tried():
    profile = replace(PROFILE, activation_mem_per_gpu=10**12)
    search = adaptive(problem(profile=profile))
    asked = search.ask()
    assert asked.micro_batch_size == 1
    search.tell(asked, SimulatedModel().run(asked))
    assert search.best is not None


def test_a_search_of_which_every_trial_fails_ends_without_a_best():
    search = adaptive()
    history = drive(search, lambda candidate: ended(Outcome.OUT_OF_MEMORY))
    assert search.finished
    assert search.best is None
    assert len(trials(history)) < 49


@pytest.mark.parametrize("concurrency", [1, 4])
def test_max_trials_counts_the_profile_and_no_withdrawn_size(concurrency):
    search = adaptive(problem(can_sweep=True), max_trials=12, min_gain=0, concurrency=concurrency)
    foreseen = SimulatedModel(memory=855)
    history = drive(search, SimulatedModel().run, concurrency, foresees=lambda c: foreseen.need(c) <= foreseen.memory)
    assert len(trials(history)) == 11


def test_as_many_groups_run_at_once_as_may():
    search = adaptive(problem(can_sweep=True), concurrency=3)
    asked = [search.ask() for _ in range(4)]
    assert None not in asked[:3]
    assert asked[3] is None
    assert not search.finished


@pytest.mark.parametrize(
    ("can_sweep", "concurrency"),
    [*(pytest.param(each, 1, marks=pytest.mark.long) for each in (False, True)), (True, 3)],
)
def test_a_resumed_search_continues_as_if_nothing_had_happened_from_every_point(can_sweep, concurrency):
    def fresh():
        return adaptive(problem(can_sweep=can_sweep), seed=3, concurrency=concurrency, max_trials=14)

    foreseen = SimulatedModel(memory=855)
    history = drive(
        fresh(), SimulatedModel().run, concurrency, random.Random(1), lambda c: foreseen.need(c) <= foreseen.memory
    )
    for cut in range(len(history)):
        resumed = repeat(fresh(), history[:cut])
        following = next((asked for what, asked, _ in history[cut:] if what == "ask"), None)
        if history[cut][0] == "ask":
            assert resumed.ask() == following


def test_asking_in_vain_and_looking_change_nothing():
    patient, curious = adaptive(max_trials=10), adaptive(max_trials=10)
    for what, asked, outcome in drive(patient, SimulatedModel().run):
        if what == "ask":
            assert curious.ask() == asked
            assert curious.ask() is None
        else:
            _ = curious.best, curious.finished, curious.freeing_gain()
            curious.tell(asked, outcome)
    assert curious.best == patient.best


@pytest.mark.parametrize("max_trials", range(3, 7))
def test_a_second_try_takes_its_trial_from_a_sweep_that_was_proposed_before(max_trials):
    untouched, looked_at = (adaptive(problem(can_sweep=True), max_trials=max_trials) for _ in range(2))
    assert not looked_at.finished
    assert untouched.spend()
    assert looked_at.spend()
    assert looked_at.ask() == untouched.ask()


def test_the_same_seed_asks_the_same():
    first, second = (drive(adaptive(seed=5, max_trials=12), SimulatedModel().run) for _ in range(2))
    assert first == second


def test_a_recorded_ask_of_another_version_is_taken_as_recorded():
    foreign = Candidate(knobs={"zero_optimization": {"stage": 1, "sub_group_size": 7}}, micro_batch_size=3, slots=2)
    search = adaptive(max_trials=12)
    search.apply(foreign)
    search.tell(foreign, ended(Outcome.COMPLETED, metrics={"throughput": 1.0}))
    assert search.best[0] == foreign
    drive(search, SimulatedModel().run)
    assert search.best[0] != foreign


def test_a_result_nobody_waits_for_is_refused():
    search = adaptive()
    candidate = search.ask()
    search.tell(candidate, SimulatedModel().run(candidate))
    with pytest.raises(KeyError):
        search.tell(candidate, SimulatedModel().run(candidate))
    with pytest.raises(KeyError):
        search.withdraw(candidate, Withdrawal.ENDED)


def test_the_submitted_configuration_is_learned_from_and_never_the_answer():
    own = Candidate(micro_batch_size=16, slots=2, data_parallel_size=2)
    taught, untaught = (adaptive(problem(base_config={"zero_optimization": {"stage": 1}})) for _ in range(2))
    like_it = own.model_copy(update={"knobs": {"zero_optimization": {"stage": 1}}})
    result = replace(SimulatedModel().run(like_it), purpose=Purpose.SUBMITTED)
    taught.observe(own, result)
    assert taught.best is None
    assert taught.ask() != untaught.ask()


def candidate_of(knobs, size):
    return Candidate(knobs=knobs, micro_batch_size=size, slots=2, data_parallel_size=2)


def test_a_lucky_reading_against_all_that_is_known_is_not_believed():
    search, model = adaptive(max_trials=40), SimulatedModel()
    knobs = SPACE.arms[1].family(0)
    for size in (2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40):
        candidate = candidate_of(knobs, size)
        result = model.run(candidate)
        if size == 16:
            lucky = {**result.metrics, "throughput": 1.15 * model.throughput(candidate)}
            result = replace(result, metrics=lucky)
        search.apply(candidate)
        # Of a study each result has a number of its own.
        search.tell(candidate, replace(result, number=size))
    assert search.best[0].micro_batch_size > 16
    expected = search.expected()
    assert expected[16] < 0.95 * lucky["throughput"]
    assert expected[20] == pytest.approx(model.throughput(candidate_of(knobs, 20)), rel=0.03)


def test_when_the_batch_is_kept_the_gain_of_freeing_it_is_known():
    search = adaptive(problem(train_batch_size=8))
    drive(search, SimulatedModel().run)
    gain = search.freeing_gain()
    model = SimulatedModel()
    truth = model.throughput(gain.candidate) / model.throughput(search.best[0])
    assert gain.candidate.micro_batch_size > 4
    assert gain.factor > 1.3
    assert 0.5 * truth < gain.factor < 1.5 * truth  # from sizes up to 4 alone


def test_a_free_batch_has_nothing_to_gain_from_freeing():
    search = adaptive(max_trials=4)
    drive(search, SimulatedModel().run)
    assert search.freeing_gain() is None


def test_stage_0_belongs_to_the_default_space():
    assert AdaptiveSettings().zero_stages == (0, 1, 2, 3)


def test_a_metric_that_is_smaller_when_better_is_made_small():
    search = adaptive(metric="latency", max_trials=15)
    drive(search, SimulatedModel().run)
    assert search.best[0].micro_batch_size <= 4


def test_a_size_that_alone_arrives_is_the_only_one_from_then_on_and_its_finding_fails_no_arm() -> None:
    search = adaptive(problem(train_batch_size=16), concurrency=2)
    first, second = search.ask(), search.ask()
    assert first is not None
    assert second is not None
    search.keep_size(4)
    for each in (first, second):
        search.tell(each, ended(Outcome.COMPLETED if each.micro_batch_size == 4 else Outcome.INVALID, each))
    asked = []
    while (candidate := search.ask()) is not None:
        asked.append(candidate)
        search.tell(candidate, ended(Outcome.COMPLETED, candidate, metrics={"throughput": 1.0}))
    assert {(each.micro_batch_size, each.gradient_accumulation_steps) for each in asked} == {(4, 2)}
    assert {get_knob(each.knobs, "zero_optimization.stage") for each in asked} >= {0, 1, 2, 3}
