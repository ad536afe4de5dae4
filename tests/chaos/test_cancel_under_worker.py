"""Deployment runs under a process worker: cancelled, killed and retried."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from study_fixtures import BIN, Zerotune, migrated_home
from worker_fixtures import (
    Api,
    Worker,
    alive,
    is_training,
    pids_of,
    process_worker,
    wait_until,
    whole_server,
    with_sessions_of_its_own,
)

from zerotune.flows.prefect_server import PrefectServer
from zerotune.flows.up import HEARTBEAT_S

pytestmark = pytest.mark.alone

# Long enough to be caught in the middle of it.
SLOW = "--largest_micro_batch 300 --num_steps 100 --step_seconds 0.1"
CANCELLED_S, GONE_S = 8.0, 1.0
FOREMAN_S = 15  # how often Prefect's server looks which workers are heard


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, home: Path, server: PrefectServer) -> Iterator[Worker]:
    with process_worker(tmp_path_factory.mktemp("worker"), home, server.api_url) as running:
        yield running


@pytest.fixture
def zerotune(tmp_path: Path, home: Path) -> Zerotune:
    zerotune = Zerotune(tmp_path, home, program=SLOW)
    with_sessions_of_its_own(zerotune)
    return zerotune


def finish_fast(zerotune: Zerotune) -> None:
    """Has what is left of the study run without the sleep."""
    script = zerotune.model / "train.py"
    script.write_text(script.read_text().replace("time.sleep(args.step_seconds)", "pass"))


def assert_every_trial_ran_once(zerotune: Zerotune, finished: dict[int, int]) -> None:
    """Checks a study that has come to its end: what had ended before was not run again."""
    study = zerotune.study
    times = study.result_times()
    assert {number: times[number] for number in finished} == finished
    told = [event.number for event in study.told]
    assert sorted(told) == sorted({asked.number for asked in study.asked})
    assert len(told) == len(set(told))
    assert study.record["status"] == "completed"


@pytest.mark.long
@pytest.mark.parametrize("by", ["UI", "command line"])
def test_a_cancelled_run_ends_cancelled_within_8_s_and_no_rank_is_alive_a_second_later(
    worker: Worker, zerotune: Zerotune, by: str
) -> None:
    run = worker.run(zerotune)
    wait_until(lambda: is_training(zerotune, 1), "trial 1", 90)
    worker.process.look()
    flow = worker.flow_process()
    study = zerotune.study
    pids = pids_of(study)
    assert len(alive(pids)) == 2
    if by == "UI":
        asked_at = time.monotonic()
        worker.api.cancel(run)
    else:
        environment = {**os.environ, "PREFECT_API_URL": worker.api.url}
        subprocess.run([BIN / "prefect", "flow-run", "cancel", run], env=environment, check=True, capture_output=True)
        asked_at = time.monotonic()
    state = worker.api.wait_for_state(run, "CANCELLED", "CRASHED", "FAILED", "COMPLETED")
    took = time.monotonic() - asked_at
    assert state["type"] == "CANCELLED"
    assert took < CANCELLED_S
    wait_until(lambda: not alive(pids), "end of the ranks", GONE_S)
    wait_until(lambda: not flow.is_running(), "end of the flow's process", GONE_S)
    assert study.record["status"] == "cancelled"
    # Prefect's command takes seconds to come to it, in which trials end.
    assert by != "UI" or [event.number for event in study.told] == [0]


@pytest.mark.long
def test_a_killed_flow_ends_crashed_and_when_retried_it_resumes_its_study(worker: Worker, zerotune: Zerotune) -> None:
    run = worker.run(zerotune, max_trials=3)
    wait_until(lambda: is_training(zerotune, 2), "trial 2", 90)
    worker.process.look()
    finished = zerotune.study.result_times()
    assert set(finished) == {0, 1}
    pids = pids_of(zerotune.study)
    worker.flow_process().kill()
    wait_until(lambda: not alive(pids), "end of the ranks", GONE_S)
    state = worker.api.wait_for_state(run, "CRASHED", timeout_s=20)
    assert "-9" in state["message"]

    finish_fast(zerotune)
    worker.api.retry(run)
    state = worker.api.wait_for_state(run, "COMPLETED", "FAILED", "CANCELLED", timeout_s=120)
    assert (state["type"], state["message"]) == ("COMPLETED", str(zerotune.study.paths.root))
    assert zerotune.study.record["flow_run_id"] == run
    assert_every_trial_ran_once(zerotune, finished)

    # Nothing is left to do: as after a server that had not heard of the end.
    worker.api.retry(run)
    state = worker.api.wait_for_state(run, "PENDING", "RUNNING")
    state = worker.api.wait_for_state(run, "COMPLETED", "FAILED", "CANCELLED")
    assert (state["type"], state["message"]) == ("COMPLETED", str(zerotune.study.paths.root))
    assert_every_trial_ran_once(zerotune, finished)


@pytest.mark.long
def test_a_killed_worker_is_noticed_after_three_heartbeats_and_its_run_comes_to_its_end(
    tmp_path: Path, zerotune: Zerotune, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its server would take other tests' workers for lost.
    home = migrated_home(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(home))
    with (
        whole_server(tmp_path) as api_url,
        process_worker(tmp_path / "worker", home, api_url, "killed") as worker,
    ):
        run = worker.run(zerotune, max_trials=3)
        wait_until(lambda: is_training(zerotune, 2), "trial 2", 90)
        worker.process.look()
        finished = zerotune.study.result_times()
        worker.process.process.kill()
        worker.process.process.wait()
        finish_fast(zerotune)
        offline_s = wait_until(lambda: worker.api.worker_status("killed") == "OFFLINE", "word of the worker", 120)
        assert offline_s < 3 * HEARTBEAT_S + FOREMAN_S + 2
        state = worker.api.wait_for_state(run, "COMPLETED", "FAILED", "CANCELLED", "CRASHED", timeout_s=120)
        assert state["type"] == "COMPLETED"
        assert_every_trial_ran_once(zerotune, finished)
        assert worker.process.left_over(5) == []


@pytest.mark.long
def test_a_run_whose_worker_was_killed_is_cancelled_all_the_same(
    tmp_path: Path, home: Path, server: PrefectServer, zerotune: Zerotune
) -> None:
    with process_worker(tmp_path / "worker", home, server.api_url, "gone") as worker:
        run = worker.run(zerotune)
        wait_until(lambda: is_training(zerotune, 1), "trial 1", 90)
        worker.process.look()
        pids = pids_of(zerotune.study)
        worker.process.process.kill()
        worker.process.process.wait()
        asked_at = time.monotonic()
        worker.api.cancel(run)
        worker.api.wait_for_state(run, "CANCELLED", timeout_s=30)
        assert time.monotonic() - asked_at < CANCELLED_S
        wait_until(lambda: not alive(pids), "end of the ranks", GONE_S)
        assert worker.process.left_over(5) == []
        assert zerotune.study.record["status"] == "cancelled"


@pytest.mark.parametrize("interrupt", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_interrupted_command_ends_cancelled_within_8_s_and_no_rank_is_alive_a_second_later(
    server: PrefectServer, zerotune: Zerotune, interrupt: signal.Signals
) -> None:
    command = zerotune.start("binary", "-mt", "4", "-z", "1", "-mct", "1", PREFECT_API_URL=server.api_url)
    command.wait_until(lambda: is_training(zerotune, 1), "trial 1", 90)
    pids = pids_of(zerotune.study)
    command.process.send_signal(interrupt)
    ended = command.end(timeout=CANCELLED_S)
    assert command.left_over(GONE_S) == []
    assert not alive(pids)
    assert ended.returncode == 130, ended.stderr
    (run,) = Api(server.api_url).named(zerotune.study.record["study_id"])
    assert run["state"]["type"] == "CANCELLED"


@pytest.mark.long
def test_a_command_whose_run_is_cancelled_in_the_ui_ends_cancelled_within_8_s(
    server: PrefectServer, zerotune: Zerotune
) -> None:
    command = zerotune.start("binary", "-mt", "4", "-z", "1", "-mct", "1", PREFECT_API_URL=server.api_url)
    command.wait_until(lambda: is_training(zerotune, 1), "trial 1", 90)
    api, pids = Api(server.api_url), pids_of(zerotune.study)
    (run,) = api.named(zerotune.study.record["study_id"])
    api.cancel(run["id"])
    ended = command.end(timeout=CANCELLED_S)
    assert ended.returncode == 130, ended.stderr
    assert "The run was cancelled in Prefect." in ended.stderr
    assert f"zerotune resume {zerotune.study.paths.root}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert command.left_over(GONE_S) == []
    assert not alive(pids)
    assert api.state(run["id"])["type"] == "CANCELLED"
    assert zerotune.study.record["status"] == "cancelled"
