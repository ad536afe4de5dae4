"""What the tests of real trials share: one warm starter, one cold one, and a way to run a program under either."""

import gc
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from beside_fixtures import shared_folder
from device_fixtures import need, pytest_runtest_setup, pytest_terminal_summary  # noqa: F401 - pytest's hooks
from foreseen_fixtures import foresee_text, foreseeing_starter  # noqa: F401 - fixtures
from hypothesis import HealthCheck, settings
from study_fixtures import migrated_home
from training_fixtures import Trainings

from zerotune.flows.own_server import drawn_credential
from zerotune.trial_lib.deepspeed_config.overrides import config_hash
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.rank_starter import RankStarter
from zerotune.trial_lib.launch.starters import ColdStarter, WarmStarter, rank_environment
from zerotune.trial_lib.launch.trial import Program, ThisHost, TrialPlan
from zerotune.trial_lib.launch.trial_files import layer_refusal
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import TrialPaths
from zerotune.trial_lib.records.result import TrialResult

if TYPE_CHECKING:
    from full_experiment_fixtures import Folder
    from playwright.sync_api import Browser

    from zerotune.flows.prefect_server import PrefectServer

# As in an activated environment: another ninja than the one that built DeepSpeed's ops builds them again.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

# No disk loses power beneath a test. That everything is flushed is seen in tests/chaos/test_checkpoint_power_loss.py,
# which has an `fsync` of its own.
os.fsync = lambda descriptor: None

# Of each server that `server` starts, so that every command and client of a test may use it.
os.environ["PREFECT_API_AUTH_STRING"] = drawn_credential()

# Hypothesis builds its tables of Unicode with the first text of a fresh machine; a busy one takes long for anything.
settings.register_profile("house", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("house")

PROGRAMS = Path(__file__).parent / "programs"
BUILDERS = ["ShareMemCommBuilder"]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    # torch's own AdamW: no build.
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
}


def pytest_collection_finish() -> None:
    """Spares each garbage collection a look at all that was imported, and small tensors threads that wait in vain."""
    gc.collect()
    gc.freeze()
    # Beside other tests, threads that share a small tensor spin for twice as long as they compute.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


class Trials:
    """Runs programs as trials, by default those of `tests/programs`, each with a folder and logs of its own.

    Attributes:
        root: the folder of this test's trials.
        notes: what the starters said.
    """

    def __init__(self, root: Path, starter: Callable[[str], RankStarter], notes: list[str]) -> None:
        self.root = root
        self.notes = notes
        self.lock_dir = shared_folder(root) / "locks"
        self._starter = starter
        self._count = 0

    def plan(
        self,
        script: str,
        *arguments: str,
        micro_batch: int = 2,
        accumulation: int = 1,
        slots: int = 1,
        zero: dict[str, Any] | None = None,
        window: StepWindow = StepWindow(),  # noqa: B008 - frozen
        memory_limit: int | None = None,
        deadline_s: float = 120.0,
        purpose: Purpose = Purpose.SEARCH,
        model_dir: Path = PROGRAMS,
        environment: dict[str, str] | None = None,
        config_flag: str = "--deepspeed_config",
        local_rank_option: str = "",
        patience_s: float = 30.0,
    ) -> TrialPlan:
        """Returns the plan of a trial of `script`, with `arguments` after the flag that names its configuration."""
        need(slots)
        number, self._count = self._count, self._count + 1
        candidate = Candidate(
            knobs={"zero_optimization": zero} if zero else {},
            micro_batch_size=micro_batch,
            gradient_accumulation_steps=accumulation,
            slots=slots,
        )
        paths = TrialPaths(self.root / f"{number:04d}")
        config = candidate.complete(CONFIG)
        return TrialPlan(
            trial_id=f"{self.root.name}-{number}",
            number=number,
            purpose=purpose,
            candidate=candidate,
            ds_config=config,
            config_hash=config_hash(config),
            program=Program(
                interpreter=sys.executable,
                target={"script": script},
                arguments=[config_flag, str(paths.ds_config), *arguments],
                local_rank_option=local_rank_option,
                model_dir=model_dir,
                environment=rank_environment() if environment is None else environment,
            ),
            window=window,
            memory_limit=memory_limit,
            deadline_s=deadline_s,
            paths=paths,
            patience_s=patience_s,
        )

    def start(self, plan: TrialPlan, starter: str = "warm") -> "RunningTrial":
        """Runs a plan beside the test."""
        return RunningTrial(plan, self._starter(starter), self.lock_dir)

    def run(self, script: str, *arguments: str, starter: str = "warm", **options: Any) -> TrialResult:
        """Runs a trial of `script` to its end; options as in `plan`."""
        return self.start(self.plan(script, *arguments, **options), starter).result()

    def log(self, result: TrialResult, rank: int = 0) -> str:
        """Returns what a rank has printed."""
        return Path(result.logs[rank]).read_text()

    @staticmethod
    def is_alive(pid: int) -> bool:
        """Returns whether a process runs: one that has ended and is only not yet waited for does not."""
        try:
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    @staticmethod
    def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> float:
        """Waits for a condition and returns the seconds it took; fails when the time is over."""
        started = time.monotonic()
        while not condition():
            assert time.monotonic() - started < timeout_s, f"still waiting after {timeout_s} s for {what}"
            time.sleep(0.01)
        return time.monotonic() - started


class RunningTrial:
    """A trial that runs in a thread of its own."""

    def __init__(self, plan: TrialPlan, starter: RankStarter, lock_dir: Path) -> None:
        self.plan = plan
        self._cancelled = threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self._future = self._thread.submit(ThisHost(starter, this_host(), lock_dir).run_trial, plan, self._cancelled)
        self._thread.shutdown(wait=False)

    def result(self) -> TrialResult:
        """Waits for its end."""
        return self._future.result()

    def cancel(self) -> None:
        """Ends it."""
        self._cancelled.set()

    def wait_for(self, text: str, rank: int = 0, timeout_s: float = 200.0) -> None:
        """Waits until a rank has printed something."""
        Trials.wait_until(lambda: text in self.log(rank) or self._future.done(), timeout_s, f"{text!r} in the log")
        assert text in self.log(rank), self.result()

    def log(self, rank: int = 0) -> str:
        """Returns what a rank has printed so far."""
        path = self.plan.paths.log(rank)
        return path.read_text() if path.exists() else ""

    def pids(self) -> list[int]:
        """Returns the process ids that the ranks have printed, one for each line `pid N`."""
        logs = "\n".join(self.log(rank) for rank in range(self.plan.candidate.slots))
        return [int(pid) for pid in re.findall(r"^pid (\d+)$", logs, re.MULTILINE)]


@pytest.fixture(scope="session")
def starter_notes() -> list[str]:
    return []


@pytest.fixture(scope="session")
def warm_starter(tmp_path_factory: pytest.TempPathFactory, starter_notes: list[str]) -> Iterator[WarmStarter]:
    """One for all tests: priming takes seconds."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    environment = {**rank_environment(), "PYTHONPATH": str(PROGRAMS / "library")}
    starter = WarmStarter(sys.executable, BUILDERS, environment, str(log), starter_notes.append)
    starter.start()
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def cold_starter(starter_notes: list[str]) -> ColdStarter:
    return ColdStarter(sys.executable, BUILDERS, rank_environment(), starter_notes.append)


@pytest.fixture
def trials(tmp_path: Path, request: pytest.FixtureRequest, starter_notes: list[str]) -> Trials:
    return Trials(tmp_path, lambda name: request.getfixturevalue(f"{name}_starter"), starter_notes)


@pytest.fixture(params=["layered", "intercepted"])
def way_of_files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the trials of this test leave the user's files alone."""
    way: str = request.param
    if way == "intercepted":
        monkeypatch.setattr("zerotune.trial_lib.launch.trial.layer_for", lambda *_: None)
    elif refusal := layer_refusal(tmp_path):
        pytest.skip(f"this host has no layered folders: {refusal}")
    return way


PREPARED_BY = (
    *("torch", "numpy", "numpy, raw", "memory map", "open", "rename", "link"),
    *("database", "arrow", "child", "copy"),
)
"""How `prepares.py` prepares data, and writes results."""


@pytest.fixture
def prepares(tmp_path: Path) -> Path:
    """The folder of `prepares.py`, with results older than any trial: empty files, which are empty databases."""
    folder = tmp_path / "program"
    folder.mkdir()
    for name in ("prepares.py", "toy.py"):
        shutil.copy(PROGRAMS / name, folder)
    for way in PREPARED_BY:
        (folder / "results" / way).mkdir(parents=True)
        (folder / "results" / way / "old.bin").touch()
    return folder


@pytest.fixture
def trainings(tmp_path: Path, warm_starter: WarmStarter) -> Trainings:
    return Trainings(tmp_path, warm_starter)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """ZeroTune's own home, the same for all tests of a session."""
    return migrated_home(tmp_path_factory.getbasetemp(), pytestconfig.cache.mkdir("zerotune-home"))


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator["PrefectServer"]:
    """The user's own Prefect server: no command has to wait for one.

    Not for the whole session: other tests' commands start servers of their own over the same database.
    """
    # Here and below, so that unit tests import neither Prefect nor MLflow.
    from full_experiment_fixtures import prefect_server_of

    with prefect_server_of(home) as running:
        yield running


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store with its tables, to be copied: making them takes seconds."""
    from full_experiment_fixtures import new_store

    return new_store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A browser. It closes with its module, because Playwright holds this thread's event loop until then."""
    from browser_fixtures import open_browser

    with open_browser() as browser:
        yield browser


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> str:
    """The URI of an MLflow store of a test's own."""
    (tmp_path / "mlflow.db").write_bytes(empty_store.read_bytes())
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture
def folder(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> "Folder":
    """A working folder for full experiments that this process runs itself."""
    from full_experiment_fixtures import Folder

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # What this process starts itself needs none of DeepSpeed's ops, and looking for them takes seconds.
    monkeypatch.setattr(ColdStarter, "_build", lambda starter: None)
    return Folder(tmp_path, empty_store)
