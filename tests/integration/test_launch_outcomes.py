"""How a trial ends, with real ranks under both starters."""

import dataclasses
import json
import time
from pathlib import Path

import pytest
from device_fixtures import host_of_tests

from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.folders import TrialPaths

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)
GIB = 2**30


@pytest.mark.parametrize(
    ("starter", "stage"),
    [
        ("warm", 3),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("warm", 1), ("cold", 1), ("cold", 3))),
    ],
)
def test_a_trial_that_needs_more_than_its_slot_has_is_out_of_memory(trials, starter, stage):
    # Only rank 1 needs so much; rank 0 loses its connection to it.
    arguments = ["--mib_per_sample", "256", "--only_rank", "1"]
    options = {"starter": starter, "slots": 2, "zero": {"stage": stage}, "memory_limit": 2 * GIB}
    result = trials.run("memory_use.py", *arguments, micro_batch=16, **options)
    assert result.outcome == "out_of_memory"
    assert {"cpu": "can't allocate memory", "cuda": "out of memory"}[host_of_tests().device] in result.reason
    assert result.reason.endswith(f"Log: {result.logs[1]}")
    assert result.metrics == {}
    # What it still had settles errors that do not say what they lack.
    record = json.loads(TrialPaths(Path(result.logs[1]).parent).failure(1).read_text())
    assert 0 < record["memory"]["free"] < record["memory"]["total"]


@pytest.mark.long
def test_the_largest_micro_batch_that_fits_is_the_same_each_time(trials):
    def largest():
        size = 16
        while trials.run("memory_use.py", micro_batch=2 * size, memory_limit=GIB, window=SHORT).outcome == "completed":
            size *= 2
        return size

    assert {largest() for _ in range(3)} == {64}


def test_a_trial_within_its_limit_completes(trials):
    result = trials.run("memory_use.py", micro_batch=8, memory_limit=GIB, window=SHORT)
    assert result.outcome == "completed", result.reason
    assert result.reason == ""


def test_memory_that_ran_out_while_deepspeed_initialised_is_out_of_memory(trials):
    buckets = {"stage": 1, "reduce_bucket_size": 1e9, "allgather_bucket_size": 1e9}
    result = trials.run("transformer.py", "--hidden", "2048", zero=buckets, memory_limit=GIB)
    assert result.outcome == "out_of_memory", result.reason


@pytest.mark.alone
@pytest.mark.parametrize("starter", ["warm", pytest.param("cold", marks=pytest.mark.long)])
def test_a_trial_beyond_its_deadline_is_ended_with_all_that_it_started(trials, starter):
    slots, deadline = (2, 4.0) if starter == "warm" else (1, 12.0)
    running = trials.start(trials.plan("children.py", "--hang", "spin", slots=slots, deadline_s=deadline), starter)
    for rank in range(slots):
        running.wait_for("ready", rank)
    pids = running.pids()
    assert len(pids) == 3 * slots
    assert all(trials.is_alive(pid) for pid in pids)
    result = running.result()
    assert result.outcome == "timed_out", result.reason
    assert f"deadline of {deadline:.0f} s" in result.reason
    assert not any(trials.is_alive(pid) for pid in pids)


@pytest.mark.alone
@pytest.mark.parametrize("hang", ["sleep", "spin", pytest.param("", marks=pytest.mark.long)])
def test_a_cancelled_trial_is_gone_within_two_seconds(trials, hang):
    plan = trials.plan("children.py", "--hang", hang, slots=2, window=StepWindow(3, 1000, max_steps=10**6))
    running = trials.start(plan)
    running.wait_for("ready", rank=0)
    running.wait_for("ready", rank=1)
    pids, cancelled_at = running.pids(), time.monotonic()
    running.cancel()
    result = running.result()
    assert time.monotonic() - cancelled_at < 2.0
    assert result.outcome == "cancelled"
    assert len(pids) == 6
    assert not any(trials.is_alive(pid) for pid in pids)


def test_a_trial_that_completes_leaves_nothing_behind(trials):
    running = trials.start(trials.plan("children.py", slots=2, window=SHORT))
    assert running.result().outcome == "completed"
    assert len(running.pids()) == 6
    assert not any(trials.is_alive(pid) for pid in running.pids())


def test_a_trial_cancelled_before_it_starts_starts_nothing(trials):
    plan = trials.plan("plain.py", slots=2)
    running = trials.start(plan)
    running.cancel()
    assert running.result().outcome == "cancelled"


def test_an_exception_of_the_program_is_crashed_with_its_words(trials):
    result = trials.run("ends.py", "--how", "raise", "--steps", "2", slots=2)
    assert result.outcome == "crashed"
    assert "The program raised ValueError: the tokenizer has no padding token" in result.reason
    assert "Traceback" in trials.log(result)


@pytest.mark.alone
def test_an_exception_on_one_rank_is_the_cause_and_its_peers_are_not(trials):
    started = time.monotonic()
    result = trials.run("ends.py", "--how", "raise on one", "--steps", "2", slots=2)
    assert result.outcome == "crashed"
    assert f"ValueError: shard 1 is corrupt. Log: {result.logs[1]}" in result.reason
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("before", "The program ended without calling deepspeed.initialize."),
        pytest.param("exit 3", "SystemExit: 3", marks=pytest.mark.long),
        ("exit with words", "SystemExit: No checkpoint to resume from."),
    ],
)
def test_a_program_that_ends_too_early_is_crashed_and_the_reason_says_why(trials, how, words):
    result = trials.run("ends.py", "--how", how, "--steps", "2")
    assert result.outcome == "crashed"
    assert words in result.reason


@pytest.mark.parametrize("how", ["return", pytest.param("destroy", marks=pytest.mark.long), "vanish"])
def test_a_program_that_trains_for_too_few_steps_is_out_of_data(trials, how):
    result = trials.run("ends.py", "--how", how, "--steps", "2")
    assert result.outcome == "out_of_data"
    assert "The program ended after 2 optimizer steps, before enough of them were measured" in result.reason


def test_a_program_that_trains_without_deepspeed_is_found_out_long_before_its_deadline(trials):
    result = trials.run("without_deepspeed.py", deadline_s=60)
    assert result.outcome == "invalid"
    assert "It trains without DeepSpeed" in result.reason


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        ({"stage": 2, "reduce_bucket_sise": 5}, "zero_optimization.reduce_bucket_sise: DeepSpeed"),
        ({"stage": 4}, "Input should be 0, 1, 2"),
    ],
)
def test_a_configuration_that_deepspeed_refuses_is_invalid_and_named(trials, zero, words):
    result = trials.run("plain.py", zero=zero)
    assert result.outcome == "invalid"
    assert words in result.reason


@pytest.mark.long
def test_an_interpreter_that_does_not_start_is_crashed_with_its_last_words(trials, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'libpython3.so: cannot open shared object file' >&2\nexit 127\n")
    broken.chmod(0o755)
    plan = trials.plan("plain.py")
    plan = dataclasses.replace(plan, program=dataclasses.replace(plan.program, interpreter=str(broken)))
    result = trials.start(plan, "cold").result()
    assert result.outcome == "crashed"
    assert "libpython3.so: cannot open shared object file" in result.reason


def test_a_script_that_does_not_exist_is_crashed_and_named(trials):
    result = trials.run("no_such_script.py")
    assert result.outcome == "crashed"
    assert "no_such_script.py" in result.reason


def test_a_program_that_prints_a_lot_is_not_held_up_and_loses_nothing(trials):
    result = trials.run("prints.py", window=StepWindow(2, 10, max_steps=9))
    assert result.outcome == "completed", result.reason
    log = trials.log(result)
    assert log.count("\N{SNOWMAN}") == log.count("error: ") == log.count("from a child") == 9
    assert len(log) > 9_000_000


@pytest.mark.long
def test_warm_and_cold_trials_end_alike(trials):
    def both(script, *arguments, **options):
        warm, cold = (trials.run(script, *arguments, starter=name, **options) for name in ("warm", "cold"))
        return warm, cold

    warm, cold = both("known_losses.py", accumulation=2, slots=2, window=SHORT)
    assert warm.outcome == cold.outcome == "completed"
    assert warm.metrics.keys() == cold.metrics.keys()
    assert warm.versions == cold.versions
    for metric in ("loss_first", "loss_last", "measured_steps"):
        assert warm.metrics[metric] == cold.metrics[metric]

    warm, cold = both("ends.py", "--how", "raise", "--steps", "2")
    assert warm.outcome == cold.outcome == "crashed"
    assert warm.reason.split(" Log: ")[0] == cold.reason.split(" Log: ")[0]
