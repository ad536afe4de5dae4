"""What a study compares by, and what its answer says of what it did otherwise than it was asked."""

from dataclasses import replace
from pathlib import Path

import pytest
from simulated_studies import PROFILE, Experiment

from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.study.arguments import INSTEAD
from zerotune.trial_lib.study.confirm import answer_of

ASKED = {"metric": "FLOPS_per_gpu", "from_earlier": False}


@pytest.fixture
def team(tmp_path: Path) -> Experiment:
    return Experiment(tmp_path)


def test_where_no_flops_are_counted_the_study_goes_by_throughput_and_says_so(team: Experiment) -> None:
    team.profile = replace(PROFILE, flops_per_sample=0.0)
    study = team.tune(**ASKED)
    assert study.record.metric == "throughput"
    assert study.record.arguments["metric"] == "FLOPS_per_gpu"  # what was asked for
    answer = answer_of(study.driver)
    assert answer is not None
    assert answer.finding is not None
    assert answer.finding.winner is not None
    assert answer.finding.winner.verdict == "faster"
    assert answer.document(study.driver)["metric"] == "throughput"
    assert answer.finding.lines[0] == INSTEAD


def test_a_study_of_no_flops_that_was_cut_short_is_resumed_by_throughput(team: Experiment) -> None:
    team.profile = replace(PROFILE, flops_per_sample=0.0)
    with team.opened(**ASKED) as study:
        driver = study.driver
        driver.tell(team._ended(driver.profile_plan(), driver))
        study.profiled()
    with team.resumed(study.paths.root) as study:
        assert study.driver.metric == study.record.metric == "throughput"
        assert study.driver.setup.arguments.metric == "FLOPS_per_gpu"


def test_another_metric_is_kept_whatever_is_counted(team: Experiment) -> None:
    team.profile = replace(PROFILE, flops_per_sample=0.0)
    study = team.tune(metric="latency", from_earlier=False)
    assert study.record.metric == "latency"
    answer = answer_of(study.driver)
    assert answer is not None
    assert answer.finding is None or INSTEAD not in answer.finding.lines


def test_what_two_failures_ruled_out_stands_in_the_answer_and_in_the_log(team: Experiment) -> None:
    def crash(candidate: Candidate) -> str:
        stage = candidate.zero_stage or 0
        return f"The program raised AssertionError: gradient {stage} computed twice. Log: /x" if stage >= 2 else ""

    team.crash = crash
    study = team.tune(metric="throughput", from_earlier=False, max_trials=12)
    answer = answer_of(study.driver)
    assert answer is not None
    assert answer.finding is not None
    (sentence,) = [line for line in answer.finding.lines if line.startswith("Left out after trials")]
    assert "ZeRO stage 2 and above. The program raised AssertionError: gradient" in sentence
    assert sentence in study.paths.log.read_text()
