"""A study over a Ray cluster of several nodes on this machine: trials as Prefect task runs on its hosts."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_fixtures import LocalCluster, local_cluster
from study_fixtures import Zerotune, query, words_of
from switched_fixtures import COMMAND, ran_with, switched

from zerotune.trial_lib.launch.locks import host_lock_dir, own_folder
from zerotune.trial_lib.records.candidate import Withdrawal
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.history import AskedSweep, Withdrawn

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(900), pytest.mark.devices(1, "cpu")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(hosts=2) as started:
        yield started


def ran_at_once(results: list[TrialResult]) -> bool:
    """Returns whether two trials ran at the same time: each host of the cluster has one slot."""
    spans = sorted((result.started_at, result.started_at + sum(result.phases.values())) for result in results)
    return any(before[1] > after[0] for before, after in itertools.pairwise(spans))


def test_trials_are_spread_over_the_hosts_and_the_study_s_folder_has_all_of_them(
    tmp_path: Path, home: Path, cluster: LocalCluster
) -> None:
    zerotune = Zerotune(tmp_path, home, program="--step_seconds 0.3")
    arguments = ("random", "-mt", "6", "--max-micro-batch", "16", "--ray", cluster.address, "--json")
    ended = zerotune.run(*arguments, timeout=280)
    assert ended.returncode == 0, ended.stderr
    study = zerotune.study
    results = list(study.results.values())
    assert {result.outcome for result in results} == {Outcome.COMPLETED}
    assert ran_at_once(results)
    for result in results:
        paths = study.paths.trial(result.number)
        assert result.logs == [str(paths.log(0))]
        assert "trained" in paths.log(0).read_text() or "pid" in paths.log(0).read_text()
        assert json.loads(paths.measurement(0).read_text())["outcome"] == "completed"
        assert paths.ds_config.exists()
    runs = query(
        zerotune.prefect_database,
        "select task_run.name, task_run.state_type from task_run join flow_run on flow_run.id = flow_run_id"
        " where flow_run.name = ? and task_run.name like 'trial-%'",
        study.paths.root.name,
    )
    assert len(runs) >= len(results)
    assert {state for _, state in runs} == {"COMPLETED"}


def test_a_sweep_runs_on_one_host_and_nothing_stays_behind_on_any(
    tmp_path: Path, home: Path, cluster: LocalCluster
) -> None:
    zerotune = Zerotune(tmp_path, home, program="--layers 4")
    arguments = ("adaptive", "-mt", "6", "-z", "1", "--free-batch", "--ray", cluster.address)
    ended = zerotune.run(*arguments, timeout=280)
    assert ended.returncode == 0, ended.stderr
    study = zerotune.study
    sweeps = [event for event in study.history if isinstance(event, AskedSweep)]
    assert sweeps, "nothing was swept"
    # Whether a group comes to a second size depends on the memory that its first one took.
    withdrawn = {event.number: event.reason for event in study.history if isinstance(event, Withdrawn)}
    assert set(withdrawn.values()) <= {Withdrawal.MEMORY}
    measured = [[number for number, _ in sweep.numbered if number not in withdrawn] for sweep in sweeps]
    assert all(measured)
    assert all(study.results[first].outcome is Outcome.COMPLETED for first, *_ in measured)
    assert all(study.results[number].swept for _, *later in measured for number in later)
    assert not (own_folder(host_lock_dir()) / "trials" / study.record["study_id"]).exists()
    for node in cluster.nodes:
        assert not [process for process in cluster.processes_of(node) if "fork_server" in " ".join(words_of(process))]


def test_a_trial_with_more_slots_than_a_host_has_spans_several(
    tmp_path: Path, home: Path, cluster: LocalCluster
) -> None:
    zerotune = Zerotune(tmp_path, home)
    zerotune.write_config(slots=2)
    arguments = ("random", "-mt", "3", "--max-micro-batch", "8", "--ray", cluster.address)
    ended = zerotune.run(*arguments, timeout=280)
    assert ended.returncode == 0, ended.stderr
    results = list(zerotune.study.results.values())
    assert {result.outcome for result in results} == {Outcome.COMPLETED}
    assert {len(result.memory.peak) for result in results} == {2}
    config = json.loads(zerotune.study.paths.best_ds_config.read_text())
    # The user's configuration leaves the batch of all hosts open, and so does the answer.
    assert "train_batch_size" not in config
    assert config["train_micro_batch_size_per_gpu"] >= 1


def test_a_trial_over_several_hosts_whose_program_ends_early_costs_no_deadline(
    tmp_path: Path, home: Path, cluster: LocalCluster
) -> None:
    zerotune = Zerotune(tmp_path, home)
    zerotune.write_config(slots=2, program="--num_steps 3")
    arguments = ("random", "-mt", "2", "--max-micro-batch", "8", "--ray", cluster.address)
    zerotune.run(*arguments, timeout=280)
    ended_early = [result for result in zerotune.study.results.values() if result.outcome is Outcome.OUT_OF_DATA]
    assert ended_early
    for result in ended_early:
        assert "3 optimizer steps" in result.reason
        assert sum(result.phases.values()) < 60  # its deadline is twice as long


def test_switches_reach_the_ranks_on_every_host(tmp_path: Path, home: Path, cluster: LocalCluster) -> None:
    zerotune = switched(tmp_path, home)
    vary = ("--vary", "--twice=true,false", "--vary", "OWN=,b")
    options = ("--method", "random", "-z", "1", "--max-trials", "6", "--max-micro-batch", "4", "--ray", cluster.address)
    ended = zerotune.run("tune", *options, *vary, "--", *COMMAND, "--twice", timeout=400)
    assert ended.returncode == 0, ended.stderr
    had = ran_with(zerotune.study, {"--twice": "True"})
    assert {each["--twice"] for each in had} == {"True", "False"}
    assert {each["OWN"] for each in had} == {"None", "b"}
    assert "--deepspeed_config" in zerotune.study.paths.best_command.read_text()


def test_what_a_cluster_cannot_do_is_said_before_anything_starts(
    tmp_path: Path, home: Path, cluster: LocalCluster
) -> None:
    zerotune = Zerotune(tmp_path, home)
    zerotune.write_config(slots=3)
    for address, said in (
        (cluster.address, "slots_per_trial is 3, and the nodes of the Ray cluster have 1, 1 CPU slot(s)"),
        ("127.0.0.1:1", "there is no Ray cluster to connect to"),
        ("ray://127.0.0.1:10001", "Ray's client cannot hold a study"),
    ):
        ended = zerotune.run("random", "--ray", address, timeout=100)
        assert ended.returncode == 2, ended.stderr
        assert said in ended.stderr
    assert not (tmp_path / "zerotune-studies").exists()
