"""One allocator for a whole host: processes that take slots, give them back and are killed; studies side by side."""

import itertools
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from study_fixtures import Study, Zerotune

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.locks import host_lock_dir
from zerotune.trial_lib.launch.slots import held_slots
from zerotune.trial_lib.launch.starters import ColdStarter, WarmStarter, rank_environment
from zerotune.trial_lib.launch.trial import ThisHost, TrialPlan

# Each process that these tests spawn imports this file.
if TYPE_CHECKING:
    from conftest import Trials
    from prefect.client.schemas import FlowRun

SPAWN = multiprocessing.get_context("spawn")
HOST = Host("cpu", ["0", "1", "2"], 2**30)
WORKERS, KILLS = 4, 12


def never() -> bool:
    return False


def claim_for_ever(folder: Path, seed: int) -> None:
    """Takes slots again and again, and says in a file of each who has it; tells of one that somebody alive has."""
    draws = random.Random(seed)
    for count in itertools.count():
        with held_slots(folder / "locks", HOST, draws.randint(1, 3), never) as held:
            assert held is not None
            for slot in held.names:
                claim = folder / f"claim-{slot}"
                before = claim.read_text() if claim.exists() else ""
                if before and not (folder / f"killed-{before}").exists():
                    (folder / f"twice-{slot}-{before}-{os.getpid()}").touch()
                claim.write_text(str(os.getpid()))
            time.sleep(draws.uniform(0, 0.02))
            for slot in held.names:
                (folder / f"claim-{slot}").unlink()
        if count % 10 == 9:
            (folder / f"rounds-{os.getpid()}-{count}").touch()


def test_no_slot_is_given_to_two_whoever_is_killed(tmp_path: Path) -> None:
    draws = random.Random(1)
    seeds = itertools.count()

    def start() -> multiprocessing.process.BaseProcess:
        worker = SPAWN.Process(target=claim_for_ever, args=(tmp_path, next(seeds)), daemon=True)
        worker.start()
        return worker

    def kill(worker: multiprocessing.process.BaseProcess) -> None:
        # Marked before: its slots are free at once, and whoever gets them finds its claim.
        (tmp_path / f"killed-{worker.pid}").touch()
        worker.kill()
        worker.join()

    workers = [start() for _ in range(WORKERS)]
    try:
        for _ in range(KILLS):
            rounds = len(list(tmp_path.glob("rounds-*")))
            deadline = time.monotonic() + 30
            while len(list(tmp_path.glob("rounds-*"))) < rounds + 2:
                assert time.monotonic() < deadline, "nobody gets any slots"
                time.sleep(draws.uniform(0, 0.02))
            kill(workers.pop(draws.randrange(len(workers))))
            workers.append(start())
    finally:
        for worker in workers:
            kill(worker)
    assert list(tmp_path.glob("twice-*")) == []


def drive(kind: str, plan: TrialPlan, root: Path) -> None:
    """A driver of its own: runs one trial."""
    environment, builders = rank_environment(), ["ShareMemCommBuilder"]
    starter = {
        "warm": lambda: WarmStarter(sys.executable, builders, environment, str(root / "server.log"), print),
        "cold": lambda: ColdStarter(sys.executable, builders, environment, print),
    }[kind]()
    ThisHost(starter, this_host(), root / "locks").run_trial(plan, threading.Event())


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["warm", pytest.param("cold", marks=pytest.mark.long)])
def test_a_killed_driver_s_slots_are_free_once_no_rank_of_its_is_left_and_then_at_once(
    trials: "Trials", kind: str
) -> None:
    plan = trials.plan("children.py", "--hang", "spin", slots=2)
    driver = SPAWN.Process(target=drive, args=(kind, plan, trials.root))
    driver.start()
    logs = [plan.paths.log(rank) for rank in range(2)]
    trials.wait_until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs), 120, "the ranks")
    text = "\n".join(log.read_text() for log in logs)
    pids = [int(pid) for pid in re.findall(r"^pid (\d+)$", text, re.MULTILINE)]
    assert len(pids) == 6
    assert driver.pid is not None
    os.kill(driver.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    with held_slots(trials.root / "locks", this_host(), 2, never):
        assert not any(trials.is_alive(pid) for pid in pids)
        assert time.monotonic() - killed_at < 2
    driver.join()


def spans(study: Study) -> list[tuple[float, float]]:
    """Returns from when to when a study's trials had ranks in the user's program, in seconds since the epoch."""
    found = []
    for number in study.results:
        paths = study.paths.trial(number)
        words = next(line for line in paths.log(0).read_text().splitlines() if " cores " in line)
        last = max(file.stat().st_mtime for file in paths.root.glob("rank*") if file.suffix != ".engine")
        found.append((float(words.rsplit(" ", 1)[1]), last))
    return found


@pytest.mark.alone
@pytest.mark.long
def test_two_flow_runs_at_once_share_the_slots_of_their_host(tmp_path: Path, home: Path, server: PrefectServer) -> None:
    both = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        both.append(Zerotune(tmp_path / name, home, slots=2, program="--largest_micro_batch 300"))
    # Any of these trials takes the whole host.
    commands = [zerotune.start("binary", "-mt", "4", "-z", "1", PREFECT_API_URL=server.api_url) for zerotune in both]
    for command in commands:
        ended = command.end(timeout=240)
        assert ended.returncode == 0, ended.stderr
    first, second = (spans(zerotune.study) for zerotune in both)
    assert max(min(start for start, _ in each) for each in (first, second)) < min(
        max(end for _, end in each) for each in (first, second)
    ), "they did not run at the same time"
    for one, other in itertools.product(first, second):
        assert one[1] <= other[0] or other[1] <= one[0]
    waited = [result.waited for zerotune in both for result in zerotune.study.results.values() if result.waited]
    assert any(place.seconds > 0.5 and "-000" in "".join(place.holders) for place in waited)


@pytest.mark.alone
@pytest.mark.long
def test_a_study_that_waits_for_slots_says_so_everywhere_and_ends_on_ctrl_c(
    tmp_path: Path, home: Path, server: PrefectServer
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from zerotune.tasks.cancellation import STATE

    zerotune = Zerotune(tmp_path, home)
    host = this_host()
    with held_slots(host_lock_dir(), host, len(host.slots), never, what="another study"):
        command = zerotune.start("random", "-mt", "2", "-z", "1", PREFECT_API_URL=server.api_url)
        with temporary_settings({PREFECT_API_URL: server.api_url}), get_client(sync_client=True) as client:

            def waiting_runs() -> "list[FlowRun]":
                return [run for run in client.read_flow_runs() if run.state is not None and run.state.name == STATE]

            command.wait_until(waiting_runs, "a run in Prefect that waits", 60)
            (run,) = waiting_runs()
        held = f"place 1 in the queue. Held by another study of root (pid {os.getpid()}) since "
        assert run.state is not None
        assert held in str(run.state.message)
        paths = zerotune.study.paths
        assert held in paths.log.read_text()
        shown = zerotune.run("show").stdout
        assert "waiting for slots: 0000 profile" in shown
        assert "\nrunning:" not in shown
        command.process.send_signal(signal.SIGINT)
        ended = command.end(timeout=30)
    assert ended.returncode == 130
    assert held in ended.stderr
    assert zerotune.study.record["status"] == "cancelled"


@pytest.mark.alone
def test_the_record_of_a_trial_has_its_wait(trials: "Trials") -> None:
    plan = trials.plan("plain.py")
    host = this_host()
    with held_slots(trials.lock_dir, host, len(host.slots), never, what="another study"):
        running = trials.start(plan)
        trials.wait_until(plan.paths.waiting.exists, 60, "the trial to wait")
    result = running.result()
    assert result.waited is not None
    assert result.waited.holders[0].startswith(f"another study of root (pid {os.getpid()}) since ")
    assert not plan.paths.waiting.exists()
