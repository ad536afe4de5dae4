"""How likely the next trial may be to run out of memory."""

from trial_lib.search.memory_risk import memory_risk


def test_the_first_trial_risks_what_is_usual_and_a_search_without_failures_twice_that():
    assert memory_risk(asked=0, ran_out=0, in_flight=0) == 0.05
    assert memory_risk(asked=10, ran_out=0, in_flight=0) == 0.1


def test_a_failure_has_to_be_earned_back_before_more_is_risked():
    risks = [memory_risk(asked, ran_out=1, in_flight=0) for asked in range(40)]
    assert risks[5] == 0.01
    assert risks[-1] == 0.1
    assert risks == sorted(risks)


def test_a_trial_in_flight_may_run_out_too():
    assert memory_risk(asked=2, ran_out=0, in_flight=0) > memory_risk(asked=2, ran_out=0, in_flight=1)
