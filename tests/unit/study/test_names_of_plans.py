"""A trial has the name of its candidate in the study, which two different candidates do not share."""

from pathlib import Path

from simulated_studies import Experiment

from zerotune.trial_lib.records.candidate import Purpose


def test_a_plan_has_the_name_that_distinguishes_its_candidate(tmp_path: Path) -> None:
    team = Experiment(tmp_path)
    with team.opened() as study:
        team.finish(study)
        state = study.driver.state
        searched = next(number for number, purpose in state.purposes.items() if purpose is Purpose.SEARCH)
        plan = study.driver.plan_again(Purpose.CONFIRM, state.candidates[searched])
        assert plan.name == state.names[plan.number] == state.names[searched]
        assert plan.label == state.label(plan.number)
