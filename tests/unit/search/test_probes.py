"""Which fine knobs an arm tries, and what a setting that nobody has tried may bring."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from adaptive_world import BUCKET, OVERLAP, SPACE, SimulatedModel, adaptive, drive, problem, trials

from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.search.base import ExpectedArm, key_of
from zerotune.trial_lib.search.cost_model import CostModel, PlannedCosts, Point, SpaceCoordinates
from zerotune.trial_lib.search.knobs import Arm, Knob, get_knob
from zerotune.trial_lib.search.probes import ArmProbes, Surprises, departures, index_of, settings_of

LARGE = Arm({"zero_optimization": {"stage": 2}}, tuple(Knob(f"zero_optimization.k{i}", (0, 1, 2, 3)) for i in range(4)))


def probes(costs, arm=LARGE, same=0, in_flight=()):
    """Returns the probes of an arm whose families cost this much, each knob by itself, whatever the size."""
    measured = [(cost, Point(0, index_of(arm, settings), 8)) for settings, cost in costs.items()]
    alone = {settings[0]: cost for settings, cost in costs.items() if len(settings) == 1}

    def expected(points):
        known = {point.index: cost for cost, point in measured}
        return np.array([known.get(p.index, sum(alone.get(s, 0.0) for s in settings_of(arm, p.index))) for p in points])

    return ArmProbes.of(arm, 0, same, measured, [Point(0, index_of(arm, each), 8) for each in in_flight], expected)


def setting(knob, value):
    return f"zero_optimization.k{knob}", str(value)


@dataclass
class OneKnob(SimulatedModel):
    """Stage 3 is the fourth of the arms at its best guess, and by far the best with overlap."""

    speed: dict[int, float] = field(default_factory=lambda: {0: 1.0, 1: 1.05, 2: 1.02, 3: 0.9})

    def throughput(self, candidate: Candidate) -> float:
        overlaps = candidate.zero_stage == 3 and get_knob(candidate.knobs, OVERLAP)
        return super().throughput(candidate) * (1.5 if overlaps else 1.0)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_arm_behind_at_its_best_guess_wins_by_the_knob_that_makes_it_the_best(seed):
    search = adaptive(max_trials=40, seed=seed)
    drive(search, OneKnob().run)
    best, _ = search.best
    assert (best.zero_stage, get_knob(best.knobs, OVERLAP)) == (3, True)


def test_a_search_that_ends_by_itself_has_tried_every_value_of_each_arm_that_is_near():
    model = SimulatedModel(speed={0: 1.0, 1: 1.0, 2: 1.0, 3: 0.9})
    history = trials(drive(adaptive(max_trials=200), model.run))
    assert len(history) < 100
    for arm in SPACE.arms[1:]:
        if "offload" in arm.label:
            continue
        tried = {
            setting
            for each, _ in history
            if (place := SPACE.locate(each.knobs)) and SPACE.arms[place[0]] == arm
            for setting in settings_of(arm, place[1])
        }
        assert tried == {(knob.path, repr(value)) for knob in arm.fine for value in knob.values[1:]}, arm.label


def test_a_departure_changes_one_knob():
    found = [settings_of(LARGE, index) for index in departures(LARGE, 0)]
    assert len(found) == len(set(found)) == 12
    assert {len(each) for each in found} == {1}
    leader = index_of(LARGE, [setting(1, 2)])
    assert all(len(settings_of(LARGE, index) ^ {setting(1, 2)}) <= 2 for index in departures(LARGE, leader))


def test_an_arm_without_fine_knobs_has_its_only_family():
    arm = SPACE.arms[0]
    assert ArmProbes.of(arm, 0, 0, [(1.0, Point(0, 0, 8))], [], lambda points: np.ones(len(points))).candidates(
        random.Random(0)
    ) == [0]


def test_what_gains_is_tried_together_and_what_mattered_in_pairs():
    of_arm = probes(
        {(): 0.0, (setting(0, 1),): -0.04, (setting(1, 1),): -0.03, (setting(2, 1),): 0.06, (setting(3, 1),): 0.001}
    )
    candidates = {settings_of(LARGE, index) for index in of_arm.candidates(random.Random(0))}
    assert {setting(0, 1), setting(1, 1)} in candidates
    assert {setting(1, 1), setting(2, 1)} in candidates
    pair, of_nothing = (index_of(LARGE, [setting(2, 1), setting(other, 1)]) for other in (1, 3))
    assert of_arm.novelty(pair, []) > 0 == of_arm.novelty(of_nothing, [])


def test_knobs_that_the_catalogue_names_together_are_tried_together_whether_they_mattered_or_not():
    arm = SPACE.arms[1]
    of_arm = probes({(): 0.0, ((BUCKET, "250000"),): 0.0, ((OVERLAP, "True"),): 0.0}, arm)
    both = index_of(arm, [(BUCKET, "250000"), (OVERLAP, "True")])
    assert both in of_arm.candidates(random.Random(0))
    assert of_arm.novelty(both, []) > 0


def test_a_value_that_did_nothing_elsewhere_or_whose_knob_did_nothing_here_is_a_smaller_hope():
    index = index_of(LARGE, [setting(0, 2)])
    untried, same_knob = probes({(): 0.0}), probes({(): 0.0, (setting(0, 1),): 0.0})
    in_vain, gained = (probes({(): 0.0, (setting(0, 2),): cost}, same=1) for cost in (0.0, -0.3))
    assert untried.novelty(index, [untried]) == untried.novelty(index, [gained]) == 1
    assert untried.novelty(index, [in_vain]) == same_knob.novelty(index, [same_knob]) == 0.5
    of_switches = probes({(): 0.0, (setting(0, 2),): 0.0})
    assert untried.novelty(index, [of_switches]) < 0.5
    assert in_vain.novelty(index, []) == 0


def test_a_value_in_flight_is_not_asked_for_again():
    index = index_of(LARGE, [setting(0, 2)])
    assert probes({(): 0.0}, in_flight=[[setting(0, 2)]]).novelty(index, []) == 0


def test_a_value_that_ran_beside_one_that_costs_much_has_not_been_tried():
    both = (setting(0, 1), setting(1, 1))
    assert probes({(): 0.0, both: 0.4}).novelty(index_of(LARGE, both[:1]), []) == 1
    assert probes({(): 0.0, both: 0.0}).novelty(index_of(LARGE, both[:1]), []) == 0


def test_surprises_are_expected_as_often_as_they_came_and_less_of_what_is_far_behind():
    def worth(costs, behind=0.0):
        return float(Surprises([probes(costs)]).worth(np.ones(1), np.array([behind]))[0])

    none, vain = {(): 0.0}, {(): 0.0, **{(setting(knob, 1),): 0.01 for knob in range(4)}}
    assert worth(vain) < worth(none) < worth({**vain, (setting(0, 1),): -0.3})
    assert worth(none) > worth(none, 0.12) > worth(none, 0.5) == 0


def test_an_order_that_the_first_trials_refute_counts_less():
    prior, points = [0.0, 0.2, 0.4, 0.6, 0.8], [Point(arm, 0, 16) for arm in range(5)]

    def last_behind(costs):
        model = CostModel(SpaceCoordinates(SPACE), prior, False, points[: len(costs)], costs)
        expected = model.expected(points)
        return expected[4] - expected[0]

    assert last_behind([1.0, 1.0, 1.0]) < 0.6 * last_behind([1.0, 1.2, 1.4])


def planned(costs):
    """The costs that a plan foresees of arms."""
    return {arm: PlannedCosts([16], [cost], 0.11) for arm, cost in enumerate(costs)}


def test_a_plan_that_trials_refute_may_be_wrong_about_each_arm():
    prior, points = [0.0, 0.2, 0.4, 0.6, 0.8], [Point(arm, 0, 16) for arm in range(5)]

    def spread(costs):
        known = points[: len(costs)]
        model = CostModel(SpaceCoordinates(SPACE), prior, False, known, costs, planned=planned(prior))
        return model.difference(points[3], points[4])[1]

    assert spread([1.0, 0.3, 1.6]) > 1.2 * spread([1.0, 1.2, 1.4])


def test_an_arm_that_refutes_a_plan_gives_the_last_one_more_hope():
    prior, points = [0.0, 0.1, 0.2, 0.3, 0.6], [Point(arm, 0, 16) for arm in range(5)]

    def last_may_win(costs):
        known = points[: len(costs)]
        model = CostModel(SpaceCoordinates(SPACE), prior, False, known, costs, planned=planned(prior))
        return model.predict([points[4]]).gain[0]

    assert last_may_win([2.0, 2.6]) > last_may_win([2.0, 2.1])


def test_the_arm_that_a_plan_puts_last_runs_among_the_first_trials():
    base = problem().base_config
    speeds = [1.0, 0.9, 0.8, 0.7, 0.4]  # stage 3 is the last of the space
    plan = tuple(
        ExpectedArm(key=key_of(arm, base), label=arm.label, samples_per_s=speed, is_first=speed == 1.0)
        for arm, speed in zip(SPACE.arms, speeds, strict=True)
    )
    model = SimulatedModel(speed={0: 0.6, 1: 0.7, 2: 0.8, 3: 1.2})
    history = trials(drive(adaptive(problem(expected=plan), max_trials=10), model.run))
    first = next(place for place, (candidate, _) in enumerate(history) if candidate.zero_stage == 3)
    assert first <= 5
