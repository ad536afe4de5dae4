"""`zerotune up`: everything on loopback with one command, a deployment that runs there, and nothing left afterwards."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
import pytest
from playwright.sync_api import Browser, expect
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from server_fixtures import as_another_user
from study_fixtures import BIN, Running, Study, Zerotune, is_alive, words_of

from zerotune.flows.own_server import entry_link
from zerotune.flows.up import HEARTBEAT_S, POOL

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
        """Runs Prefect's command line as a person would in another terminal, after the printed line."""
        (line,) = [line.strip() for line in self.command.said.splitlines() if line.startswith("  . ")]
        return subprocess.run(
            ["sh", "-c", f'{line}; exec "$@"', "sh", str(BIN / "prefect"), *arguments],
            cwd=self.zerotune.folder,
            env=self.zerotune.environment,
            text=True,
            capture_output=True,
            timeout=timeout,
        )

    @property
    def credential(self) -> str:
        return str(json.loads((self.folder / "up.json").read_text())["credential"])

    @property
    def folder(self) -> Path:
        """The folder of its files."""
        return Path(self.zerotune.environment["XDG_DATA_HOME"]) / "zerotune" / "up"

    def client(self) -> SyncPrefectClient:
        with temporary_settings({PREFECT_API_URL: self.api_url, PREFECT_API_AUTH_STRING: self.credential}):
            return get_client(sync_client=True)

    def http(self, port: int) -> httpx.Client:
        """Returns a client that is the owner's."""
        user, _, password = self.credential.partition(":")
        return httpx.Client(base_url=f"http://127.0.0.1:{port}", auth=(user, password), trust_env=False, timeout=10)

    def page(self, port: int, path: str = "/") -> str:
        return self.http(port).get(path, follow_redirects=True).raise_for_status().text

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
    assert f"  . {up.folder}/environment\n" in said
    assert "prefect deployment run 'tune/local' --param config_path=" in said
    assert "<title>Prefect Server</title>" in up.page(up.prefect_port)
    assert '"api_url":"/api"' in up.page(up.prefect_port, "/ui-settings")
    assert "<title>MLflow</title>" in up.page(up.mlflow_port)
    listening = {
        connection.laddr.ip
        for process in up.command.look()
        if is_alive(process)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_another_user_of_the_host_runs_nothing_and_reads_nothing(up: Up, tmp_path: Path) -> None:
    with up.client() as client:
        deployment = client.read_deployment_by_name("tune/local")
        before = len(client.read_flow_runs())
    proof = tmp_path / "proof"
    variables = {"command": f"touch {proof}"}
    evil = {"job_variables": variables, "state": {"type": "SCHEDULED"}, "enforce_parameter_schema": False}
    asked = {
        f"{up.api_url}/deployments/{deployment.id}/create_flow_run": evil,
        f"{up.api_url}/logs/filter": {},
        f"{up.api_url}/work_pools/{POOL}/get_scheduled_flow_runs": {},
        f"http://127.0.0.1:{up.mlflow_port}/api/2.0/mlflow/experiments/search": {"max_results": 10},
        f"http://127.0.0.1:{up.mlflow_port}/graphql": {"query": "{__typename}"},
    }

    def answers() -> list[Any]:
        posted = [httpx.post(url, json=body, trust_env=False).status_code for url, body in asked.items()]
        got = [
            httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code
            for port, path in ((up.prefect_port, "/"), (up.prefect_port, "/ui-settings"), (up.mlflow_port, "/"))
        ]
        files = [os.access(file, os.R_OK) for file in (up.folder / "up.json", up.folder / "environment", up.folder)]
        return [*posted, *got, *files]

    assert as_another_user(answers) == [*[401] * 8, *[False] * 3]
    with up.client() as client:
        assert len(client.read_flow_runs()) == before
    assert not proof.exists()
    # The owner's own commands are let in, and the worker runs what they ask for.
    asked_for = up.prefect("deployment", "run", "tune/local", "--param", "config_path=experiment.yaml")
    named = re.search(r"UUID: (\S+)", asked_for.stdout)
    assert named is not None, asked_for.stdout + asked_for.stderr
    with up.client() as client:
        up.command.wait_until(
            lambda: (state := client.read_flow_run(UUID(named[1])).state) is not None and state.is_final(), "its end"
        )
        assert "is a relative path" in str(client.read_flow_run(UUID(named[1])).state)


def test_a_web_page_of_another_place_runs_nothing_even_in_the_owner_s_browser(up: Up) -> None:
    filtered = {"url": "/api/flow_runs/filter", "json": {}}
    with up.http(up.prefect_port) as prefect, up.http(up.mlflow_port) as mlflow:
        own = prefect.post(**filtered, headers={"Origin": f"http://127.0.0.1:{up.prefect_port}"})
        assert own.status_code == 200
        assert own.headers["Access-Control-Allow-Origin"] != "*"
        for foreign in (
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Origin": f"http://127.0.0.1:{up.mlflow_port + 1}"},
            {"Host": f"evil.example:{up.prefect_port}"},
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image"},
        ):
            assert prefect.post(**filtered, headers=foreign).status_code == 403, foreign
            assert mlflow.get("/version", headers=foreign).status_code == 403, foreign


@pytest.mark.long
def test_the_links_open_the_pages_at_the_first_click(up: Up, browser: Browser) -> None:
    for port, page, seen in (
        (up.prefect_port, "/v2/deployments", "nightly"),
        (up.mlflow_port, "/#/experiments", "Time created"),
    ):
        context = browser.new_context()
        opened = context.new_page()
        asked: list[str] = []
        opened.on("request", lambda request, asked=asked: asked.append(f"{request.url} {request.headers}"))
        address = f"127.0.0.1:{port}"
        opened.goto(f"http://{address}/enter")
        expect(opened.get_by_text("Open the whole link that was printed")).to_be_visible()
        opened.goto(entry_link(f"http://{address}", up.credential, page))
        expect(opened.get_by_text(seen).first).to_be_visible(timeout=60_000)
        assert opened.url.startswith(f"http://{address}{page}")
        # Only the login has the credential, as its password. No other request names it or the link.
        password = up.credential.partition(":")[2]
        with_it = [shown.partition("@")[2].split()[0] for shown in asked if password in shown]
        assert with_it == [f"{address}/enter/login"]
        context.close()


def test_only_the_owner_may_read_its_files_and_no_record_log_or_command_line_has_the_credential(up: Up) -> None:
    assert up.folder.stat().st_mode & 0o077 == 0
    for file in up.folder.iterdir():
        assert file.stat().st_mode & 0o077 == 0, file
    password = up.credential.partition(":")[2]
    assert [words_of(process) for process in up.command.look() if password in " ".join(words_of(process))] == []
    assert password not in up.command.said
    folders = (up.zerotune.folder, up.folder.parent)
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    assert {file.name for file in files if password.encode() in file.read_bytes()} == {"up.json", "environment"}


@pytest.mark.long
def test_commands_that_name_its_servers_use_its_credential(up: Up) -> None:
    named = {"PREFECT_API_URL": up.api_url, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{up.mlflow_port}"}
    doctor = up.zerotune.run("doctor", timeout=120, **named, PREFECT_API_AUTH_STRING="zerotune:of-an-earlier-start")
    said = doctor.stdout + doctor.stderr
    assert f"{up.api_url} answers, with Prefect" in said
    assert f"http://127.0.0.1:{up.mlflow_port} answers, MLflow" in said


@pytest.mark.alone
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


@pytest.mark.alone
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
    os.environ["MLFLOW_TRACKING_USERNAME"], _, os.environ["MLFLOW_TRACKING_PASSWORD"] = up.credential.partition(":")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"http://127.0.0.1:{up.mlflow_port}")
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    parents = client.search_runs(experiments, filter_string=f"attributes.run_name = '{study.record['study_id']}'")
    assert len(parents) == 1
    assert {file.path for file in client.list_artifacts(parents[0].info.run_id)} >= {"best_ds_config.json"}


@pytest.mark.alone
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


@pytest.mark.alone
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
    answer = up.http(up.prefect_port).post(f"/api/work_pools/{POOL}/workers/filter", json={})
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


@pytest.mark.alone
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
