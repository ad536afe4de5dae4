"""`zerotune tune --plan`: a study that begins with a plan, and what is wrong with other files."""

import json
import signal
from pathlib import Path

import pytest
from case_fixtures import quick_first
from plan_fixtures import arm_by_hand, devices_by_hand, plan_by_hand
from study_fixtures import Study, Zerotune, run_here

from zerotune.trial_lib.plan.plan_record import PlannedTrials, PlanPaths, PlanRecord
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.search.zero_settings import arm_key
from zerotune.trial_lib.study.history import Asked

pytestmark = pytest.mark.timeout(400)

COMMAND = ["deepspeed", "--num_gpus", "1", "train.py", "--deepspeed_config", "ds_config.json"]


@pytest.fixture
def zerotune(tmp_path: Path, home: Path) -> Zerotune:
    zerotune = Zerotune(tmp_path, home)
    zerotune.folder = zerotune.model
    return zerotune


def plan_of(zerotune: Zerotune, parameters: int = 0) -> Path:
    """Writes a plan whose answer is no first choice of a search: stage 3 with a micro-batch of 4."""
    own = json.loads((zerotune.model / "ds_config.json").read_text())
    arms = tuple(
        arm_by_hand(f"z{stage}", size, 1.0, 1.0, ds_config={**own, "zero_optimization": {"stage": stage}})
        for stage, size in ((3, 4), (1, 2), (2, 2))
    )
    devices = devices_by_hand("h100-80gb", 79.1, arms=arms).model_copy(update={"per_node": 1})
    plan = plan_by_hand(name="model", devices=(devices,), best=0, ds_config=own, parameters=parameters)
    paths = PlanPaths(zerotune.model / "zerotune-plans" / plan.plan_id)
    paths.root.mkdir(parents=True)
    paths.record.write_text(plan.model_dump_json())
    return paths.root


def searched_by(study: Study) -> list[Candidate]:
    """Returns the candidates of the search, in the order of their trials."""
    numbers = sorted(number for number, each in study.results.items() if each.purpose is Purpose.SEARCH)
    files = [study.paths.trial(number).candidate for number in numbers]
    return [Candidate.model_validate_json(file.read_text()) for file in files]


def asked_by(zerotune: Zerotune) -> list[Candidate]:
    """Returns the candidates that the search has asked for so far."""
    if not list(zerotune.folder.glob("zerotune-studies/*/history.jsonl")):
        return []
    events = zerotune.study.history
    return [event.candidate for event in events if isinstance(event, Asked) and event.purpose is Purpose.SEARCH]


@pytest.mark.long
def test_the_first_searched_trial_is_the_plans_answer(zerotune: Zerotune) -> None:
    plan = plan_of(zerotune)
    words = ("--plan", plan, "-m", "throughput", "-z", "1", "3", "--free-batch")
    running = zerotune.start("tune", *words, "--", *COMMAND)
    running.wait_until(lambda: asked_by(zerotune), "the search", timeout_s=300)
    running.process.send_signal(signal.SIGINT)
    assert running.end().returncode == 130
    first = asked_by(zerotune)[0]
    assert (first.zero_stage, first.micro_batch_size) == (3, 4)
    paths = zerotune.study.paths
    assert "It tries z3 first, with a micro-batch of 4" in paths.log.read_text()
    # The study is complete without the plan's own folder, and a resumed one goes by its copy.
    assert json.loads((paths.plan / "plan.json").read_text())["plan_id"] == plan.name


@pytest.mark.parametrize(
    ("name", "said"),
    quick_first(1, [("ds_config.json", "the plan is damaged or of another version"), ("no.json", "no such file")]),
)
def test_a_file_that_is_no_plan_ends_the_command_at_once(zerotune: Zerotune, name: str, said: str) -> None:
    ended = run_here(zerotune.folder, "tune", "--plan", name, "--", *COMMAND)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert not (zerotune.model / "zerotune-studies").exists()


@pytest.mark.long
def test_a_study_goes_on_without_the_plan_of_another_model(zerotune: Zerotune) -> None:
    plan = plan_of(zerotune, parameters=7_000_000_000)
    running = zerotune.start("tune", "--plan", plan, "-m", "throughput", "--free-batch", "--", *COMMAND)
    running.wait_until(lambda: asked_by(zerotune), "the search", timeout_s=300)
    running.process.send_signal(signal.SIGINT)
    ended = running.end()
    assert ended.returncode == 130
    said = "goes on without the plan llama-8b-20261126-150000-37dd, because the plan is for a model with 7,000,000,000"
    assert said in ended.stderr
    study = zerotune.study
    assert said in study.paths.log.read_text()
    # It is compared with nothing that the plan says.
    assert PlannedTrials.in_file(study.paths.planned_trials) is None


def test_a_plan_of_another_precision_ends_the_command_at_once(zerotune: Zerotune) -> None:
    plan, file = plan_of(zerotune), zerotune.model / "ds_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "bf16": {"enabled": True}}))
    ended = zerotune.run("tune", "--plan", plan, "--", *COMMAND)
    assert ended.returncode == 2
    assert "the plan is for parameters of 32 bits, and this configuration has 16 bits" in ended.stderr
    assert not (zerotune.model / "zerotune-studies").exists()


@pytest.mark.long
def test_a_study_begins_with_what_was_planned_for_gpus(zerotune: Zerotune) -> None:
    command = [*COMMAND, "--largest_micro_batch", "8"]
    planned = zerotune.run("plan", "--on", "h100-80gb:1", "-z", "1", "2", "--", *command)
    assert planned.returncode == 0, planned.stderr
    (root,) = (zerotune.model / "zerotune-plans").iterdir()
    plan = PlanRecord.model_validate_json((root / "plan.json").read_text())
    assert plan.chosen is not None
    words = ("--plan", root / "plan.json", "-mt", "4", "-m", "throughput", "-z", "1", "2")
    ended = zerotune.run("tune", *words, "--", *command)
    assert ended.returncode == 0, ended.stderr
    study = zerotune.study
    first = searched_by(study)[0]
    assert first.micro_batch_size <= plan.chosen.micro_batch
    assert arm_key(first.complete(plan.ds_config)) == arm_key(plan.chosen.ds_config)
    compared = PlannedTrials.in_file(study.paths.planned_trials)
    assert compared is not None
    completed = {each.number for each in study.results.values() if each.outcome is Outcome.COMPLETED}
    assert {trial.number for trial in compared.trials if trial.measured_memory} <= completed
    assert compared.memory_errors
    # A CPU core is no H100.
    assert compared.speed_error is None
