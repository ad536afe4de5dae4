"""The parts of the adaptive search: the cost model, sizes."""

from math import log

import numpy as np
import pytest
from adaptive_world import FINE, SPACE, ended, problem

from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.search.adaptive import PointCost, stopped_cost
from zerotune.trial_lib.search.cost_model import CostModel, Point, SpaceCoordinates
from zerotune.trial_lib.search.knobs import Arm, Knob, SearchSpace
from zerotune.trial_lib.search.sizes import BatchPolicy, FittingSizes


def test_the_model_expects_large_sizes_to_cost_less_and_learns_what_an_arm_costs():
    model = CostModel(
        SpaceCoordinates(SPACE), [0.0] * 5, False, [Point(1, 0, 8), Point(2, 0, 8), Point(1, 0, 32)], [1.0, 1.3, 0.6]
    )
    mean = model.predict([Point(1, 0, 16), Point(2, 0, 16), Point(2, 0, 32)]).mean
    assert 0.6 < mean[0] < 1.0
    assert mean[1] > mean[0]
    assert mean[2] < mean[1]


def test_what_was_measured_has_less_to_gain_than_what_was_not():
    model = CostModel(SpaceCoordinates(SPACE), [0.0] * 5, False, [Point(1, 0, 16)] * 4, [1.0, 1.01, 0.99, 1.0])
    gain = model.predict([Point(1, 0, 16), Point(1, 1, 16), Point(3, 0, 16)]).gain
    assert gain[0] < gain[1] < gain[2]


def test_a_knob_that_helped_in_one_arm_is_expected_to_help_in_another():
    overlapped = len(FINE[0].values)
    points = [Point(1, 0, 16), Point(1, overlapped, 16), Point(2, 0, 16)]
    model = CostModel(SpaceCoordinates(SPACE), [0.0] * 5, False, points, [1.0, 0.8, 1.0])
    mean = model.predict([Point(2, 0, 16), Point(2, overlapped, 16)]).mean
    assert mean[1] < mean[0] - 0.02


def test_of_settings_that_nothing_is_known_of_the_best_guesses_are_expected_to_be_the_best():
    model = CostModel(SpaceCoordinates(SPACE), [0.0] * 5, False, [], [])
    guess, bucket, both = model.expected([Point(1, index, 16) for index in (0, 1, 4)])
    assert guess < bucket < both


def test_what_one_knob_costs_that_is_not_at_its_best_guess_is_expected_of_another_in_part():
    def expected_of_overlap(cost_of_bucket):
        points, costs = [Point(1, 0, 16), Point(1, 1, 16)], [1.0, cost_of_bucket]
        model = CostModel(SpaceCoordinates(SPACE), [0.0] * 5, False, points, costs)
        guess, overlap = model.expected([Point(2, 0, 16), Point(2, 3, 16)])
        return overlap - guess

    assert expected_of_overlap(1.2) > expected_of_overlap(1.0)


def test_numbers_have_ranks_and_other_values_are_apart():
    rows = SpaceCoordinates(SPACE).fine([(1, 1), (1, 0), (1, 2), (0, 0)])
    assert sorted(rows[:3, 1]) == [0.0, 0.5, 1.0]
    assert np.isnan(rows[3]).all()


def test_what_a_configuration_leaves_open_is_where_deepspeeds_default_is():
    copied = "zero_optimization.contiguous_gradients"
    space = SearchSpace.of_arms([Arm({"zero_optimization": {"stage": 1}}, (Knob(copied, (False, True)),))])
    stage_1 = {"stage": 1}
    assert space.locate_config({"zero_optimization": stage_1}) == (0, 1)
    assert space.locate_config({"zero_optimization": {**stage_1, "contiguous_gradients": False}}) == (0, 0)


def test_a_configuration_with_offload_is_not_of_the_arm_that_says_nothing_of_it():
    plain, offloading = (
        number for number, arm in enumerate(SPACE.arms) if arm.knobs["zero_optimization"]["stage"] == 2
    )
    config = {"zero_optimization": {"stage": 2}}
    assert SPACE.locate_config(config)[0] == plain
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    assert SPACE.locate_config(config)[0] == offloading


def test_a_stopped_trial_counts_by_the_steps_that_it_made_however_lucky_the_reading_to_beat():
    def candidate(size):
        return Candidate(knobs={}, micro_batch_size=size, slots=2, data_parallel_size=2)

    def cost(size, result, lucky=1.0, by_sample=True):
        read = log(lucky / 8 if by_sample else lucky)
        best = PointCost(Point(1, 0, 8), read, candidate(8), lucky)
        of_an_earlier_study = PointCost(Point(1, 0, 4), read - 0.3, candidate(4), None)
        return stopped_cost([of_an_earlier_study, best], candidate(size), result, by_sample)

    stopped = ended(Outcome.TOO_SLOW, step_times=[3.1, 3.0, 9.0])
    for lucky in (1.0, 0.5):
        assert cost(8, stopped, lucky) == pytest.approx(log(3.1 / 8))
        assert cost(16, stopped, lucky) == pytest.approx(log(3.1 / 16))
        assert cost(16, stopped, lucky, by_sample=False) == pytest.approx(log(3.1))
    assert cost(8, ended(Outcome.TOO_SLOW)) == pytest.approx(log(1 / 8) - 0.3 + log(1.1))


def test_free_sizes_are_round_and_kept_ones_divide():
    free = BatchPolicy(None, 1, 2).sizes(40)
    assert free == (*range(1, 16), *range(16, 32, 2), 32, 36, 40)
    assert BatchPolicy(48, 1, 2, divisible_by=4).sizes() == (4, 8, 12, 24)
    assert BatchPolicy(48, 1, 2).accumulation(12) == 2


def test_a_sweep_comes_to_what_is_as_likely_to_fit_as_not_and_to_what_may_fit():
    policy = BatchPolicy(None, 1, 2)
    fitting = FittingSizes(policy, problem(), headroom=0.05)
    knobs = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 500_000}}
    larger = fitting.foreseeable(knobs, above=16, at_most=512)
    likely, hoped_for = fitting.steps(knobs, larger)

    def odds(size):
        return fitting.probability(fitting.candidate(knobs, size))

    following = larger[larger.index(likely) + 1]
    assert odds(following) < 0.5 <= odds(likely)
    assert hoped_for == larger[-1]
    assert fitting.steps(knobs, [size for size in larger if size <= likely]) == [likely]
    assert fitting.steps(knobs, [following]) == [following]
    assert fitting.steps(knobs, []) == []
