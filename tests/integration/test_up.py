"""`zerotune up`: everything on loopback with one command, a deployment that runs there, and nothing left afterwards."""

import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.settings import PREFECT_API_URL, temporary_settings
from study_fixtures import BIN, Running, Study, Zerotune, is_alive, words_of

from flows.servers.local_servers import HEARTBEAT_S, POOL

UP_S = 150  # on a busy machine; some 25 s on an idle one
SLOW = "--largest_micro_batch 300 --num_steps 400 --step_seconds 0.1"
LATENCY_S = CANCELLED_S = 8.0
MISSED_S = 3 * HEARTBEAT_S + 30  # three heartbeats, and how often Prefect looks for those that are missing


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Up:
    """A running `zerotune up`."""

    def __init__(self, zerotune: Zerotune) -> None:
        self.zerotune = zerotune
        self.prefect_port, self.mlflow_port = free_ports(2)
        self.api_url = f"http://127.0.0.1:{self.prefect_port}/api"
        self.command = self.start()

    def start(self) -> Running:
        ports = ("--prefect-port", str(self.prefect_port), "--mlflow-port", str(self.mlflow_port))
        running = self.zerotune.start("up", *ports)
        running.wait_until(lambda: "Stop everything" in running.said, "its addresses", UP_S)
        return running

    def prefect(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Runs Prefect's command line as a person would in another terminal."""
        return subprocess.run(
            [str(BIN / "prefect"), *arguments],
            cwd=self.zerotune.folder,
            env={**self.zerotune.environment, "PREFECT_API_URL": self.api_url},
            text=True,
            capture_output=True,
            timeout=timeout,
        )

    def client(self) -> SyncPrefectClient:
        with temporary_settings({PREFECT_API_URL: self.api_url}):
            return get_client(sync_client=True)

    def page(self, port: int, path: str = "/") -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def worker(self) -> psutil.Process | None:
        """Returns the worker that runs; None while there is none."""
        running = filter(is_alive, self.command.look())
        return next((process for process in running if words_of(process)[3:5] == ["worker", "start"]), None)


@pytest.fixture(scope="module")
def zerotune(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Zerotune:
    return Zerotune(tmp_path_factory.mktemp("up"), home)


@pytest.fixture(scope="module")
def up(zerotune: Zerotune) -> Iterator[Up]:
    running = Up(zerotune)
    yield running
    if running.command.process.poll() is None:
        running.command.process.send_signal(signal.SIGTERM)
        running.command.end(timeout=60)


def begun_within(run: Any) -> float:
    """Returns the seconds from a run's creation to its start."""
    return float((run.start_time - run.created).total_seconds())


def test_it_says_where_everything_is_and_how_to_use_it(up: Up) -> None:
    said = up.command.said
    assert f"Prefect UI:  http://127.0.0.1:{up.prefect_port}\n" in said
    assert f"MLflow UI:   http://127.0.0.1:{up.mlflow_port}\n" in said
    assert f"Studies in:  {up.zerotune.folder}\n" in said
    assert f"export PREFECT_API_URL={up.api_url}\n" in said
    assert "prefect deployment run 'tune/local' --param config_path=" in said
    assert "<title>Prefect Server</title>" in up.page(up.prefect_port)
    assert f'"api_url":"{up.api_url}"' in up.page(up.prefect_port, "/ui-settings")
    assert "<title>MLflow</title>" in up.page(up.mlflow_port)
    listening = {
        connection.laddr.ip
        for process in up.command.look()
        if is_alive(process)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


@pytest.mark.long
def test_a_deployed_run_begins_within_seconds_and_says_what_is_wrong_with_its_parameters(up: Up) -> None:
    watched = up.prefect(
        *("deployment", "run", "tune/local", "--param", "config_path=experiment.yaml"),
        "--watch",
        "--watch-interval",
        "1",
    )
    assert "finished in state 'Failed'" in watched.stdout, watched.stdout + watched.stderr
    named = re.search(r"UUID: (\S+)", watched.stdout)
    assert named is not None
    with up.client() as client:
        run = client.read_flow_run(UUID(named[1]))
        assert run.state is not None
        assert run.state.is_failed()
        assert "config_path: experiment.yaml is a relative path" in str(run.state.message)
        assert begun_within(run) < LATENCY_S
        # Refused when it is asked for: nothing is started.
        before = len(client.read_flow_runs())
        refused = up.prefect("deployment", "run", "tune/local", "--param", "method=best")
        assert refused.returncode != 0
        assert "'best'" in refused.stdout + refused.stderr
        assert len(client.read_flow_runs()) == before


def test_its_processes_hear_signals_and_a_second_one_is_refused(up: Up) -> None:
    worker = up.worker()
    assert worker is not None
    ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{worker.pid}/status").read_text())
    assert ignored is not None
    assert int(ignored[1], 16) & (1 << (signal.SIGINT - 1)) == 0
    second = up.zerotune.run("up", timeout=60)
    assert second.returncode == 2
    assert second.stderr == "zerotune up: it is already running. `zerotune down` stops it, from any terminal.\n"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_readmes_command_tunes_and_the_mlflow_ui_has_the_study(up: Up) -> None:
    config = up.zerotune.model / "deepspeed.yaml"
    watched = up.prefect(
        *("deployment", "run", "tune/local", "--param", f"config_path={config}", "--watch"), timeout=800
    )
    assert watched.returncode == 0, watched.stdout + watched.stderr + up.command.said
    study = up.zerotune.study
    assert study.record["status"] == "completed"
    assert study.record["model_dir"] == str(up.zerotune.model)
    assert study.paths.best_ds_config.exists()
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"http://127.0.0.1:{up.mlflow_port}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    parents = client.search_runs(experiments, filter_string=f"attributes.run_name = '{study.record['study_id']}'")
    assert len(parents) == 1
    assert {file.path for file in client.list_artifacts(parents[0].info.run_id)} >= {"best_ds_config.json"}


@pytest.mark.long
def test_a_run_that_is_cancelled_ends_soon_with_all_its_ranks(up: Up) -> None:
    up.zerotune.write_config(program=SLOW)
    with up.client() as client:
        deployment = client.read_deployment_by_name("tune/local")
        run = client.create_flow_run_from_deployment(
            deployment.id, parameters={"config_path": str(up.zerotune.config), "model_dir": str(up.zerotune.model)}
        )
        flow = in_its_ranks(up)
        cancelled = up.prefect("flow-run", "cancel", str(run.id))
        assert cancelled.returncode == 0, cancelled.stderr
        started = time.monotonic()
        while not (state := client.read_flow_run(run.id).state) or not state.is_final():
            assert time.monotonic() - started < CANCELLED_S
            time.sleep(0.1)
        assert state.is_cancelled(), state
        time.sleep(1)
        assert [process for process in flow if is_alive(process)] == []


def in_its_ranks(up: Up) -> list[psutil.Process]:
    """Waits until a rank runs the user's program; returns the processes of the flow run."""

    def is_training() -> bool:
        studies = [Study(record.parent) for record in up.zerotune.folder.glob("zerotune-studies/*/study.json")]
        running = [study for study in studies if study.record["status"] == "running"]
        return any(" cores " in log.read_text() for study in running for log in study.paths.trials.glob("*/rank0.log"))

    up.command.wait_until(is_training, "a rank", 120)
    (engine,) = [process for process in up.command.look() if "prefect.engine" in words_of(process)]
    return [engine, *engine.children(recursive=True)]


@pytest.mark.long
def test_a_run_that_dies_with_its_worker_is_crashed_by_its_missing_heartbeats_and_the_worker_is_started_again(
    up: Up,
) -> None:
    up.zerotune.write_config(program=SLOW)
    time.sleep(30)  # a worker that ends sooner would only end again
    with up.client() as client:
        deployment = client.read_deployment_by_name("tune/local")
        run = client.create_flow_run_from_deployment(
            deployment.id, parameters={"config_path": str(up.zerotune.config), "model_dir": str(up.zerotune.model)}
        )
        flow = in_its_ranks(up)
        # As when their machine dies: nobody is left who could say it.
        worker = up.worker()
        assert worker is not None
        for process in (worker, flow[0]):
            process.kill()
        killed_at = time.monotonic()
        up.command.wait_until(lambda: not any(map(is_alive, flow)), "end of the ranks", 1)
        up.command.wait_until(lambda: "The worker ended and is started again" in up.command.said, "the new worker")
        up.command.wait_until(up.worker, "its process")
        up.command.wait_until(lambda: client.read_flow_run(run.id).state.is_final(), "the end of the run", MISSED_S)
        state = client.read_flow_run(run.id).state
    assert state.is_crashed(), state
    assert state.message == "Its process has sent no heartbeat for 90 s. `zerotune resume` resumes its study."
    assert time.monotonic() - killed_at < MISSED_S
    assert worker_heartbeat_s(up) == HEARTBEAT_S == 30


def worker_heartbeat_s(up: Up) -> int:
    """Returns the seconds between two heartbeats that the worker has told the server of."""
    answer = httpx.post(f"{up.api_url}/work_pools/{POOL}/workers/filter", json={}, trust_env=False)
    (worker,) = answer.raise_for_status().json()
    return int(worker["heartbeat_interval_seconds"])


def test_down_stops_everything_from_another_terminal(up: Up) -> None:
    up.command.look()
    down = up.zerotune.run("down", timeout=60)
    assert (down.returncode, down.stderr) == (0, "Everything has stopped.\n")
    ended = up.command.end(timeout=10)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert up.command.left_over(1) == []
    again = up.zerotune.run("down", timeout=60)
    assert (again.returncode, again.stderr) == (0, "zerotune up is not running.\n")


@pytest.mark.long
def test_nothing_outlives_an_up_that_is_killed_and_the_next_one_names_its_lost_runs_and_keeps_the_pool_s_limit(
    tmp_path: Path, home: Path
) -> None:
    up = Up(Zerotune(tmp_path, home, program=SLOW))
    with up.client() as client:
        client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=3, description="ours"))
        deployment = client.read_deployment_by_name("tune/local")
        run = client.create_flow_run_from_deployment(
            deployment.id, parameters={"config_path": str(up.zerotune.config), "model_dir": str(up.zerotune.model)}
        )
    in_its_ranks(up)
    up.command.look()
    up.command.process.kill()
    up.command.process.wait()
    assert up.command.left_over(8) == []

    up.command = up.start()
    assert "1 run(s) had lost their worker. They are Crashed now." in up.command.said
    with up.client() as client:
        state = client.read_flow_run(run.id).state
        pool = client.read_work_pool(POOL)
    assert state is not None
    assert state.is_crashed()
    assert (pool.concurrency_limit, pool.description) == (3, "ours")
    up.command.process.send_signal(signal.SIGINT)
    assert up.command.end(timeout=60).returncode == 0
    assert up.command.left_over(1) == []


def test_a_port_that_is_taken_is_named_with_the_flag_that_changes_it(zerotune: Zerotune, up: Up) -> None:
    if up.command.process.poll() is None:
        pytest.fail("runs after the one that stops everything")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = zerotune.run("up", "--prefect-port", str(port), timeout=60)
    assert refused.returncode == 2
    assert refused.stderr == (
        f"zerotune: --prefect-port: port {port} cannot be used (Address already in use). Stop the program "
        f"that listens there, or name another port: `zerotune up --prefect-port {port + 1}`.\n"
    )
