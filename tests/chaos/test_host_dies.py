"""A host dies, by SIGKILL of all that it runs: that costs the trials that run there, and nothing else."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from conftest import Trials
from hosts_fixtures import HOSTS, part_of
from ray_fixtures import LocalCluster, local_cluster
from study_fixtures import Zerotune, is_alive, words_of

from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.hosts import HostfileStarter
from zerotune.trial_lib.launch.starters import rank_environment
from zerotune.trial_lib.launch.trial import ThisHost, TrialPlan
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.result import Outcome

# Parts of this machine stand for hosts, each with a core of its own.
pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(900), pytest.mark.devices(2, "cpu")]

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)
ENDLESS = StepWindow(start_step=2, end_step=10**6, max_steps=10**6)


def kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_dies_ends_the_trial_that_spans_it_and_the_next_one_runs(trials: Trials, victim: int) -> None:
    environment = {**rank_environment(), "GLOO_SOCKET_IFNAME": "lo"}
    starter = HostfileStarter(HOSTS, sys.executable, ["ShareMemCommBuilder"], environment, trials.notes.append)

    def plan(script: str, window: StepWindow) -> TrialPlan:
        return trials.plan(script, slots=2, window=window, environment=environment)

    dying = plan("children.py", ENDLESS)
    with ThreadPoolExecutor(1) as thread:
        place = ThisHost(starter, this_host(), trials.lock_dir)
        running = thread.submit(place.run_trial, dying, threading.Event())
        logs = [dying.paths.log(rank) for rank in range(2)]
        trials.wait_until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs), 200, "the ranks")
        died, survives = part_of(victim), part_of(1 - victim)
        assert len(died) >= 4
        assert survives
        kill_all(died)
        killed_at = time.monotonic()
        result = running.result()
    assert result.outcome is Outcome.CRASHED
    assert f"The host {list(HOSTS)[victim]} could not be reached or died: " in result.reason
    assert time.monotonic() - killed_at < 15
    printed = [line for log in logs for line in log.read_text().splitlines() if line.startswith("pid ")]
    assert len(printed) == 6
    assert not [line for line in printed if trials.is_alive(int(line.split()[1]))]
    assert not [process for process in (*died, *survives) if is_alive(process)]
    again = ThisHost(starter, this_host(), trials.lock_dir).run_trial(plan("plain.py", SHORT), threading.Event())
    assert again.outcome is Outcome.COMPLETED, again.reason


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(hosts=2) as started:
        yield started


def ranks_below(processes: list[psutil.Process], zerotune: Zerotune) -> list[psutil.Process]:
    """Returns the processes that run in the model directory: the ranks."""
    ranks = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(zerotune.model):
                ranks.append(process)
    return ranks


def test_a_cluster_s_host_that_dies_costs_its_running_trial_and_the_study_goes_on(
    tmp_path: Path, home: Path, cluster: LocalCluster
) -> None:
    zerotune = Zerotune(tmp_path, home, program="--step_seconds 0.3 --num_steps 400")
    running = zerotune.start("random", "-mt", "7", "--max-micro-batch", "8", "--ray", cluster.address)
    dying, living = cluster.nodes

    def both_work() -> bool:
        return all(ranks_below(cluster.processes_of(node), zerotune) for node in (dying, living))

    running.wait_until(both_work, "a trial on each host", 200)
    killed = cluster.processes_of(dying)
    servers = [process for process in killed if "zerotune.trial_lib.launch.processes.fork_server" in words_of(process)]
    assert servers, "a warm server is on the host as long as the study"
    kill_all(killed)
    killed_at = time.time()
    ended = running.end(300)
    assert ended.returncode == 0, ended.stderr
    results = zerotune.study.results
    crashed = [result for result in results.values() if result.outcome is not Outcome.COMPLETED]
    assert [result.outcome for result in crashed] == [Outcome.CRASHED]
    assert "The host died while the trial ran" in crashed[0].reason
    assert crashed[0].started_at < killed_at
    assert len(results) >= 7
    assert [event.result.number for event in zerotune.study.told].count(crashed[0].number) == 1
    assert not [process for process in killed if is_alive(process)]
    assert not ranks_below(cluster.processes_of(living), zerotune)


def test_a_trial_over_two_hosts_waits_for_one_that_joins_where_the_other_has_died(
    tmp_path: Path, home: Path, cluster: LocalCluster
) -> None:
    zerotune = Zerotune(tmp_path, home, slots=2, program="--step_seconds 0.2 --num_steps 400")
    running = zerotune.start("random", "-mt", "4", "--max-micro-batch", "8", "--ray", cluster.address)

    def searches() -> bool:
        has_ended = list((tmp_path / "zerotune-studies").glob("*/trials/0001/result.json"))
        return bool(has_ended) and all(ranks_below(cluster.processes_of(node), zerotune) for node in cluster.nodes)

    running.wait_until(searches, "a trial of the search on both hosts", 200)
    kill_all(cluster.processes_of(cluster.nodes[1]))
    running.wait_until(lambda: "waiting for a host" in study_log(tmp_path), "word of the missing host", 100)
    cluster.add_host()
    ended = running.end(300)
    assert ended.returncode == 0, ended.stderr
    outcomes = [result.outcome for result in zerotune.study.results.values()]
    assert outcomes.count(Outcome.CRASHED) == 1
    assert set(outcomes) == {Outcome.CRASHED, Outcome.COMPLETED}


def study_log(folder: Path) -> str:
    (log,) = (folder / "zerotune-studies").glob("*/study.log")
    return log.read_text()


def test_when_the_driver_is_killed_nothing_of_the_study_is_left_on_any_host(
    tmp_path: Path, home: Path, cluster: LocalCluster
) -> None:
    zerotune = Zerotune(tmp_path, home, program="--step_seconds 0.3 --num_steps 4000")
    running = zerotune.start("random", "-mt", "7", "--max-micro-batch", "8", "--ray", cluster.address)

    def of_the_study() -> list[psutil.Process]:
        found = []
        for node in cluster.nodes:
            processes = cluster.processes_of(node)
            found += ranks_below(processes, zerotune)
            found += [
                process
                for process in processes
                if "zerotune.trial_lib.launch.processes.fork_server" in words_of(process)
            ]
        return found

    running.wait_until(lambda: ranks_below(of_the_study(), zerotune), "a trial", 200)
    there = of_the_study()
    os.kill(running.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while any(is_alive(process) for process in there) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [process for process in there if is_alive(process)]
    assert not of_the_study()
