"""The drawn surfaces of the replay."""

import random
from statistics import median

import pytest

from benchmarks.replay.driver import simulate
from benchmarks.replay.methods import create
from benchmarks.replay.regret import Course
from benchmarks.replay.surfaces import KINDS, NOISES, SURFACES, TIGHT, SurfaceWorld
from benchmarks.replay.wrong_order import planned
from zerotune.trial_lib.search.base import expected_costs


@pytest.mark.parametrize("name", SURFACES)
def test_a_surface_is_drawn_from_its_seed_and_nothing_is_better_than_its_best(name):
    world, same, other = SurfaceWorld(name, 3), SurfaceWorld(name, 3), SurfaceWorld(name, 4)
    assert world.arm_costs == same.arm_costs != other.arm_costs
    assert world.noise in NOISES
    draws = random.Random(0)
    for _ in range(60):
        arm = draws.choice(world.problem.space.arms)
        candidate = world.candidate(arm.family(draws.randrange(arm.size)), draws.randint(1, 64))
        assert (world.truth(candidate) or 0.0) <= world.best
    assert world.truth(world.submitted) is not None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("kind", "knobs"), [("one knob", 1), ("two knobs", 2)])
def test_the_needle_makes_an_arm_behind_the_best_and_no_part_of_it_does(kind, knobs, seed):
    world = SurfaceWorld(kind, seed)
    place, values, _ = world._needle
    arm = world.problem.space.arms[place]
    others = min(cost for other, cost in enumerate(world.arm_costs) if other != place)
    guess, needle = world.cost(place, arm.family(0)), world.cost(place, arm.with_fine(values))
    assert len(values) == knobs
    assert needle < others < guess
    if knobs > 1:
        assert all(world.cost(place, arm.with_fine({path: value})) > guess for path, value in values.items())


def test_tight_memory_has_room_for_few_sizes():
    def fitting(name):
        worlds = [SurfaceWorld(name, seed) for seed in range(5)]
        return [
            sum(world.truth(world.candidate(world.submitted.knobs, n)) is not None for n in range(1, 65))
            for world in worlds
        ]

    assert max(fitting(KINDS[0] + TIGHT)) < min(fitting(KINDS[0]))


@pytest.mark.parametrize("order", ["true", "reverse", "none"])
def test_a_plan_puts_the_arms_in_an_order(order):
    world = SurfaceWorld("shuffled order", 1)
    planned(world, order)
    problem = world.problem
    costs = expected_costs(problem.space.arms, problem.base_config, problem.expected)
    sign = {"true": 1, "reverse": -1, "none": 0}[order]
    assert costs == pytest.approx([sign * cost for cost in world.arm_costs])


def course_of(kind, seed, trials):
    world = SurfaceWorld(kind, seed)
    return Course.of(simulate(create("adaptive", world, seed, trials), world, seed, stops_hopeless=True), world)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["unlike order", *(pytest.param(kind, marks=pytest.mark.long) for kind in KINDS[:1])])
def test_a_search_comes_within_5_percent_of_surfaces_that_mislead_it(kind):
    assert median(course_of(kind, seed, 41).regrets[-1] for seed in range(5000, 5003)) <= 0.05


@pytest.mark.long
def test_searches_with_nothing_to_gain_end_by_themselves():
    courses = [course_of("nothing to gain", seed, 60) for seed in range(5001, 5004)]
    assert median(len(course.regrets) for course in courses) < 40
    assert median(course.regrets[-1] for course in courses) <= 0.03
