"""What the tests of deployment runs share: a process worker, a deployment of the flow, and runs of it."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
from server_fixtures import free_port
from study_fixtures import BIN, Running, Study, Zerotune, is_alive

from zerotune.flows.prefect_server import HeldPort
from zerotune.flows.up import HEARTBEAT_S

POOL = "tests"
TUNE = "zerotune.flows.tune.tune"


class Api:
    """A Prefect server, spoken to as the UI does."""

    def __init__(self, url: str) -> None:
        self.url = url
        user, _, password = os.environ["PREFECT_API_AUTH_STRING"].partition(":")
        self._client = httpx.Client(base_url=url, timeout=30, trust_env=False, auth=(user, password))

    def post(self, path: str, **body: Any) -> Any:
        """Returns the answer; a server whose database is busy is asked again, as Prefect's own client does."""
        answer = self._client.post(path, json=body)
        for _ in range(5):
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(0.5)
            answer = self._client.post(path, json=body)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def state(self, flow_run: UUID | str) -> dict[str, Any]:
        """Returns a flow run's state."""
        state: dict[str, Any] = self._client.get(f"/flow_runs/{flow_run}").raise_for_status().json()["state"]
        return state

    def named(self, name: str) -> list[dict[str, Any]]:
        """Returns the flow runs of a name."""
        found: list[dict[str, Any]] = self.post("/flow_runs/filter", flow_runs={"name": {"any_": [name]}})
        return found

    def cancel(self, flow_run: UUID | str) -> None:
        """Does what the button in the UI does."""
        self.post(f"/flow_runs/{flow_run}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})

    def retry(self, flow_run: UUID | str) -> None:
        """Does what the button in the UI does."""
        state = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}
        self.post(f"/flow_runs/{flow_run}/set_state", state=state)

    def wait_for_state(self, flow_run: UUID | str, *types: str, timeout_s: float = 60) -> dict[str, Any]:
        """Waits for a flow run to be in a state of some types, and returns that."""
        deadline = time.monotonic() + timeout_s
        while (state := self.state(flow_run))["type"] not in types:
            assert time.monotonic() < deadline, f"still {state['name']}: {state['message']}"
            time.sleep(0.1)
        return state

    def worker_status(self, name: str) -> str:
        """Returns whether the server takes a worker for alive: `ONLINE` or `OFFLINE`."""
        workers = {worker["name"]: worker["status"] for worker in self.post(f"/work_pools/{POOL}/workers/filter")}
        return str(workers[name])


class Worker:
    """A process worker of the pool, with a deployment of `tune`.

    Attributes:
        api: its server.
        process: its processes, those of the flow runs it has started among them.
    """

    def __init__(self, folder: Path, environment: dict[str, str], api: Api, name: str) -> None:
        self.api = api
        self.name = name
        with contextlib.suppress(httpx.HTTPStatusError):
            api.post("/work_pools/", name=POOL, type="process", base_job_template=_template())
        flow = api.post("/flows/", name="tune")["id"]
        self._deployment = api.post(
            "/deployments/",
            name="tests",
            flow_id=flow,
            entrypoint=TUNE,
            pull_steps=[],
            work_pool_name=POOL,
            enforce_parameter_schema=False,
        )["id"]
        words = [str(BIN / "prefect"), "worker", "start", "--pool", POOL, "--type", "process", "--name", name]
        settings = {
            "PREFECT_API_URL": api.url,
            "PREFECT_API_AUTH_STRING": os.environ["PREFECT_API_AUTH_STRING"],
            "PREFECT_HOME": str(folder / "prefect-home"),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_WORKER_HEARTBEAT_SECONDS": str(HEARTBEAT_S),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }
        self.process = Running(words, folder, {**environment, **settings})

    def wait_until_ready(self) -> None:
        """Waits until it asks for work."""
        self.process.wait_until(lambda: self._is_known(), "the worker")

    def _is_known(self) -> bool:
        with contextlib.suppress(KeyError):
            return self.api.worker_status(self.name) == "ONLINE"
        return False

    def run(self, zerotune: Zerotune, *, method: str = "binary", max_trials: int = 4, **parameters: Any) -> str:
        """Starts a run of the deployment on the tiny program; returns its id."""
        arguments = {
            "config_path": str(zerotune.config),
            "model_dir": str(zerotune.model),
            "work_dir": str(zerotune.folder),
            "method": method,
            "max_trials": max_trials,
            "max_concurrent_trials": 1,
            **parameters,
        }
        created = self.api.post(
            f"/deployments/{self._deployment}/create_flow_run",
            parameters=arguments,
            state={"type": "SCHEDULED", "name": "Scheduled"},
        )
        return str(created["id"])

    def flow_process(self) -> psutil.Process:
        """Returns the process of the flow run that it has started last."""
        return psutil.Process(self.process.process.pid).children()[-1]

    def close(self) -> None:
        """Ends it; Prefect's worker at times does not hear SIGTERM, and is killed then, with what it has started."""
        worker = self.process.process
        if worker.poll() is not None:
            return
        worker.send_signal(signal.SIGTERM)
        try:
            worker.wait(20)
        except subprocess.TimeoutExpired:
            for process in self.process.look():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            worker.kill()
            worker.wait()


@contextlib.contextmanager
def process_worker(folder: Path, home: Path, api_url: str, name: str = "tests") -> Iterator[Worker]:
    """Yields a worker that is ready, and ends it."""
    folder.mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    environment |= {"XDG_DATA_HOME": str(home), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    worker = Worker(folder, environment, Api(api_url), name)
    try:
        worker.wait_until_ready()
        yield worker
    finally:
        worker.close()


@contextlib.contextmanager
def whole_server(folder: Path) -> Iterator[str]:
    """Yields the API of a Prefect server with all its services, as `zerotune up` starts it."""
    from zerotune.flows.up import prefect_service

    port = HeldPort(free_port())
    service = prefect_service(port, os.environ["PREFECT_API_AUTH_STRING"], folder)
    try:
        service.start()
        service.wait_until_ready()
        yield f"{port.url}/api"
    finally:
        service.close()
        port.close()


def _template() -> dict[str, Any]:
    from prefect.workers.process import ProcessWorker

    template: dict[str, Any] = ProcessWorker.get_default_base_job_template()
    return template


def with_sessions_of_its_own(zerotune: Zerotune) -> None:
    """Has the program's ranks start a process in a session of its own, which outlives them if it is let."""
    script = zerotune.model / "train.py"
    child = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print(f'pid {child.pid}', flush=True)\n"
    )
    head, tail = script.read_text().split("import argparse\n", 1)
    script.write_text(f"{head}import argparse\n{child}{tail}")


def pids_of(study: Study) -> set[int]:
    """Returns the ids of the processes that a study's ranks have told of: themselves, and what they started."""
    logs = "\n".join(log.read_text() for log in study.paths.trials.glob("*/rank*.log"))
    return {int(pid) for pid in re.findall(r"^pid (\d+)", logs, re.MULTILINE)}


def alive(pids: set[int]) -> set[int]:
    """Returns those that still run."""
    return {pid for pid in pids if psutil.pid_exists(pid) and is_alive(psutil.Process(pid))}


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60) -> float:
    """Waits for a condition; returns the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"no {what} within {timeout_s} s"
        time.sleep(0.05)
    return time.monotonic() - started


def is_training(zerotune: Zerotune, number: int) -> bool:
    """Whether a trial's rank has entered the user's program."""
    folder = zerotune.folder / "zerotune-studies"
    if not folder.is_dir() or not any((study / "study.json").exists() for study in folder.iterdir()):
        return False
    log = zerotune.study.paths.trial(number).log(0)
    return log.exists() and " cores " in log.read_text()
