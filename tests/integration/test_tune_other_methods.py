"""Studies with the other searches, each with the options that the whole study of asha does not use."""

import json
import socket
import statistics
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
from study_fixtures import Running, Zerotune, query

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult

pytestmark = [pytest.mark.alone, pytest.mark.long]


@pytest.fixture(scope="module")
def at_random(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Zerotune:
    """A study of `random`, two trials at once, whose code imports from two places outside the model directory."""
    folder = tmp_path_factory.mktemp("random")
    zerotune = Zerotune(folder, home, program="--start_seconds 0.7 --fail_above 300")
    package, module = folder / "outside" / "helpers", folder / "elsewhere" / "one_module.py"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("WORD = 'a package'\n")
    module.parent.mkdir()
    module.write_text("WORD = 'a module'\n")
    script = zerotune.model / "train.py"
    imports = "import helpers, one_module\nprint(helpers.WORD, one_module.WORD, flush=True)\n"
    script.write_text(imports + script.read_text().split('"""', 2)[2])
    options = ("-i", package, module, "-z", "0", "1", "-mct", "2", "-mt", "6", "--run-full-experiment")
    ended = zerotune.run("random", *options)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    return zerotune


def test_lists_are_separated_by_spaces(at_random: Zerotune) -> None:
    stages = {asked.candidate.zero_stage for asked in at_random.study.asked if asked.purpose is Purpose.SEARCH}
    assert stages <= {0, 1}
    assert at_random.study.record["arguments"]["zero_stages"] == [0, 1]
    assert len(at_random.study.record["arguments"]["include"]) == 2


def test_the_code_imports_what_is_included(at_random: Zerotune) -> None:
    assert "a package a module" in at_random.study.paths.trial(0).log(0).read_text()


@pytest.mark.devices(2, "cpu")
def test_trials_that_run_at_once_have_cores_of_their_own(at_random: Zerotune) -> None:
    results = [result for result in at_random.study.results.values() if result.purpose is Purpose.SEARCH]
    overlapping = [pair for pair in combinations(results, 2) if runs_beside(*pair)]
    assert overlapping
    for one, other in overlapping:
        assert not cores(one) & cores(other)


def runs_beside(one: TrialResult, other: TrialResult) -> bool:
    def end(result: TrialResult) -> float:
        return result.started_at + sum(result.phases.values())

    return entered(one) < end(other) and entered(other) < end(one)


def entered(result: TrialResult) -> float:
    return float(first_line(result).split(" at ")[1])


def cores(result: TrialResult) -> set[int]:
    found: list[int] = json.loads(first_line(result).split(" cores ")[1].split(" at ")[0])
    return set(found)


def first_line(result: TrialResult) -> str:
    """What the program prints of itself when it is entered."""
    return next(line for line in Path(result.logs[0]).read_text().splitlines() if line.startswith("pid "))


def test_a_bug_in_the_user_s_code_is_a_result_like_any_other(at_random: Zerotune) -> None:
    crashed = [result for result in at_random.study.results.values() if result.outcome is Outcome.CRASHED]
    assert crashed
    assert "a bug in the user's code" in crashed[0].reason
    assert at_random.study.record["status"] == "completed"


def test_the_full_experiment_trains_to_its_own_end_with_the_winner(at_random: Zerotune) -> None:
    paths = at_random.study.paths
    size = json.loads(paths.best_ds_config.read_text())["train_micro_batch_size_per_gpu"]
    assert f"trained 40 steps at micro-batch {size}" in paths.full_experiment.log(0).read_text()


def test_the_full_experiment_is_a_flow_within_the_flow(at_random: Zerotune) -> None:
    database, name = at_random.prefect_database, at_random.study.paths.root.name
    rows = query(
        database,
        "select flow.name, sub.state_type from flow_run sub join flow on flow.id = sub.flow_id "
        "join task_run parent on parent.id = sub.parent_task_run_id "
        "join flow_run whole on whole.id = parent.flow_run_id where whole.name = ?",
        name,
    )
    assert rows == [("experiment", "COMPLETED")]


@pytest.fixture(scope="module")
def away(
    tmp_path_factory: pytest.TempPathFactory, home: Path, server: PrefectServer
) -> tuple[Zerotune, Running, subprocess.CompletedProcess[str]]:
    """A study of `binary`, cold, on the user's Prefect server, with an MLflow server that does not answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed_port = probe.getsockname()[1]
    zerotune = Zerotune(tmp_path_factory.mktemp("binary"), home, program="--largest_micro_batch 300")
    services = {"PREFECT_API_URL": server.api_url, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{closed_port}"}
    command = zerotune.start("binary", "--start", "cold", "-m", "latency", "-mt", "3", **services)
    return zerotune, command, command.follow()


def test_mlflow_being_away_costs_no_study_and_is_said(
    away: tuple[Zerotune, Running, subprocess.CompletedProcess[str]],
) -> None:
    zerotune, _, ended = away
    assert ended.returncode == 0, ended.stderr
    assert "Some records have not reached MLflow" in ended.stderr
    assert zerotune.study.paths.best_ds_config.exists()
    last = max(zerotune.study.result_times().values()) / 1e9
    assert zerotune.study.record["ended_at"] - last < 10
    ended_at = max(file.stat().st_mtime for file in zerotune.folder.glob("*.err"))
    assert ended_at - zerotune.study.record["ended_at"] < 45  # thirty for MLflow


def test_a_configured_prefect_server_is_used_and_stays(
    away: tuple[Zerotune, Running, subprocess.CompletedProcess[str]], server: PrefectServer
) -> None:
    zerotune, command, _ = away
    assert command.ports == []
    server.wait_until_ready()
    name = zerotune.study.paths.root.name
    assert query(zerotune.prefect_database, "select state_type from flow_run where name = ?", name) == [("COMPLETED",)]


def test_a_smaller_latency_wins(away: tuple[Zerotune, Running, subprocess.CompletedProcess[str]]) -> None:
    study = away[0].study
    confirmed = {result.config_hash: [] for result in study.confirmed}
    for result in study.confirmed:
        confirmed[result.config_hash].append(result.metrics["latency"])
    medians = {key: statistics.median(latencies) for key, latencies in confirmed.items()}
    won = study.results[study.record["best_number"]].config_hash
    # Your own wins unless another is faster beyond the noise. Of that, changes worth less than 5 % may be dropped.
    assert won == study.results[1].config_hash or medians[won] <= min(medians.values()) / 0.95
    assert study.record["gain"] >= 1


def test_the_cold_launcher_needs_no_fork_server(
    away: tuple[Zerotune, Running, subprocess.CompletedProcess[str]],
) -> None:
    study = away[0].study
    assert not study.paths.fork_server_log.exists()
    assert study.results[1].outcome is Outcome.COMPLETED
