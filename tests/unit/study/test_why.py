"""Which trials are traced, and what a study says of its answer, of the user's configuration and of its arms."""

from types import SimpleNamespace

import pytest

from tests.plan_fixtures import GIB, arm_by_hand, devices_by_hand
from tests.unit.study.test_confirming import OTHER, OWN, arguments, driver_of, ended, searched
from zerotune.trial_lib.messages.measurement import TracedStep
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.search.zero_settings import arm_key
from zerotune.trial_lib.study.confirm import answer_of, next_confirming_plan

__all__ = ["arguments", "searched"]

TRACED = TracedStep(seconds=1.2, parts={"compute": 0.9, "data": 0.3}, steps=3, spent=4.0)


def confirmed(driver, own: TracedStep | None, other: TracedStep | None):
    """Confirms to the end, and returns the candidates of the trials that were to be traced."""
    traced = []
    while (plan := next_confirming_plan(driver)) is not None:
        mine = own if plan.candidate == OWN else other
        if plan.traces:
            traced.append(plan.candidate)
        speed = 100.0 if plan.candidate == OWN else 150.0
        driver.tell(
            ended(
                plan.number, Purpose.CONFIRM, plan.candidate, speed + plan.number, traced=mine if plan.traces else None
            )
        )
    return traced


def test_each_configuration_is_traced_once(arguments, searched):
    driver = driver_of(arguments, searched)
    assert sorted(map(str, confirmed(driver, TRACED, TRACED))) == sorted(map(str, [OWN, OTHER]))
    answer = answer_of(driver)
    assert [(account.role, account.basis, account.seconds) for account in answer.why] == [
        ("winner", "traced", 1.0),
        ("own", "traced", 1.0),
    ]
    assert answer.why[0].shares == {"compute": pytest.approx(0.75), "data": pytest.approx(0.25)}
    assert answer.why[0].slowed == pytest.approx(1.2)
    assert "num_workers" in answer.why[0].advice
    document = answer.document(driver)
    assert document["why"][1]["sentence"].startswith("With your configuration, a step of 1 s is 75 % computation")


def test_a_failed_trace_is_not_tried_again_and_the_answer_stands(arguments, searched):
    driver = driver_of(arguments, searched)
    failed = TracedStep(failure="The steps could not be traced: RuntimeError: no CUPTI")
    assert len(confirmed(driver, failed, TRACED)) == 2
    answer = answer_of(driver)
    assert answer.gain == pytest.approx(1.5, abs=0.05)
    assert answer.why[0].basis == "traced"
    assert answer.why[1].sentence.endswith("your configuration: The steps could not be traced: RuntimeError: no CUPTI")


def test_without_any_trace_the_answer_says_that(arguments, searched):
    driver = driver_of(arguments, searched)
    confirmed(driver, None, None)
    assert [account.failure for account in answer_of(driver).why] == ["No trial of it was traced."] * 2


def test_the_trial_of_the_users_configuration_is_traced(arguments, searched, tmp_path):
    driver = driver_of(arguments, searched)
    plan = driver.submitted_plan()
    assert plan.traces
    assert driver.state.submitted.outcome is Outcome.COMPLETED


def test_the_seconds_of_a_trace_do_not_shorten_the_confirmation(arguments, tmp_path, searched):
    """A round costs as much as the trials of its other rounds, which trace nothing."""
    history = (searched / "history.jsonl").read_text()
    rounds = []
    for name, phases in (("plain", '{"steps": 1.0}'), ("traced", '{"steps": 1.0, "trace": 500.0}')):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "history.jsonl").write_text(
            history.replace('{"steps": 1.0}', phases).replace('{"steps":1.0}', phases)
        )
        driver = driver_of(arguments, folder)
        confirmed(driver, TRACED, TRACED)
        rounds.append(answer_of(driver).finding.rounds)
    assert "500.0" in (tmp_path / "traced" / "history.jsonl").read_text()
    assert rounds[0] == rounds[1]


def test_an_arm_without_a_trace_has_what_the_plan_foresaw_or_nothing(arguments, searched):
    driver = driver_of(arguments, searched)
    confirmed(driver, TRACED, None)
    arms = [
        arm_by_hand(label, 4, 20.0, 20.0, seconds={"compute": 0.3, "gathering": 0.1}) for label in ("z1", "z2", "z3")
    ]
    devices = devices_by_hand("h100-80gb", 80 * GIB, arms=tuple(arms))
    plan = {"devices": devices, "expected": (), "key_of": lambda arm: arm_key(arm.ds_config)}
    driver.advice.plan = SimpleNamespace(cluster=None, **plan)
    assert len(answer_of(driver).why) == 2
    driver.advice.plan = SimpleNamespace(cluster="these devices", **plan)
    (account,) = answer_of(driver).why[2:]
    # z1 is traced, and z3 was not tried.
    assert (account.name, account.basis, account.shares["gathering"]) == ("z2, micro-batch 4", "foreseen", 0.25)
    assert account.sentence.endswith("25 % waiting for gathered parameters (foreseen, not measured).")
