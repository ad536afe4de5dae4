"""One trial over several hosts: real `deepspeed --no_ssh --node_rank` processes on loopback addresses as hosts."""

import json
import sys
import threading
from pathlib import Path

import pytest
from conftest import Trials
from hosts_fixtures import HOSTS, part_of
from study_fixtures import Zerotune

from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.hosts import HostfileStarter
from zerotune.trial_lib.launch.starters import rank_environment
from zerotune.trial_lib.launch.trial import ThisHost
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.result import Outcome, TrialResult

# Parts of this machine stand for hosts, each with a core of its own.
pytestmark = [pytest.mark.alone, pytest.mark.devices(2, "cpu")]

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)


def over_hosts(trials: Trials, script: str, **options: object) -> TrialResult:
    """Runs a trial over both hosts."""
    # gloo would look for this machine's own address.
    environment = {**rank_environment(), "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(trials.root)}
    environment["CUDA_VISIBLE_DEVICES"] = "6,7"
    plan = trials.plan(script, slots=2, window=SHORT, environment=environment, **options)  # type: ignore[arg-type]
    starter = HostfileStarter(HOSTS, sys.executable, ["ShareMemCommBuilder"], environment, trials.notes.append)
    return ThisHost(starter, this_host(), trials.lock_dir).run_trial(plan, threading.Event())


@pytest.mark.long
def test_a_trial_has_the_ranks_of_all_hosts_and_each_leaves_its_record(trials: Trials) -> None:
    result = over_hosts(trials, "inspects.py", local_rank_option="--local_rank")
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.metrics["throughput"] > 0
    assert len(result.memory.peak) == 2
    cores = []
    for rank in range(2):
        line = next(line for line in trials.log(result, rank).splitlines() if line.startswith("found "))
        found = json.loads(line.removeprefix("found "))
        environment = found["environment"]
        assert (environment["RANK"], environment["CROSS_RANK"]) == (str(rank), str(rank))
        assert (environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("2", "0")
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["CUDA_VISIBLE_DEVICES"] == "67"[rank]
        assert found["argv"][1] == "--local_rank=0"
        cores += found["cores"]
    assert len(set(cores)) == 2
    assert (Path(result.logs[0]).parent / "hostfile").read_text() == "127.0.0.1 slots=1\n127.0.0.2 slots=1\n"
    assert part_of(0) == part_of(1) == []
    assert not list(trials.root.glob("zerotune-workers-*"))


@pytest.mark.long
def test_what_one_host_s_rank_raises_is_the_trial_s_reason(trials: Trials) -> None:
    result = over_hosts(trials, "raises_on_rank_1.py")
    assert result.outcome is Outcome.CRASHED
    assert "The program raised ValueError: only here" in result.reason
    assert result.reason.endswith("rank1.log")


@pytest.mark.long
def test_a_typed_command_with_a_hostfile_is_tuned_over_its_hosts(tmp_path: Path, home: Path) -> None:
    zerotune = Zerotune(tmp_path, home)
    (zerotune.model / "hosts").write_text("".join(f"{host} slots={slots}\n" for host, slots in HOSTS.items()))
    zerotune.folder = zerotune.model
    command = ("deepspeed", "--hostfile", "hosts", "train.py", "--deepspeed_config", "ds_config.json")
    arguments = ("tune", "--method", "random", "-mt", "2", "--max-micro-batch", "8", "--json", "--", *command)
    ended = zerotune.run(*arguments, timeout=400, GLOO_SOCKET_IFNAME="lo")
    assert ended.returncode == 0, ended.stderr
    study = zerotune.study
    assert "hosts:" in study.paths.experiment.read_text()
    assert {result.outcome for result in study.results.values()} == {Outcome.COMPLETED}
    assert {len(result.logs) for result in study.results.values()} == {2}
    config = json.loads(study.paths.best_ds_config.read_text())
    # The user's configuration leaves the batch of all hosts open, and so does the answer.
    assert "train_batch_size" not in config
    assert config["train_micro_batch_size_per_gpu"] >= 1
    assert "deepspeed --hostfile hosts train.py" in study.paths.best_command.read_text()
