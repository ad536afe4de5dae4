"""How likely the next trial may be to run out of memory."""

import pytest

from zerotune.trial_lib.search.sizes import memory_risk, worth_of_sweep


def test_the_first_trial_risks_what_is_usual_and_a_search_without_failures_twice_that():
    assert memory_risk(asked=0, ran_out=0, in_flight=0) == 0.02
    assert memory_risk(asked=10, ran_out=0, in_flight=0) == 0.05


def test_a_failure_has_to_be_earned_back_before_more_is_risked():
    risks = [memory_risk(asked, ran_out=1, in_flight=0) for asked in range(60)]
    assert risks[40] == 0.01
    assert risks[-1] == 0.05
    assert risks == sorted(risks)


def test_a_trial_in_flight_may_run_out_too():
    assert memory_risk(asked=2, ran_out=0, in_flight=0) > memory_risk(asked=2, ran_out=0, in_flight=1)


def test_foreseen_memory_is_trusted_most_by_the_first_trials_where_a_larger_size_gains_most():
    risks = [memory_risk(asked, ran_out=0, in_flight=0, is_foreseen=True) for asked in range(20)]
    assert risks[:4] == [0.05] * 4
    # They have spent the share of the next ones.
    assert risks[4:11] == [0.02] * 7
    assert risks[-1] == 0.05
    assert memory_risk(asked=1, ran_out=1, in_flight=0, is_foreseen=True) == 0.01


def test_a_sweep_is_worth_its_first_size_and_the_hope_of_more():
    assert worth_of_sweep(0.2, 1.0, []) == 0.2
    assert worth_of_sweep(0.2, 1.0, [(0.3, 0.5)]) == pytest.approx(0.25)
    # A group does not come to a size above one that does not fit.
    assert worth_of_sweep(0.2, 1.0, [(0.3, 0.5), (0.4, 0.9)]) == pytest.approx(0.3)
    # Nothing is gained if the first size runs out of memory.
    assert worth_of_sweep(0.2, 0.9, [(0.1, 0.5)]) == pytest.approx(0.18)
