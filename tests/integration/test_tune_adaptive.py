"""A study by the default method, on two ranks: sweeps, memory, a confirmed winner, and what Prefect and MLflow show."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mlflow.tracking import MlflowClient
from study_fixtures import Study, Zerotune, query

from zerotune import api
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.study.history import AskedSweep, Withdrawn

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, home: Path) -> tuple[Zerotune, dict[str, Any]]:
    zerotune = Zerotune(tmp_path_factory.mktemp("adaptive"), home, slots=2, program="--layers 4")
    ended = zerotune.run("adaptive", "--free-batch", "-mt", "9", "-m", "throughput", "--json", timeout=350)
    assert ended.returncode == 0, ended.stderr
    return zerotune, json.loads(ended.stdout)


@pytest.fixture(scope="module")
def study(tuned: tuple[Zerotune, dict[str, Any]]) -> Study:
    return tuned[0].study


def test_the_answer_is_of_the_schema_that_the_package_has(tuned: tuple[Zerotune, dict[str, Any]]) -> None:
    jsonschema.validate(tuned[1], json.loads(api.schema_text(api.Study)))


def test_one_process_group_measures_several_sizes_each_a_trial_of_its_own(study: Study) -> None:
    sweeps = [event for event in study.history if isinstance(event, AskedSweep)]
    assert sweeps, "nothing was swept"
    withdrawn = {event.number for event in study.history if isinstance(event, Withdrawn)}
    swept = [number for sweep in sweeps for number, _ in sweep.numbered if number not in withdrawn]
    assert swept
    assert all(study.paths.trial(number).result.exists() for number in swept)
    later = [number for sweep in sweeps for number, _ in sweep.numbered[1:] if number not in withdrawn]
    assert all(study.results[number].swept for number in later)


def test_few_trials_run_out_of_memory(tuned: tuple[Zerotune, dict[str, Any]]) -> None:
    zerotune, document = tuned
    # Of the search's: a size that fitted narrowly once may not in its confirmation's fresh processes.
    outcomes = [result.outcome for result in zerotune.study.results.values() if result.purpose is not Purpose.CONFIRM]
    assert outcomes.count(Outcome.OUT_OF_MEMORY) <= 2, document["trials"]
    assert outcomes.count(Outcome.COMPLETED) >= 5, document["trials"]


def test_the_winner_is_confirmed_in_fresh_processes(study: Study, tuned: tuple[Zerotune, dict[str, Any]]) -> None:
    _, document = tuned
    assert document["confirmation"]["sentence"]
    best = study.results[document["best"]["trial"]]
    assert (best.purpose, best.swept) == (Purpose.CONFIRM, False)
    assert document["best"]["value"] > 0


def test_the_changes_of_a_winner_are_weighed_beside_the_whole(
    study: Study, tuned: tuple[Zerotune, dict[str, Any]]
) -> None:
    finding = tuned[1]["confirmation"]
    if finding["winner"]["verdict"] == "own":
        assert finding["worths"] == []
        return
    weighed = [name for worth in finding["worths"] for name in worth["knobs"]]
    settings = json.loads(study.paths.best_ds_config.read_text())
    own, winner = (study.results[finding[name]["number"]].number for name in ("own", "winner"))
    sizes = {event.number: event.candidate.micro_batch_size for event in study.asked}
    assert ("micro-batch" in weighed) == (sizes[own] != sizes[winner] or "micro-batch" in _of(finding, "dropped"))
    assert len(weighed) == len(set(weighed)) > 0
    # What was dropped stands in the answer as the user has it.
    assert not [name for name in _of(finding, "dropped") if name in settings["zero_optimization"] and name != "stage"]
    tried = [worth for worth in finding["worths"] if worth["verdict"] == "kept" and not worth["reason"]]
    assert all(worth["without"] is not None for worth in tried)


def _of(finding: dict[str, Any], verdict: str) -> list[str]:
    return [name for worth in finding["worths"] if worth["verdict"] == verdict for name in worth["knobs"]]


def test_the_table_says_which_numbers_are_swept(study: Study, tuned: tuple[Zerotune, dict[str, Any]]) -> None:
    """Of each trial; whether a group came to a second size depends on what its first one took."""
    _, document = tuned
    said = {row["trial"]: row["measured"] for row in document["trials"] if row["outcome"] == "completed"}
    trials = [result for result in study.results.values() if result.purpose is not Purpose.PROFILE]
    completed = [result for result in trials if result.outcome is Outcome.COMPLETED]
    assert said == {result.number: "swept" if result.swept else "fresh" for result in completed}


def test_prefect_shows_a_sweep_as_one_task_run_with_its_sizes(tuned: tuple[Zerotune, dict[str, Any]]) -> None:
    zerotune, _ = tuned
    study = zerotune.study.paths.root.name
    tasks = query(
        zerotune.prefect_database,
        "select task_run.name, task_run_state.message from task_run join flow_run on flow_run.id = flow_run_id "
        "join task_run_state on task_run_state.id = task_run.state_id where flow_run.name = ?",
        study,
    )
    sweeps = [event for event in zerotune.study.history if isinstance(event, AskedSweep)]
    results = zerotune.study.results
    for sweep in sweeps:
        (message,) = [message for name, message in tasks if name.startswith(f"sweep-{sweep.first:04d}-")]
        sizes = [results[number].outcome for number, _ in sweep.numbered if number in results]
        assert message == f"{sizes.count(Outcome.COMPLETED)} of {len(sweep.numbered)} sizes completed"
    artifacts = query(
        zerotune.prefect_database,
        "select key from artifact join flow_run on flow_run.id = flow_run_id where flow_run.name = ?",
        study,
    )
    keys = {key for (key,) in artifacts}
    assert {f"sweep-{sweep.first:04d}" for sweep in sweeps} <= keys


def test_each_size_is_a_run_of_mlflow(tuned: tuple[Zerotune, dict[str, Any]]) -> None:
    zerotune, _ = tuned
    client = MlflowClient(tracking_uri=f"sqlite:///{zerotune.folder}/mlflow.db")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    trials = {run.data.tags.get("trial") for run in client.search_runs([experiment.experiment_id])}
    assert {f"{number:04d}" for number in zerotune.study.results} <= trials


@pytest.mark.alone
def test_a_program_whose_need_varies_is_answered_with_a_size_that_fits_again(tmp_path: Path, home: Path) -> None:
    # One layer: most of what is resident is no model, and varies by a tenth from process to process.
    zerotune = Zerotune(tmp_path, home, slots=2)
    ended = zerotune.run("adaptive", "--free-batch", "-mt", "12", "-m", "throughput", "--json", timeout=350)
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["confirmation"]["winner"]["verdict"] == "faster", document["confirmation"]
    outcomes = [row["outcome"] for row in document["trials"]]
    assert outcomes.count("out_of_memory") < outcomes.count("completed"), outcomes
