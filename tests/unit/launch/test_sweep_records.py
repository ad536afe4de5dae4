"""What becomes of the records that the ranks of a sweep leave; they are written here by the test."""

import dataclasses
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest import Trials

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.launch.rank_starter import LaunchRequest, ProcessesEnd
from zerotune.trial_lib.launch.trial import ThisHost, TrialPlan
from zerotune.trial_lib.messages.measurement import HostMoment, Measurement, Memory, RankFailure
from zerotune.trial_lib.messages.orders import RankOrder, SizeOrder, now
from zerotune.trial_lib.records.candidate import Sweep, Withdrawal
from zerotune.trial_lib.records.result import TrialResult

HOST = Host("cpu", ["0", "1"], 2**30)
ENDED, KILLED = ProcessesEnd("ranks", [0]), ProcessesEnd("ranks", [-9])
Act = Callable[[RankOrder], ProcessesEnd]


class Ranks:
    """Stands in for a starter, and for the ranks that it starts."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self.request: LaunchRequest | None = None

    def prepare(self, beside_builds: bool, starts_cold: bool) -> None:
        pass

    def launch(self, request: LaunchRequest) -> "Ranks":
        self.request = request
        return self

    def wait_or_cancel(self, cancelled: threading.Event) -> ProcessesEnd:
        assert self.request is not None
        return self._act(RankOrder.from_json(json.loads(json.dumps(self.request.payload))))


@dataclasses.dataclass
class Swept:
    ends: list[Any]
    told: list[tuple[int, TrialResult]]
    plans: list[TrialPlan]
    request: LaunchRequest
    notes: list[str]

    @property
    def outcomes(self) -> list[str]:
        return [end.value if isinstance(end, Withdrawal) else end.outcome.value for end in self.ends]


@pytest.fixture
def swept(trials: Trials) -> Callable[[Act], Swept]:
    def run(act: Act, change: Callable[[TrialPlan], TrialPlan] = lambda plan: plan, host: Host = HOST) -> Swept:
        plans = [change(trials.plan("plain.py", micro_batch=size)) for size in (2, 4, 8)]
        sweep = Sweep(tuple(plan.candidate for plan in plans), 10.0, 0.05)
        ranks, told, notes = Ranks(act), [], []
        place = ThisHost(ranks, host, trials.lock_dir)  # type: ignore[arg-type]
        measured = lambda position, result: told.append((position, result))  # noqa: E731
        ends = place.run_sweep(plans, sweep, threading.Event(), notes.append, measured)
        assert ranks.request is not None
        return Swept(ends, told, plans, ranks.request, notes)

    return run


def measure(size: SizeOrder, outcome: str = "completed", at: HostMoment = (), **memory: int) -> None:
    figures = {"peak": 5, "after_initialize": 2, "available": 9, **memory}
    record = Measurement(
        outcome=outcome,
        metrics={"throughput": 1.0},
        memory=Memory(**{name: [figure] for name, figure in figures.items()}),
        phases={"start": 0.01},
        time=at or now(),
    )
    Path(size.measurements[0]).write_text(json.dumps(asdict(record)))


def fail(size: SizeOrder, message: str) -> None:
    record = RankFailure(type="RuntimeError", message=message, engine_built=True, time=time.time())
    Path(size.failures[0]).write_text(json.dumps(asdict(record)))


def test_sizes_that_were_all_measured_are_results_in_their_order(swept: Any) -> None:
    def act(order: RankOrder) -> ProcessesEnd:
        for size in order.sizes:
            measure(size)
        return ENDED

    found = swept(act)
    assert found.outcomes == ["completed"] * 3
    assert [position for position, _ in found.told] == [0, 1, 2]
    assert [end.swept for end in found.ends] == [False, True, True]
    for plan, end in zip(found.plans, found.ends, strict=True):
        assert TrialResult.from_text(plan.paths.result.read_text()) == end
        assert end.number == plan.number
        assert not plan.paths.scratch.exists()


def test_the_spans_of_a_sweeps_trials_follow_each_other_without_a_gap(swept: Any) -> None:
    def act(order: RankOrder) -> ProcessesEnd:
        for size in order.sizes:
            time.sleep(0.1)
            measure(size)
        time.sleep(0.1)
        return ENDED

    ends = swept(act).ends
    for before, after in itertools.pairwise(ends):
        assert before.started_at + sum(before.phases.values()) == pytest.approx(after.started_at, abs=0.02)
    assert sum(ends[2].phases.values()) == pytest.approx(0.2, abs=0.08)


@pytest.mark.parametrize("jump", [10 * 365 * 86400.0, -86400.0])
def test_a_wall_clock_that_is_set_meanwhile_changes_no_duration(
    swept: Any, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = time.time

    def act(order: RankOrder) -> ProcessesEnd:
        for size in order.sizes:
            time.sleep(0.1)
            measure(size)
            monkeypatch.setattr(time, "time", lambda: wall() + jump)
        return ENDED

    found = swept(act)
    assert found.outcomes == ["completed"] * 3
    for end in found.ends:
        assert sum(end.phases.values()) == pytest.approx(0.1, abs=0.08)


# What is measured of another host is neither later nor earlier by its clocks: each is off to either side once.
@pytest.mark.parametrize(("uptime", "ahead"), [(1e9, -86400.0), (5.0, 86400.0)])
def test_ranks_of_another_host_may_have_any_uptime_and_any_wall_clock(swept: Any, uptime: float, ahead: float) -> None:
    def act(order: RankOrder) -> ProcessesEnd:
        for size in order.sizes:
            time.sleep(0.3)
            measure(size, at=["another boot", uptime, time.time() + ahead])
        return ENDED

    ends = swept(act).ends
    began, end = ends[0].started_at, time.time()
    assert all(began <= each.started_at <= end for each in ends)
    assert sum(sum(each.phases.values()) for each in ends) == pytest.approx(0.9, abs=0.3)


def test_a_result_is_told_while_the_ranks_still_run(swept: Any) -> None:
    told_in_time = threading.Event()

    def act(order: RankOrder) -> ProcessesEnd:
        first = order.sizes[0]
        measure(first)
        result = Path(first.measurements[0]).with_name("result.json")
        for _ in range(200):
            if result.exists():
                told_in_time.set()
                break
            time.sleep(0.02)
        return KILLED

    assert swept(act).outcomes[0] == "completed"
    assert told_in_time.is_set()


def test_a_result_says_that_its_allocator_had_to_make_room(swept: Any) -> None:
    def act(order: RankOrder) -> ProcessesEnd:
        for size, retries in zip(order.sizes, (0, 0, 4), strict=True):
            measure(size, counted_retries=retries, steps_peak=4)
        return ENDED

    *steady, short = swept(act).ends
    assert [end.note for end in steady] == ["", ""]
    assert "empty its cache 4 times" in short.note
    assert short.memory.above_initialize == [2]


@pytest.mark.parametrize("reason", ["memory", "not_repeatable"])
def test_what_the_ranks_decided_is_the_reason_for_the_sizes_left(swept: Any, reason: str) -> None:
    def act(order: RankOrder) -> ProcessesEnd:
        measure(order.sizes[0])
        Path(order.withdrawal).write_text(json.dumps({"reason": reason}))
        return ENDED

    found = swept(act)
    assert found.outcomes == ["completed", reason, reason]
    assert [plan.paths.root.exists() for plan in found.plans] == [True, False, False]


def test_an_out_of_memory_is_that_sizes_outcome_and_ends_the_group(swept: Any) -> None:
    def act(order: RankOrder) -> ProcessesEnd:
        measure(order.sizes[0])
        fail(order.sizes[1], "DefaultCPUAllocator: can't allocate memory")
        return ProcessesEnd("ranks", [1])

    assert swept(act).outcomes == ["completed", "out_of_memory", "ended"]


@pytest.mark.parametrize(("position", "outcomes"), [(0, ["out_of_host_memory", "ended"]), (1, ["completed", "ended"])])
def test_memory_of_the_host_that_is_gone_may_be_that_of_the_sizes_before(
    swept: Any, position: int, outcomes: list[str]
) -> None:
    def act(order: RankOrder) -> ProcessesEnd:
        for size in order.sizes[:position]:
            measure(size)
        fail(order.sizes[position], "DefaultCPUAllocator: can't allocate memory")
        return ProcessesEnd("ranks", [1])

    found = swept(act, host=Host("cuda", ["0", "1"], 2**30))
    assert found.outcomes == [*outcomes, "ended"]
    assert found.notes == []


@pytest.mark.parametrize("position", [0, 1])
def test_a_crash_counts_for_the_first_size_and_says_nothing_of_a_later_one(swept: Any, position: int) -> None:
    def act(order: RankOrder) -> ProcessesEnd:
        for size in order.sizes[:position]:
            measure(size)
        fail(order.sizes[position], "trying to initialize the default process group twice!")
        return ProcessesEnd("ranks", [1])

    found = swept(act)
    if position == 0:
        assert found.outcomes == ["crashed", "ended", "ended"]
    else:
        assert found.outcomes == ["completed", "not_repeatable", "not_repeatable"]
        assert "default process group twice" in found.notes[0]


def test_a_group_that_is_killed_from_outside_says_nothing_of_the_program(swept: Any) -> None:
    def act(order: RankOrder) -> ProcessesEnd:
        measure(order.sizes[0])
        return ProcessesEnd("ranks", [-signal.SIGKILL])

    found = swept(act)
    assert found.ends[1:] == [Withdrawal.ENDED] * 2
    assert found.notes == []


def test_a_batch_that_does_not_follow_is_invalid_first_and_not_repeatable_later(swept: Any) -> None:
    def ignored_at(position: int) -> Act:
        def act(order: RankOrder) -> ProcessesEnd:
            for size in order.sizes[:position]:
                measure(size)
            measure(order.sizes[position], "invalid")
            return ProcessesEnd("ranks", [1])

        return act

    assert swept(ignored_at(0)).outcomes == ["invalid", "ended", "ended"]
    assert swept(ignored_at(2)).outcomes == ["completed", "completed", "not_repeatable"]


def test_a_size_that_is_too_slow_or_diverged_has_a_result_of_its_own(swept: Any) -> None:
    def act(order: RankOrder) -> ProcessesEnd:
        measure(order.sizes[0], "too_slow")
        measure(order.sizes[1], "diverged")
        return ProcessesEnd("ranks", [1])

    assert swept(act).outcomes == ["too_slow", "diverged", "ended"]


def test_what_a_cancelled_sweep_has_measured_stays(swept: Any) -> None:
    def act(order: RankOrder) -> ProcessesEnd:
        measure(order.sizes[0])
        return ProcessesEnd("cancel", [None])

    assert swept(act).outcomes == ["completed", "cancelled", "ended"]


def test_each_size_has_a_command_line_and_changes_of_the_environment_of_its_own(swept: Any) -> None:
    def change(plan: TrialPlan) -> TrialPlan:
        size = plan.candidate.micro_batch_size
        own = {"BATCH": str(size), **({"ONCE": "1"} if size == 4 else {})}
        environment = {**plan.program.environment, **own}
        return dataclasses.replace(plan, program=dataclasses.replace(plan.program, environment=environment))

    def act(order: RankOrder) -> ProcessesEnd:
        for size in order.sizes:
            measure(size)
        return ENDED

    found = swept(act, change)
    sizes = RankOrder.from_json(found.request.payload).sizes
    assert [size.environment for size in sizes] == [{}, {"BATCH": "4", "ONCE": "1"}, {"ONCE": None, "BATCH": "8"}]
    assert [size.arguments for size in sizes] == [plan.program.arguments for plan in found.plans]
    assert found.request.deadline_s == sum(plan.deadline_s for plan in found.plans)
