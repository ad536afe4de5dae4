"""One study from the command to its end, on two ranks, and everything it leaves: files, Prefect's record, MLflow's."""

import contextlib
import json
import re
import socket
import statistics
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from study_fixtures import Running, Study, Zerotune, query

from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.arms import CandidateNames

# Hugging Face's hub reads it when it is imported.
SETS_A_VARIABLE = """\
import os
os.environ["HF_HOME"] = "/home/of/the/program"
import huggingface_hub.constants
print("hub in", huggingface_hub.constants.HF_HOME, flush=True)
"""


@dataclass(frozen=True)
class Ran:
    zerotune: Zerotune
    command: Running
    ended: subprocess.CompletedProcess[str]
    strangers: list[int]

    @property
    def study(self) -> Study:
        return self.zerotune.study

    def prefect(self, sql: str) -> list[tuple[Any, ...]]:
        """Returns rows of Prefect's database; `:id` in the query is the study's flow run."""
        ((flow_run,),) = query(
            self.zerotune.prefect_database, "select id from flow_run where name = ?", self.study.paths.root.name
        )
        return query(self.zerotune.prefect_database, sql, flow_run)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Ran:
    zerotune = Zerotune(tmp_path_factory.mktemp("asha"), home, slots=2, program="--largest_micro_batch 300")
    program = zerotune.model / "train.py"
    program.write_text(SETS_A_VARIABLE + program.read_text())
    command = zerotune.start("asha", "-mt", "5", "--json")
    command.wait_until(lambda: asked_by_a_stranger(command), "its Prefect server", 120)
    strangers = asked_by_a_stranger(command)
    return Ran(zerotune, command, command.follow(timeout=600), strangers)


def asked_by_a_stranger(command: Running) -> list[int]:
    """Returns the answers to requests for parameters and logs without a credential; none before the server is up."""
    paths = ("/api/flow_runs/filter", "/api/logs/filter", "/api/artifacts/filter", "/api/admin/settings")
    with contextlib.suppress(httpx.ConnectError):
        return [
            httpx.post(f"http://127.0.0.1:{port}{path}", json={}, trust_env=False, timeout=60).status_code
            for port in sorted({*command.ports})
            for path in paths
        ]
    return []


@pytest.fixture(scope="module")
def client(ran: Ran) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{ran.zerotune.folder}/mlflow.db")


@pytest.fixture(scope="module")
def runs(client: MlflowClient) -> list[Run]:
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def test_it_ends_with_exit_code_0_and_prints_exactly_one_json_document(ran: Ran) -> None:
    assert ran.ended.returncode == 0, ran.ended.stderr
    document = json.loads(ran.ended.stdout)
    assert ran.ended.stdout == json.dumps(document, indent=2) + "\n"
    assert document["status"] == "completed"
    assert document["folder"] == str(ran.study.paths.root)
    assert document["best_ds_config"] == json.loads(ran.study.paths.best_ds_config.read_text())
    assert document["gain"] == pytest.approx(ran.study.record["gain"])
    assert document["best"]["trial"] == ran.study.record["best_number"]


def test_its_prefect_server_shows_nothing_to_a_process_without_its_credential(ran: Ran) -> None:
    assert ran.strangers == [401] * 4


def test_it_says_where_the_time_of_a_step_goes(ran: Ran) -> None:
    why = json.loads(ran.ended.stdout)["why"]
    assert [account["role"] for account in why][:2] in (["winner", "own"], ["own"], ["own", "other"])
    # The program makes 40 steps of a few milliseconds. At the user's own size all of them may be measured.
    assert why[0]["basis"] == "traced" or why[0]["role"] == "own", why[0]["failure"]
    for account in why:
        if account["basis"] == "traced":
            assert sum(account["shares"].values()) == pytest.approx(1.0)
            assert ran.study.results[account["trial"]].traced is not None
        else:
            assert account["failure"] == "The program ended before enough steps could be traced."


def test_every_trial_says_one_line_on_standard_error(ran: Ran) -> None:
    for number in ran.study.results:
        # Tests beside this one may have its slots for a while.
        of_it = rf"^trial {number:04d} (?!waits for|has its slots)"
        assert len(re.findall(of_it, ran.ended.stderr, re.MULTILINE)) == 1
    assert "Traceback" not in ran.ended.stderr


def test_the_folder_holds_the_whole_study(ran: Ran) -> None:
    paths = ran.study.paths
    assert paths.experiment.read_text() == ran.zerotune.config.read_text()
    for file in (paths.record, paths.history, paths.profile, paths.log, paths.best_command, paths.best_ds_metrics):
        assert file.stat().st_size > 0, file
    assert "autotuning" not in json.loads(paths.best_ds_config.read_text())
    for number, result in ran.study.results.items():
        trial = paths.trial(number)
        assert trial.candidate.exists()
        assert trial.ds_config.exists()
        assert [Path(log) for log in result.logs] == [trial.log(0), trial.log(1)]
        assert all(Path(log).exists() for log in result.logs)


def test_a_library_finds_the_variables_that_the_program_sets_before_it_imports_it(ran: Ran) -> None:
    for number in ran.study.results:
        assert "hub in /home/of/the/program\n" in ran.study.paths.trial(number).log(0).read_text()


def test_max_trials_counts_the_profile_and_neither_the_submitted_configuration_nor_what_confirms(ran: Ran) -> None:
    # The profile is asked for once more, with what it has measured.
    asked = {event.number: event.purpose for event in ran.study.asked}
    purposes = list(asked.values())
    assert purposes[:6] == [Purpose.PROFILE, Purpose.SUBMITTED, *[Purpose.SEARCH] * 4]
    assert set(purposes[6:]) == {Purpose.CONFIRM}
    assert [event.number for event in ran.study.told] == list(asked)
    assert len(ran.study.stopped) == 1


def test_an_out_of_memory_trial_does_not_end_the_search(ran: Ran) -> None:
    outcomes = [result.outcome for result in ran.study.results.values()]
    assert Outcome.OUT_OF_MEMORY in outcomes
    assert outcomes.index(Outcome.OUT_OF_MEMORY) < len(outcomes) - 1


def test_the_search_runs_no_configuration_twice(ran: Ran) -> None:
    hashes = [ran.study.results[number].config_hash for number in ran.study.searched[1:]]
    assert len(hashes) == len(set(hashes))


def test_the_best_and_the_submitted_configuration_are_measured_again_at_least_three_times_each(ran: Ran) -> None:
    trials: dict[str, list[TrialResult]] = {}
    for result in ran.study.confirmed:
        trials.setdefault(result.config_hash, []).append(result)
    completed = [ran.study.results[number] for number in ran.study.searched[2:] if ran.study.results[number].metrics]
    best = max(completed, key=lambda result: result.metrics["FLOPS_per_gpu"])
    # The others are the winner without some of its changes.
    assert all(len(trials[key]) >= 3 for key in (best.config_hash, ran.study.results[1].config_hash))
    assert not any(result.swept for result in ran.study.confirmed)


def test_the_answer_is_what_confirmation_found_with_an_interval(ran: Ran) -> None:
    answer = json.loads(ran.study.paths.best_ds_metrics.read_text())
    confirmation = json.loads(ran.ended.stdout)["confirmation"]
    assert confirmation == answer["confirmation"]
    assert confirmation["sentence"] in ran.ended.stderr
    assert answer["trial"] in confirmation["winner"]["trials"]
    assert answer["metrics"] == confirmation["winner"]["metrics"]
    assert answer["submitted"] == confirmation["own"]["metrics"]
    repeats = [ran.study.results[number].metrics["throughput"] for number in confirmation["winner"]["trials"]]
    # All samples over all time of the rounds, which have equal samples.
    assert answer["metrics"]["throughput"] == pytest.approx(statistics.harmonic_mean(repeats))
    if confirmation["winner"]["verdict"] == "faster":
        low, high = answer["gain_interval"]
        assert 1 < low < answer["gain"] < high
    best = json.loads(ran.study.paths.trial(answer["trial"]).ds_config.read_text())
    assert json.loads(ran.study.paths.best_ds_config.read_text()) == best


def test_the_profile_says_what_the_model_needs_in_the_log_and_in_a_file(ran: Ran) -> None:
    report = json.loads(ran.study.paths.profile.read_text())
    profile = ran.study.results[0].profile
    assert profile is not None
    assert report["profile"] == asdict(profile)
    assert profile.num_params == profile.trainable_num_params == 32 * 64 + 64 + 1024 + 64 * 8 + 8
    assert profile.activation_mem_per_gpu > 0
    assert 0 < profile.gpu_mem < 600 * 2**20
    assert [row["stage"] for row in report["rows"]] == [0, 1, 2, 3]
    log = ran.study.paths.log.read_text()
    assert "parameters: 3,656, trainable: 3,656" in log
    assert "device memory for the model: " in log
    assert "activations of one sample: " in log
    for row in report["rows"]:
        assert re.search(rf"{row['label']}: states \S+ [KMG]iB, micro-batch \d+", log)


@pytest.mark.long
def test_the_command_of_the_answer_trains_without_zerotune(ran: Ran) -> None:
    command = ran.study.paths.best_command
    trained = subprocess.run(["sh", command], text=True, capture_output=True, env=ran.zerotune.environment, timeout=120)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    size = json.loads(ran.study.paths.best_ds_config.read_text())["train_micro_batch_size_per_gpu"]
    assert trained.stdout.count(f"trained 40 steps at micro-batch {size}") == 2


def test_prefect_holds_one_final_task_run_for_each_trial_named_for_its_candidate(ran: Ran) -> None:
    rows = ran.prefect(
        "select name, state_type, state_name from task_run where flow_run_id = ? and name like 'trial-%'"
    )
    names = CandidateNames()
    labels = {
        asked.number: asked.purpose.label(names.of(asked.candidate, asked.purpose is Purpose.SUBMITTED))
        for asked in ran.study.asked
    }
    assert (labels[0], labels[1]) == ("profile", "yours")
    assert sorted(name for name, _, _ in rows) == [f"trial-{number:04d}-{label}" for number, label in labels.items()]
    outcomes = {number: result.outcome.value for number, result in ran.study.results.items()}
    assert {int(name[6:10]): state.lower().replace(" ", "_") for name, _, state in rows} == outcomes
    assert {state_type for _, state_type, _ in rows} == {"COMPLETED"}


def test_prefect_s_record_of_the_flow_is_final(ran: Ran) -> None:
    assert ran.prefect("select state_type from flow_run where id = ?") == [("COMPLETED",)]
    states = ran.prefect("select state_type from task_run where flow_run_id = ?")
    assert set(states) == {("COMPLETED",)}


def test_prefect_shows_a_growing_leaderboard_the_progress_the_profile_and_the_answer(ran: Ran) -> None:
    artifacts = ran.prefect("select key, type, data from artifact where flow_run_id = ? order by created")
    tables = [json.loads(json.loads(data)) for key, kind, data in artifacts if key == "leaderboard" and kind == "table"]
    # How often it is told depends on how long telling takes: at most a twentieth of the search's time.
    rows = [len(table) for table in tables]
    assert rows == sorted(rows)
    assert 1 <= rows[0] < rows[-1] == 5
    progress = [data for key, kind, data in artifacts if key == "progress" and kind == "progress"]
    assert progress == [100.0]
    pages = {key: data for key, kind, data in artifacts if kind == "markdown"}
    assert set(pages) == {"profile", "best-configuration"}
    (confirmation,) = [json.loads(json.loads(data)) for key, _, data in artifacts if key == "confirmation"]
    assert confirmation[0]["configuration"] == "your configuration"
    assert "| z3 |" in pages["profile"]
    assert "train_micro_batch_size_per_gpu" in pages["best-configuration"]
    # A run's page shows its own artifacts first.
    own = ran.prefect("select key from artifact where flow_run_id = ? and task_run_id is null")
    assert own == [("best-configuration",)]


def test_mlflow_holds_one_parent_and_one_child_for_each_trial(ran: Ran, runs: list[Run], client: MlflowClient) -> None:
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = {run.data.tags["trial"]: run for run in runs if run is not parent}
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {parent.info.run_id}
    assert set(children) == {f"{number:04d}" for number in ran.study.results}
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["gain"] == pytest.approx(ran.study.record["gain"])
    assert parent.data.params["method"] == "asha"
    profile = ran.study.results[0].profile
    assert profile is not None
    for name in ("num_params", "trainable_num_params", "gpu_mem", "activation_mem_per_gpu"):
        assert parent.data.metrics[f"profile.{name}"] == getattr(profile, name)
    assert {f"profile.z{stage}.{need}" for stage in range(4) for need in ("states", "largest_micro_batch")} <= set(
        parent.data.metrics
    )
    names = {artifact.path for artifact in client.list_artifacts(parent.info.run_id)}
    assert names == {
        "profile.json",
        "best_ds_config.json",
        "best_ds_metrics.json",
        "report.html",
        *(figure.name for figure in ran.study.paths.figures.iterdir()),
    }
    for number, result in ran.study.results.items():
        child = children[f"{number:04d}"]
        assert child.data.tags["outcome"] == result.outcome.value
        assert "micro_batch_size" in child.data.params
        assert result.metrics.items() <= child.data.metrics.items()
        files = {artifact.path for artifact in client.list_artifacts(child.info.run_id)}
        assert files == {"ds_config.json", "result.json"}


def test_nothing_of_the_study_runs_or_listens_afterwards(ran: Ran) -> None:
    assert ran.command.left_over(0) == []
    assert ran.command.ports
    for port in ran.command.ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_finished_study_is_not_resumed(ran: Ran) -> None:
    ended = ran.zerotune.run("resume", ran.study.paths.root)
    assert ended.returncode == 2
    assert "this study has finished. Its answer is best_ds_config.json there" in ended.stderr


def test_a_study_whose_configuration_has_changed_is_not_resumed(ran: Ran) -> None:
    record, config = ran.study.paths.record, ran.zerotune.model / "ds_config.json"
    finished, before = record.read_text(), config.read_text()
    record.write_text(finished.replace('"completed"', '"cancelled"'))
    config.write_text(before.replace("1e-3", "1e-4"))
    try:
        ended = ran.zerotune.run("resume", ran.study.paths.root)
    finally:
        record.write_text(finished)
        config.write_text(before)
    assert ended.returncode == 2
    assert "the DeepSpeed configuration has changed since the study began. Put it back" in ended.stderr
