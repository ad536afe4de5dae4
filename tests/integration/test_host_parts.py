"""One trial over two hosts of a cluster: each host's part starts its own ranks, and they meet."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
from conftest import Trials

from zerotune.trial_lib.launch.locks import own_folder
from zerotune.trial_lib.launch.rank_starter import HostRanks, ProcessesEnd
from zerotune.trial_lib.launch.ray_host import HostSetup, RayHost, unpack
from zerotune.trial_lib.launch.starters import rank_environment
from zerotune.trial_lib.launch.trial import take_result
from zerotune.trial_lib.messages.orders import StepWindow

# Parts of this machine stand for hosts, each with a core of its own.
pytestmark = pytest.mark.devices(2, "cpu")

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)


def host(trials: Trials, name: str) -> RayHost:
    """Returns what a study keeps on a host; both of them share this machine's slots."""
    return RayHost(HostSetup(name, sys.executable, [], [], rank_environment(), False, trials.lock_dir))


@pytest.mark.long
def test_the_parts_of_two_hosts_are_one_trial_whose_files_come_back(trials: Trials, tmp_path: Path) -> None:
    plan = trials.plan("plain.py", slots=2, window=SHORT)
    plan.paths.root.mkdir(parents=True)
    first, second = host(trials, "first"), host(trials, "second")
    port = first.meet(plan.trial_id)
    parts = [HostRanks(rank, 1, 2, "127.0.0.1", port) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(on.run_part, plan, part, []) for on, part in zip((first, second), parts, strict=True)]
        ends = [one.result() for one in running]
    assert [end.ending for end in ends] == [ProcessesEnd("ranks", [0])] * 2
    assert [sorted(name for name in end.files[0] if name.endswith(".log")) for end in ends] == [
        ["rank0.log"],
        ["rank1.log"],
    ]
    for end in ends:
        unpack(end.files[0], plan.paths.root)
    result = take_result(plan, ProcessesEnd("ranks", [0, 0]), False, "cpu", 0.0, 1.0)
    assert result.outcome == "completed", result.reason
    assert len(result.memory.peak) == 2
    assert result.logs == [str(plan.paths.log(rank)) for rank in range(2)]
    for one in (first, second):
        one.close()
    assert not list((own_folder(trials.lock_dir) / "trials").iterdir())


def test_a_part_that_cannot_be_prepared_gives_its_port_back(
    trials: Trials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = trials.plan("plain.py", slots=2, window=SHORT)
    plan.paths.root.mkdir(parents=True)
    one = host(trials, "first")
    given_back = []
    monkeypatch.setattr("zerotune.trial_lib.launch.ray_host.reserved_port", lambda: nullcontext(4711))
    port = one.meet(plan.trial_id)
    one._meetings[plan.trial_id].callback(given_back.append, port)
    monkeypatch.setattr(one._starter, "prepare", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.run_part(plan, HostRanks(0, 1, 2, "127.0.0.1", port), [])
    assert given_back == [4711]
    one.close()
