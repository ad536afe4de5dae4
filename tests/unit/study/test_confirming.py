"""A study's last step over its record: what is told is not run again, what was cut short is resumed, and the answer."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.launch.starters import ColdStarter
from zerotune.trial_lib.launch.trial import ThisHost
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import Outcome, TrialDevice, TrialResult
from zerotune.trial_lib.records.units import name_of
from zerotune.trial_lib.study.arguments import MINUTES_OVER, StudyArguments
from zerotune.trial_lib.study.confirm import answer_of, confirmation_of, next_confirming_plan, no_answer, search_found
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.history import Asked, Event, History, Stopped, Told
from zerotune.trial_lib.study.setup import StudySetup

BASE = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
PROFILE = ModelProfile(
    num_params=10_000,
    trainable_num_params=10_000,
    activation_mem_per_gpu=1000,
    gpu_mem=2**30,
    data_parallel_size=1,
    flops_per_sample=1e6,
)
OWN = Candidate(micro_batch_size=2, slots=1, data_parallel_size=1)
OTHER = Candidate(
    knobs={"zero_optimization": {"stage": 2}}, micro_batch_size=2, gradient_accumulation_steps=1, data_parallel_size=1
)


@pytest.fixture
def arguments(tmp_path: Path) -> StudyArguments:
    model = tmp_path / "model"
    model.mkdir()
    (model / "train.py").write_text("")
    config = tmp_path / "experiment.yaml"
    hparams = {"deepspeed_config": BASE}
    config.write_text(
        yaml.safe_dump({"name": "t", "entrypoint": "deepspeed train.py", "hyperparameters": hparams, "max_restarts": 0})
    )
    return StudyArguments(config_path=config, model_dir=model, method="random", metric="throughput")


def driver_of(arguments: StudyArguments, folder: Path) -> StudyDriver:
    assert arguments.config_path is not None
    experiment = read_experiment(arguments.config_path, arguments.model_dir)
    paths = StudyPaths(folder)
    paths.trials.mkdir(parents=True, exist_ok=True)
    starter = ColdStarter("python", [], {}, lambda text: None)
    host = Host("cuda", ["0"], 2**30)
    place = ThisHost(starter, host, folder)
    return StudyDriver(StudySetup.now("s", 0.0, experiment, arguments, paths, host), place, logging.getLogger("s"))


def ended(number: int, purpose: Purpose, candidate: Candidate, throughput: float, **fields: Any) -> TrialResult:
    return TrialResult(
        trial_id=f"s-{number}",
        number=number,
        purpose=purpose,
        config_hash=candidate.config_hash(BASE),
        outcome=Outcome.COMPLETED,
        metrics={"throughput": throughput, "latency": 1.0},
        phases={"steps": 1.0},
        started_at=100.0 + number,
        **fields,
    )


def write(folder: Path, *events: Event) -> None:
    history = History(StudyPaths(folder).history)
    for event in events:
        history.append(event)


@pytest.fixture
def searched(arguments: StudyArguments, tmp_path: Path) -> Path:
    """A study whose search has ended: the other configuration read twice as fast."""
    folder = tmp_path / "study"
    folder.mkdir()
    profiled = ended(0, Purpose.PROFILE, OWN, 1.0, profile=PROFILE)
    write(
        folder,
        Asked(0, Purpose.PROFILE, OWN),
        Told(0, profiled),
        Asked(1, Purpose.SUBMITTED, OWN),
        Told(1, ended(1, Purpose.SUBMITTED, OWN, 100.0)),
        Asked(2, Purpose.SEARCH, OTHER),
        Told(2, ended(2, Purpose.SEARCH, OTHER, 200.0)),
        Stopped("the search has ended"),
    )
    return folder


def test_before_the_search_has_ended_there_is_nothing_to_confirm(arguments: StudyArguments, tmp_path: Path) -> None:
    driver = driver_of(arguments, tmp_path / "new")
    assert confirmation_of(driver) is None
    assert next_confirming_plan(driver) is None
    assert answer_of(driver) is None


def test_a_study_tells_what_its_search_has_found_before_it_confirms_it(
    arguments: StudyArguments, searched: Path
) -> None:
    driver = driver_of(arguments, searched)
    assert search_found(driver) == (
        f"The search is over and expects most of {name_of(OTHER)}: trial 0002 read throughput 200.0 samples/s. "
        "Now it is confirmed beside your configuration."
    )
    plan = next_confirming_plan(driver)
    assert plan is not None
    driver.tell(ended(plan.number, Purpose.CONFIRM, plan.candidate, 100.0))
    assert search_found(driver) == ""


def test_a_study_confirms_to_its_end_and_promises_the_means(arguments: StudyArguments, searched: Path) -> None:
    driver = driver_of(arguments, searched)
    readings = iter([100.0, 151.0, 150.0, 101.0, 102.0, 149.0, 148.0, 101.0])
    while (plan := next_confirming_plan(driver)) is not None:
        driver.tell(ended(plan.number, Purpose.CONFIRM, plan.candidate, next(readings)))
    answer = answer_of(driver)
    assert answer is not None
    assert answer.finding is not None
    assert answer.best.metrics["throughput"] == pytest.approx(149.49, abs=0.01)
    assert answer.best.number == 8
    assert driver.state.candidates[answer.best.number] == OTHER
    assert answer.gain == pytest.approx(1.48, abs=0.01)
    assert answer.gain_interval is not None
    document = answer.document(driver)
    assert document["submitted"]["throughput"] == pytest.approx(101.0, abs=0.01)
    assert document["confirmation"]["sentence"].startswith("1.48x faster than your configuration (95 % CI ")


def test_a_resumed_study_runs_what_was_cut_short_under_its_number_and_nothing_twice(
    arguments: StudyArguments, searched: Path
) -> None:
    write(
        searched,
        Asked(3, Purpose.CONFIRM, OWN),
        Told(3, ended(3, Purpose.CONFIRM, OWN, 100.0)),
        Asked(4, Purpose.CONFIRM, OTHER),
    )
    driver = driver_of(arguments, searched)
    plan = next_confirming_plan(driver)
    assert plan is not None
    assert (plan.number, plan.candidate, plan.purpose) == (4, OTHER, Purpose.CONFIRM)
    driver.tell(ended(4, Purpose.CONFIRM, OTHER, 150.0))
    after = next_confirming_plan(driver)
    assert after is not None
    assert (after.number, after.candidate) == (5, OTHER)


def test_a_confirmation_that_is_cut_short_makes_the_user_s_own_configuration_no_faster_one(
    arguments: StudyArguments, searched: Path
) -> None:
    write(searched, Asked(3, Purpose.CONFIRM, OWN), Told(3, ended(3, Purpose.CONFIRM, OWN, 250.0)))
    answer = answer_of(driver_of(arguments, searched))
    assert answer is not None
    assert (answer.best.number, answer.finding, answer.gain) == (2, None, 2.0)


def test_a_search_for_micro_batch_sizes_confirms_nothing(arguments: StudyArguments, searched: Path) -> None:
    driver = driver_of(arguments.model_copy(update={"method": "micro_batch"}), searched)
    assert next_confirming_plan(driver) is None
    answer = answer_of(driver)
    assert answer is not None
    assert (answer.best.number, answer.finding, answer.gain) == (2, None, 2.0)


def test_a_study_whose_minutes_were_over_before_its_first_trial_says_that_nothing_was_tried(
    arguments: StudyArguments, searched: Path
) -> None:
    in_time = arguments.model_copy(update={"max_minutes": 5.0})
    assert no_answer(driver_of(in_time, searched)) is None
    end_search(searched, Stopped(MINUTES_OVER))
    none = no_answer(driver_of(in_time, searched))
    assert none is not None
    assert none.headline == "No configuration but yours was tried."
    assert "the wait for slots used up the 5 minutes of --max-minutes" in none.reason


def test_a_search_space_without_another_configuration_is_no_answer(arguments: StudyArguments, searched: Path) -> None:
    end_search(searched, Stopped("the search has ended"))
    driver = driver_of(arguments, searched)
    assert answer_of(driver) is None
    none = no_answer(driver)
    assert none is not None
    assert none.sentence.startswith("No configuration but yours was tried. The search has no other configuration")
    spent = no_answer(driver_of(arguments.model_copy(update={"max_trials": 1}), searched))
    assert spent is not None
    assert spent.reason == "--max-trials 1 leaves no trial for another."


def end_search(folder: Path, *events: Event) -> None:
    """Replaces the search of a study's history by other events."""
    history = StudyPaths(folder).history
    lines = [line for line in history.read_text().splitlines(keepends=True) if '"search"' not in line]
    history.write_text("".join(line for line in lines if '"stopped"' not in line))
    write(folder, *events)


def failed(number: int, candidate: Candidate, outcome: Outcome, reason: str) -> tuple[Event, Event]:
    end = replace(ended(number, Purpose.SEARCH, candidate, 0.0), outcome=outcome, reason=reason, metrics={})
    return Asked(number, Purpose.SEARCH, candidate), Told(number, end)


def other(stage: int, size: int = 2) -> Candidate:
    knobs = {"zero_optimization": {"stage": stage}}
    return Candidate(knobs=knobs, micro_batch_size=size, data_parallel_size=1)


def test_a_study_that_measured_no_other_configuration_has_no_answer_but_the_reason(
    arguments: StudyArguments, searched: Path
) -> None:
    crash = "The program raised AssertionError: stage {} is not 1. Log: /trials/{}/rank0.log"
    end_search(
        searched,
        *failed(2, other(2), Outcome.CRASHED, crash.format(2, 2)),
        *failed(3, other(3), Outcome.CRASHED, crash.format(3, 3)),
        *failed(4, other(3, 64), Outcome.OUT_OF_MEMORY, "Out of memory."),
        # The same configuration again is not another one.
        *failed(5, other(3), Outcome.CRASHED, crash.format(3, 5)),
        Stopped("the search has ended"),
    )
    driver = driver_of(arguments, searched)
    assert answer_of(driver) is None
    none = no_answer(driver)
    assert none is not None
    assert none.headline == "None of the 3 others could be measured."
    assert none.reason.startswith(
        "2 of 3 ended like this one: The program raised AssertionError: stage 2 is not 1. Your configuration ran"
    )
    assert "--map KEY=OPTION" in none.reason


def test_a_trial_that_was_stopped_because_it_cannot_win_is_a_measurement(
    arguments: StudyArguments, searched: Path
) -> None:
    end_search(
        searched,
        *failed(2, other(2), Outcome.TOO_SLOW, "Stopped."),
        *failed(3, other(3), Outcome.OUT_OF_MEMORY, "Out of memory."),
        Stopped("the search has ended"),
    )
    driver = driver_of(arguments, searched)
    assert no_answer(driver) is None
    answer = answer_of(driver)
    assert answer is not None
    assert answer.sentence == "No configuration was faster than yours (one measurement, not confirmed)."


def test_an_answer_says_how_many_of_the_others_were_not_measured(arguments: StudyArguments, searched: Path) -> None:
    end_search(
        searched,
        Asked(2, Purpose.SEARCH, OTHER),
        Told(2, ended(2, Purpose.SEARCH, OTHER, 200.0)),
        *failed(3, other(3), Outcome.OUT_OF_MEMORY, "Out of memory."),
        Stopped("the search has ended"),
    )
    driver = driver_of(arguments, searched)
    while (plan := next_confirming_plan(driver)) is not None:
        driver.tell(ended(plan.number, Purpose.CONFIRM, plan.candidate, 100.0))
    answer = answer_of(driver)
    assert answer is not None
    assert answer.finding is not None
    assert answer.finding.others.startswith("1 of the 2 other configurations could not be measured. Out of memory. ")
    assert answer.finding.others in answer.finding.lines


def test_contenders_that_all_fail_in_the_confirmation_leave_no_answer(
    arguments: StudyArguments, searched: Path
) -> None:
    driver = driver_of(arguments, searched)
    while (plan := next_confirming_plan(driver)) is not None:
        end = ended(plan.number, Purpose.CONFIRM, plan.candidate, 100.0)
        if plan.candidate == OTHER:
            gone = {"outcome": Outcome.CRASHED, "reason": "It broke. Log: /x.log", "metrics": {}}
            end = replace(end, **gone)
        driver.tell(end)
    assert answer_of(driver) is None
    none = no_answer(driver)
    assert none is not None
    assert none.sentence.endswith("(1) none could be measured a second time. It broke.")


def test_trials_that_are_compared_are_to_have_the_same_devices(arguments: StudyArguments, searched: Path) -> None:
    driver = driver_of(arguments, searched)
    first = next_confirming_plan(driver)
    assert first is not None
    assert first.preferred == ()
    devices = [TrialDevice(device="GPU-b")]
    driver.tell(ended(first.number, Purpose.CONFIRM, first.candidate, 20.0, devices=devices))
    second = next_confirming_plan(driver)
    assert second is not None
    assert (second.number, second.preferred) == (first.number + 1, ("GPU-b",))
