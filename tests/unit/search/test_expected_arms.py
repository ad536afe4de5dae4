"""What a plan says of the arms: the order in which they are tried, the first of them, and those that cannot fit."""

import math

import pytest
from adaptive_world import SPACE, SimulatedModel, adaptive, drive, ended, problem, trials

from zerotune.trial_lib.deepspeed_config.layout import LAYOUTS, PROGRAM
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.search.base import (
    ExpectedArm,
    expected_costs,
    key_in_plan,
    key_of,
    planned_costs,
    without_hopeless,
)
from zerotune.trial_lib.search.cost_model import CostModel, Point, SpaceCoordinates, prior_costs
from zerotune.trial_lib.search.zero_settings import arm_key

BASE = problem().base_config
KEYS = {arm.label: key_of(arm, BASE) for arm in SPACE.arms}
LABELS = [arm.label for arm in SPACE.arms]


def expected(label, speed=0.0, **more):
    return ExpectedArm(key=KEYS[label], label=label, samples_per_s=speed, **more)


def order(costs):
    return [LABELS[place] for place in sorted(range(len(costs)), key=lambda place: costs[place])]


def test_the_plans_speeds_order_the_arms():
    plan = [expected("z3", 120.0), expected("z0", 100.0), expected("z1", 90.0), expected("z2", 60.0)]
    costs = expected_costs(SPACE.arms, BASE, plan)
    assert [label for label in order(costs) if "-" not in label] == ["z3", "z0", "z1", "z2"]
    assert costs[LABELS.index("z2")] - costs[LABELS.index("z3")] == pytest.approx(math.log(2))
    assert expected_costs(SPACE.arms, BASE, ()) == prior_costs(SPACE.arms)


def test_a_larger_micro_batch_explains_a_part_of_an_arms_speed():
    plan = [expected("z3", 110.0, micro_batch=32), expected("z1", 100.0, micro_batch=4)]
    # At equal sizes the arm that has to be small is the faster one.
    assert order(expected_costs(SPACE.arms, BASE, plan)).index("z1") < order(
        expected_costs(SPACE.arms, BASE, plan)
    ).index("z3")


def test_an_arm_without_a_speed_is_on_the_level_of_the_others():
    costs = dict(zip(LABELS, expected_costs(SPACE.arms, BASE, [expected("z1", 50.0)]), strict=True))
    formula = dict(zip(LABELS, prior_costs(SPACE.arms), strict=True))
    assert costs["z3"] - costs["z1"] == pytest.approx(formula["z3"] - formula["z1"])


def test_an_arm_that_cannot_fit_is_not_tried_unless_it_has_run():
    plan = [expected("z0", no_room="it needs 9 GiB of 4 GiB on h100."), expected("z3", 10.0)]
    space, said = without_hopeless(SPACE, BASE, plan, ran=())
    assert [arm.label for arm in space.arms] == [label for label in LABELS if label != "z0"]
    assert said == ["z0 is not tried: by the plan it needs 9 GiB of 4 GiB on h100."]
    assert without_hopeless(SPACE, BASE, plan, ran={KEYS["z0"]}) == (SPACE, [])
    # A plan by which nothing fits leaves the search its space.
    assert without_hopeless(SPACE, BASE, [expected(label, no_room="x") for label in LABELS], ran=()) == (SPACE, [])


@pytest.mark.parametrize("typed", [1, 2])
def test_a_plan_has_the_arms_of_the_layout_that_was_typed(typed):
    own = {**BASE, PROGRAM: {"--stages": typed}, LAYOUTS: {"--stages": "pipeline"}}
    assert {arm.label: key_of(arm, own) for arm in SPACE.arms} == KEYS
    other = {**own, PROGRAM: {"--stages": 3 - typed}}
    assert key_in_plan(other, own, ()) not in KEYS.values()


def test_a_plan_that_has_foreseen_the_sizes_of_a_layout_has_arms_of_each():
    own = {**BASE, PROGRAM: {"--stages": 1}, LAYOUTS: {"--stages": "pipeline"}}
    other = {**own, PROGRAM: {"--stages": 2}}
    keys = {key_in_plan(config, own, {"--stages"}) for config in (own, other)}
    assert len(keys) == 2
    assert () not in keys


def model_of(plan, *measured):
    """A cost model that begins with a plan, and has measured (label, size, samples/s)."""
    points = [Point(LABELS.index(label), 0, size) for label, size, _ in measured]
    costs = [-math.log(speed) for *_, speed in measured]
    planned = expected_costs(SPACE.arms, BASE, plan), planned_costs(SPACE.arms, BASE, plan)
    return CostModel(SpaceCoordinates(SPACE), planned[0], False, points, costs, planned=planned[1])


def test_a_plan_of_several_sizes_gives_an_arm_its_curve():
    arm = expected("z3", 40.0, micro_batch=8, speeds={2: 30.0, 8: 40.0, 32: 20.0})
    model = model_of([arm, expected("z1", 50.0)])
    few, own, many = model.expected([Point(LABELS.index("z3"), 0, size) for size in (2, 8, 32)])
    # With 15 % its order says nothing.
    assert (few - own, many - own) == pytest.approx((0.85 * math.log(40 / 30), 0.85 * math.log(2)), rel=0.03)
    # Beyond the sizes that it says, the overhead of a pass is shared as usual.
    few, own, many = model.expected([Point(LABELS.index("z1"), 0, size) for size in (1, 8, 32)])
    assert few > own > many


PLAN = [
    expected("z0", 100.0, micro_batch=8, speeds={1: 97.0, 8: 100.0}),
    expected("z1", 90.0, micro_batch=8, speeds={1: 90.0}),
    expected("z2", 60.0, micro_batch=64, speeds={8: 50.0, 64: 60.0}),
    expected("z3", 30.0, micro_batch=64, speeds={1: 20.0, 8: 25.0, 64: 30.0}),
]


def test_an_arm_that_is_foreseen_slow_is_no_less_sure_however_large_its_micro_batch():
    """Otherwise a search spends its trials on what the plan puts last."""
    model = model_of(PLAN, ("z0", 8, 100.0))
    fast, slow, slowest = (Point(LABELS.index(label), 0, 8) for label in ("z1", "z2", "z3"))
    gains = model.predict([fast, slow, slowest]).gain
    assert gains[0] > 1.5 * gains[1] > 1.5 * gains[2]


def test_where_all_arms_are_off_by_one_factor_the_plans_order_stands():
    near, far = (
        model_of(PLAN, *((label, 8, factor * speed) for label, speed in (("z0", 100.0), ("z1", 90.0))))
        for factor in (1.0, 0.4)
    )
    rest = [Point(LABELS.index(label), 0, 8) for label in ("z2", "z3")]
    leader = [Point(LABELS.index("z0"), 0, 8)]
    assert far.expected(rest) - far.expected(leader) == pytest.approx(
        near.expected(rest) - near.expected(leader), abs=0.05
    )


def test_arms_that_are_off_the_plan_each_for_itself_make_the_others_less_sure():
    def deviation(*measured):
        one, other = (Point(LABELS.index(label), 0, 8) for label in ("z2", "z3"))
        return model_of(PLAN, *measured).difference(one, other)[1]

    assert deviation(("z0", 8, 100.0), ("z1", 8, 45.0)) > 1.5 * deviation(("z0", 8, 100.0), ("z1", 8, 90.0))


def test_an_arm_many_times_slower_than_foreseen_says_little_of_the_others():
    rest = [Point(LABELS.index(label), 0, 8) for label in ("z2", "z3")]
    slow, slowest = (model_of(PLAN, ("z0", 8, 1.0 / factor), ("z1", 8, 90.0)) for factor in (1.0, 100.0))
    assert slow.expected(rest) == pytest.approx(slowest.expected(rest), abs=1e-6)
    # It stays far behind the best.
    one, best = (Point(LABELS.index(label), 0, 8) for label in ("z0", "z1"))
    assert slowest.difference(one, best)[0] > 1.0


def test_the_first_trial_is_the_plans_answer():
    plan = (expected("z3", 10.0, micro_batch=24, is_first=True), expected("z2", 9.0))
    search = adaptive(problem(expected=plan))
    own = Candidate(knobs={"zero_optimization": {"stage": 0}}, micro_batch_size=4, slots=2, data_parallel_size=2)
    search.observe(own, SimulatedModel().run(own))
    first = search.ask()
    assert (arm_key(first.complete(BASE)), first.micro_batch_size) == (KEYS["z3"], 24)
    search.tell(first, SimulatedModel().run(first))
    assert arm_key(search.ask().complete(BASE)) != KEYS["z3"]


def test_it_begins_smaller_if_less_fits_here():
    plan = (expected("z3", 10.0, micro_batch=4096, is_first=True),)
    first = adaptive(problem(expected=plan)).ask()
    assert arm_key(first.complete(BASE)) == KEYS["z3"]
    assert 4 < first.micro_batch_size < 4096
    largest = adaptive(problem(expected=plan), max_micro_batch=8).ask()
    assert (arm_key(largest.complete(BASE)), largest.micro_batch_size) == (KEYS["z3"], 8)


def test_a_search_from_a_plan_is_a_function_of_its_history():
    plan = (expected("z3", 10.0, micro_batch=24, is_first=True), expected("z2", 9.0))
    history = drive(adaptive(problem(expected=plan)), SimulatedModel().run)
    replayed = adaptive(problem(expected=plan))
    for candidate, result in trials(history):
        assert replayed.ask() == candidate
        replayed.tell(candidate, result)


def test_an_answer_that_is_not_in_the_space_or_has_run_changes_nothing():
    elsewhere = ExpectedArm(key=("none",), label="z9", samples_per_s=9.0, micro_batch=8, is_first=True)
    assert adaptive(problem(expected=(elsewhere,))).ask() == adaptive().ask()
    plan = (expected("z2", 10.0, micro_batch=16, is_first=True),)
    search, done = adaptive(problem(expected=plan)), adaptive(problem(expected=plan)).ask()
    search.observe(done, ended(Outcome.COMPLETED, metrics={"throughput": 5.0}))
    assert search.ask() != done
