"""A study whose trials are read from a recorded table, in processes that are killed at random moments.

python tests/table_study.py FOLDER METHOD KILLS SEED: runs it once to its end in FOLDER/whole, and once in
FOLDER/killed, where its driver is killed so many times before it may come to its end. Everything is real but the ranks.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.replay.space_of_table import nearest  # noqa: E402
from benchmarks.replay.table import TableWorld  # noqa: E402
from zerotune.trial_lib.launch import trial  # noqa: E402
from zerotune.trial_lib.launch.rank_starter import LaunchRequest, ProcessesEnd  # noqa: E402
from zerotune.trial_lib.messages.measurement import Import, Measured, Measurement, Memory, RankFailure  # noqa: E402
from zerotune.trial_lib.messages.orders import RankOrder, SizeMemory, SizeOrder, will_fit  # noqa: E402
from zerotune.trial_lib.records.candidate import Candidate  # noqa: E402
from zerotune.trial_lib.records.result import Outcome, TrialResult  # noqa: E402
from zerotune.trial_lib.study import open_study  # noqa: E402
from zerotune.trial_lib.study.arguments import StudyArguments  # noqa: E402
from zerotune.trial_lib.study.confirm import next_confirming_plan  # noqa: E402
from zerotune.trial_lib.study.driver import StudyDriver  # noqa: E402
from zerotune.trial_lib.study.open_study import OpenStudy, new_study, resume_study  # noqa: E402
from zerotune.trial_lib.study.runner import Work  # noqa: E402

REPLAY = ROOT / "benchmarks" / "replay"
TRIAL_S = 0.005
MAX_TRIALS = 20
LONGEST_PAUSE_S = 0.05


class Clock:
    """Stands still: what a trial takes is what the table says, and nothing else is in the history."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def time() -> float:
        return 1e9

    monotonic = time


class TableStarter:
    """Has no processes: writes what the ranks would have written, a little later."""

    def __init__(self, world: TableWorld) -> None:
        self._world = world

    def launch(self, request: LaunchRequest) -> "TableStarter":
        self._request = request
        return self

    def wait_or_cancel(self, cancelled: threading.Event) -> ProcessesEnd:
        order = RankOrder.from_json(self._request.payload)
        measured: list[SizeMemory] = []
        for one in order.sizes:
            if measured and one.as_typed:
                Path(order.withdrawal).write_text(json.dumps({"reason": "not_repeatable"}))
                break
            folder = Path(one.measurements[0]).parent
            candidate = Candidate.model_validate_json((folder / "candidate.json").read_text())
            size = candidate.micro_batch_size
            if measured and not will_fit(measured, size, order.bytes_per_sample, order.headroom):
                Path(order.withdrawal).write_text(json.dumps({"reason": "memory"}))
                break
            time.sleep(TRIAL_S)
            number = int((folder.parent if folder.name == "as_typed" else folder).name)
            result = self._result(candidate, number)
            self._write(one, result)
            if result.outcome is not Outcome.COMPLETED:
                return ProcessesEnd("ranks", [1] * candidate.slots)
            memory = result.memory
            above = max(peak - after for peak, after in zip(memory.peak, memory.after_initialize, strict=True))
            measured.append(SizeMemory(size, above, min(memory.available, default=None)))
        return ProcessesEnd("ranks", [0] * len(self._request.ranks))

    def _result(self, candidate: Candidate, number: int) -> TrialResult:
        world = self._world
        config = candidate.complete(world.problem.base_config)
        recorded = world.candidate(nearest(world.problem.space, config), candidate.micro_batch_size)
        return world.run(recorded, random.Random(number))

    def _write(self, one: SizeOrder, result: TrialResult) -> None:
        for rank, (record, failure) in enumerate(zip(one.measurements, one.failures, strict=True)):
            if result.outcome is not Outcome.COMPLETED:
                record_of = RankFailure(type="MemoryError", phases=result.phases)
                Path(failure).write_text(json.dumps(asdict(record_of)))
                continue
            memory = Memory(**{name: [values[rank]] for name, values in asdict(result.memory).items() if values})
            of_result = {each.name: getattr(result, each.name) for each in fields(Measured)}
            profile = self._world.problem.profile if one.with_profile else None
            more = {"memory": memory, "profile": profile, "program": None, "time": ["", 1e9, 1e9]}
            whole = Measurement(**{**of_result, **more}, outcome=result.outcome.value, reason=result.reason)
            Path(record).write_text(json.dumps(asdict(whole)))

    def prepare(self, beside_builds: bool, starts_cold: bool) -> None:
        """Has nothing to wait for."""

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        """Has nothing to build."""
        return {}

    @property
    def has_compiled(self) -> bool:
        """Whether anything was compiled."""
        return False

    def prime(self, imported: Sequence[Import]) -> None:
        """Has nothing to import."""

    def close(self) -> None:
        """Has nothing that runs."""


def open_in(folder: Path, method: str) -> OpenStudy | None:
    """Returns the study of a folder, a new one where there is none; None where it has come to its end."""
    if (folder / "finished").exists():
        return None
    for record in folder.glob("zerotune-studies/*/study.json"):
        return resume_study(record.parent)
    arguments = StudyArguments(
        config_path=REPLAY / "convnet.yaml",
        model_dir=REPLAY / "convnet",
        method=method,
        max_trials=MAX_TRIALS,
        free_batch=method == "adaptive",
    )
    return new_study(arguments, folder)


def run(driver: StudyDriver) -> None:
    """Does what the flow does, one piece of work at a time."""
    if driver.state.profile is None:
        end(driver, Work((driver.profile_plan(),)))
    if not driver.state.has_searched:
        plan = None if driver.state.submitted else driver.submitted_plan()
        if plan is not None:
            end(driver, Work((plan,)))
        while work := driver.next_work(1):
            end(driver, work[0])
        driver.stop("the search has ended")
    while (plan := next_confirming_plan(driver)) is not None:
        end(driver, Work((plan,)))


def end(driver: StudyDriver, work: Work) -> None:
    for _ in driver.run(work):
        ended = driver.next_ended(1.0)
        assert ended is not None
        driver.tell(ended)


def live(folder: Path, method: str) -> int:
    """Starts a process that resumes the study and runs it to its end; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    study = open_in(folder, method)
    if study is not None:
        run(study.driver)
        (folder / "finished").touch()
    os._exit(0)


def events(folder: Path) -> int:
    """Returns how many lines the history of a folder's study has."""
    histories = folder.glob("zerotune-studies/*/history.jsonl")
    return sum(history.read_bytes().count(b"\n") for history in histories)


def kill_after(pid: int, folder: Path, more: int, pause_s: float) -> int:
    """Kills a study's process some time after it has added some lines to the history; returns their number by then."""
    wanted = events(folder) + more
    while events(folder) < wanted:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "it ended before it was killed often enough"
        time.sleep(0.001)
    time.sleep(pause_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return events(folder)


def main(folder: Path, method: str, kills: int, seed: int) -> None:
    """Runs both, and prints how many lines the history of the second had when it was killed each time."""
    starter = TableStarter(TableWorld.read(REPLAY / "tables" / "convnet.jsonl"))
    open_study.starter_of = lambda *_: starter  # type: ignore[assignment]
    open_study.host_lock_dir = lambda: folder / "locks"
    open_study.uncovered = lambda *_: ""
    trial.time = Clock()  # type: ignore[assignment]
    trial.since_boot, trial.seconds_since = Clock.time, lambda moment: 0.0
    whole, killed = folder / "whole", folder / "killed"
    whole.mkdir()
    killed.mkdir()
    assert os.waitpid(live(whole, method), 0)[1] == 0
    most = events(whole) // kills
    draws = random.Random(seed)
    lines = [
        kill_after(live(killed, method), killed, draws.randint(0, most), draws.uniform(0, LONGEST_PAUSE_S))
        for _ in range(kills)
    ]
    assert os.waitpid(live(killed, method), 0)[1] == 0
    print(json.dumps(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
