"""However a program comes to its end, what was measured by then counts; ranks that wait for ever are told of."""

import contextlib
import dataclasses
import os
import textwrap
import time
from pathlib import Path

import pytest

from zerotune.trial_lib.launch.processes import watchdog
from zerotune.trial_lib.messages.orders import StepWindow

# Never enough by itself: a program ends first.
UNTIL_THE_END = StepWindow(3, 5, max_steps=1000, max_seconds=60, relative_error=0.0)
PATIENCE_S = 6.0


@pytest.fixture
def ends(trials, tmp_path):
    """Runs the plain training of so many steps, then some lines."""

    def ends(lines, *arguments, steps=9, slots=1, **options):
        folder = tmp_path / "program"
        folder.mkdir()
        (folder / "train.py").write_text(
            textwrap.dedent(
                """
                import argparse, os, signal, sys, threading, time
                import deepspeed, torch
                args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args()
                torch.manual_seed(1)
                model = torch.nn.Linear(4, 1)
                engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
                def train(steps):
                    for _ in range(steps):
                        engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 4)).sum())
                        engine.step()
                """
            )
            + f"STEPS = {steps}\n"
            + textwrap.dedent(lines)
        )
        options = {"window": UNTIL_THE_END, "model_dir": folder, "slots": slots, **options}
        return trials.run("train.py", *arguments, **options)

    return ends


@pytest.mark.parametrize(
    "lines",
    [
        "train(STEPS); os._exit(0)",
        "train(STEPS); os.kill(os.getpid(), signal.SIGKILL)",
        *(
            pytest.param(f"train(STEPS); {ends}", marks=pytest.mark.long)
            for ends in ("quit()", "os.kill(os.getpid(), signal.SIGTERM)", "next(iter(()))")
        ),
        "train(STEPS); threading.Thread(target=time.sleep, args=(1000,)).start()",
        pytest.param(
            "thread = threading.Thread(target=lambda: (train(STEPS), os._exit(0)))\nthread.start(); thread.join()",
            marks=pytest.mark.long,
        ),
        pytest.param("train(STEPS); signal.raise_signal(signal.SIGTERM)", marks=pytest.mark.long),
        pytest.param("train(STEPS); os.killpg(0, signal.SIGTERM)", marks=pytest.mark.long),
    ],
)
def test_what_was_measured_counts_however_the_program_ends(ends, lines):
    result = ends(lines)
    assert result.outcome == "completed", result.reason
    assert result.metrics["measured_steps"] == 7


def test_a_program_that_ends_past_pythons_end_is_measured_on_all_ranks(trials):
    result = trials.run("ends.py", "--how", "vanish", "--steps", "9", slots=2, window=UNTIL_THE_END)
    assert result.outcome == "completed", result.reason
    assert result.metrics["measured_steps"] == 7


def test_a_child_that_ends_past_pythons_end_is_not_the_rank(ends):
    lines = """
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    train(STEPS)
    """
    assert ends(lines).metrics["measured_steps"] == 7


@pytest.mark.parametrize(
    "lines", ["train(STEPS); os._exit(3)", pytest.param("train(STEPS); sys.exit(3)", marks=pytest.mark.long)]
)
def test_a_status_that_says_failure_is_one_whatever_was_measured(ends, lines):
    result = ends(lines)
    assert result.outcome == "crashed"
    assert "SystemExit: 3" in result.reason


@pytest.mark.parametrize("where", ["code", "file"])
def test_a_configuration_with_deepspeeds_autotuner_in_it_is_measured_to_its_end(trials, tmp_path, where):
    tuner = {"autotuning": {"enabled": True, "start_profile_step": 1, "end_profile_step": 2}}
    plan = trials.plan("autotunes.py", "--where", where, window=UNTIL_THE_END)
    plan.paths.root.mkdir(parents=True)
    plan = dataclasses.replace(plan, ds_config={**plan.ds_config, **tuner})
    result = trials.start(plan).result()
    assert result.outcome == "completed", result.reason
    assert result.metrics["measured_steps"] == 18
    assert not (tmp_path / "autotuning_metric.json").exists()


@pytest.mark.parametrize(
    "lines",
    [
        # One batch, dropped, in each of them: no loop over them begins.
        "for x in loader: loss = x\nprint(loss)",
        pytest.param("print(STEPS / len(list(loader)))", marks=pytest.mark.long),
        pytest.param("while engine.global_steps < STEPS:\n    for x in loader: pass", marks=pytest.mark.long),
    ],
)
def test_a_size_for_which_there_is_no_batch_is_out_of_data(ends, lines):
    loader = "loader = torch.utils.data.DataLoader(torch.ones(5, 4), 8, drop_last=True)\n"
    result = ends(loader + lines, micro_batch=8)
    assert result.outcome == "out_of_data"
    assert "micro-batch 8 x accumulation 1 needs 5" in result.reason


def test_a_mistake_of_the_program_is_still_its_own(ends):
    result = ends("train(STEPS)\nprint(no_such_name)")
    assert result.outcome == "crashed"
    assert "NameError" in result.reason


# -- ranks that something ends ---------------------------------------------------------------------------------------

LIBC = "import ctypes, subprocess; libc = ctypes.CDLL(None); mine = os.environ['RANK'] == '1'; train(2)"
BY_WHOM = "Otherwise another process has sent it, or the program itself."
# A line of the program on rank 1, what ends then, and the words of the reason. docs/operations.md has the same table.
ENDS_OF_A_RANK = {
    "killed by another process": (
        "subprocess.run(['kill', '-9', str(os.getpid())])",
        "Rank 1 was killed by SIGKILL. The kernel sends it if memory runs out, and has counted no such kill meanwhile. "
        + BY_WHOM,
    ),
    "terminated by another process": (
        "subprocess.run(['kill', str(os.getpid())]); time.sleep(60)",
        "Rank 1 was ended by SIGTERM: another process has sent it, or the program itself.",
    ),
    "killed by itself": (
        "os.kill(os.getpid(), 9)",
        "Rank 1 was ended by its program, which sent SIGKILL to its own process after 2 optimizer steps.",
    ),
    "killed by its process group": (
        "os.killpg(0, 9)",
        "Rank 1 was ended by its program, which sent SIGKILL to its own process group after 2 optimizer steps.",
    ),
    "its guard killed": (
        "os.kill(os.getppid(), 9)",
        "The trial's guard process, the parent of its ranks, was killed: another process has sent it",
    ),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "Rank 1 was stopped by SIGSTOP and did not go on:"),
    "executes another program": (
        "os.execvp('sleep', ['sleep', '600'])",
        "The program replaces itself by another one before it is measured: os.exec of sleep 600.",
    ),
    "executes another program past Python": (
        "libc.execl(b'/bin/sleep', b'sleep', b'600', None)",
        "Rank 1 no longer runs the program, because its process executes another one: sleep 600.",
    ),
    "a fault of native code": ("ctypes.string_at(0)", "Rank 1 crashed in native code by SIGSEGV; its last words:"),
    "a bus error": ("libc.raise_(7) if hasattr(libc, 'raise_') else libc['raise'](7)", "in native code by SIGBUS;"),
    "an abort": ("os.abort()", "Rank 1 crashed in native code by SIGABRT; its last words:"),
    "an exit code past Python": (
        "print('licence expired', flush=True); libc._exit(7)",
        "Rank 1 ended with exit code 7 and left no result; its last words: licence expired.",
    ),
    "an exit code": ("sys.exit(3)", "The program ended by itself with SystemExit: 3"),
    "an exception": ("raise ValueError('shard 1 is corrupt')", "The program raised ValueError: shard 1 is corrupt."),
}
QUICK = ("killed by another process", "killed by itself", "executes another program")


@pytest.mark.parametrize(
    "how", [how if how in QUICK else pytest.param(how, marks=pytest.mark.long) for how in ENDS_OF_A_RANK]
)
def test_a_rank_that_something_ends_is_named_with_what_ended_it(ends, how):
    line, words = ENDS_OF_A_RANK[how]
    began = time.monotonic()
    result = ends(f"{LIBC}\nif mine:\n    {line}\ntrain(100_000)", slots=2, deadline_s=300)
    assert result.outcome == "crashed"
    assert words in result.reason
    assert time.monotonic() - began < 60
    # Who sent a signal is not known, so the trial runs once more. Everything else is the program's own.
    of_a_signal = ("killed by", "terminated by", "its guard", "stopped")
    assert result.from_outside == how.startswith(of_a_signal)


@pytest.mark.long
def test_a_rank_that_the_kernel_kills_for_memory_is_out_of_memory(ends):
    first = Path("/sys/fs/cgroup/memory")  # the first version of control groups has a tree for memory
    folder, limit = (first, "memory.limit_in_bytes") if first.is_dir() else (first.parent, "memory.max")
    group = folder / f"zerotune-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(64 * 2**20))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"this user may make no control group with a limit of memory in {folder} ({error})")
    lines = f"""
    {LIBC}
    if mine:
        open("{group}/cgroup.procs", "w").write(str(os.getpid()))
        held = b"x" * 2**29
    train(100_000)
    """
    try:
        result = ends(lines, slots=2, deadline_s=300)
    finally:
        group.rmdir()
    assert result.outcome == "out_of_memory"
    assert "Rank 1 was killed by SIGKILL while the kernel killed processes for lack of host memory." in result.reason


@pytest.mark.long
@pytest.mark.parametrize("line", ["os.setsid()", "os.setpgrp()"])
def test_a_rank_that_leaves_its_process_group_is_measured_and_ends_with_its_trial(ends, trials, line):
    result = ends(f"""
    if os.getpid() != os.getpgrp():
        {line}
    open("../pid" + os.environ["RANK"], "w").write(str(os.getpid()))
    train(STEPS)
    """)
    assert result.outcome == "completed", result.reason


# -- ranks that do not end together ----------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["meet", pytest.param("end", marks=pytest.mark.long)])
def test_ranks_with_different_numbers_of_batches_are_measured_in_the_steps_that_all_have(trials, then):
    result = trials.run(
        "uneven.py", "--then", then, slots=2, window=UNTIL_THE_END, patience_s=PATIENCE_S, zero={"stage": 1}
    )
    assert result.outcome == "completed", result.reason
    assert result.metrics["measured_steps"] == 8
    assert "rank 0 had 11 micro-batches; rank 1 had 10 micro-batches." in result.note


@pytest.mark.long
@pytest.mark.parametrize("starter", ["warm", "cold"])
def test_too_few_steps_in_common_are_out_of_data_and_the_ranks_are_named(trials, starter):
    options = {"slots": 2, "window": UNTIL_THE_END, "patience_s": PATIENCE_S, "deadline_s": 300}
    result = trials.run("uneven.py", "--rank_1", "3", starter=starter, **options)
    assert result.outcome == "out_of_data", result.reason
    assert "rank 1 had 3 micro-batches and waits in all_reduce at uneven.py:14" in result.reason


@pytest.mark.long
def test_ranks_that_wait_in_different_collectives_are_told_of_with_their_lines(trials):
    result = trials.run("stands_still.py", slots=2, window=UNTIL_THE_END, patience_s=PATIENCE_S, deadline_s=300)
    assert result.outcome == "timed_out"
    assert "rank 0 waits in all_reduce at stands_still.py:28" in result.reason
    assert "rank 1 waits in barrier at stands_still.py:30" in result.reason


@pytest.mark.long
def test_a_rank_that_nobody_starts_is_told_of_long_before_the_deadline(trials):
    result = trials.run("stands_still.py", "--how", "alone", patience_s=PATIENCE_S, deadline_s=300)
    assert result.outcome == "timed_out"
    assert "waits for ranks that do not exist" in result.reason
    assert "waits in TCPStore at stands_still.py:14" in result.reason


@pytest.mark.long
@pytest.mark.parametrize("how", ["prepares", "sleeps"])
def test_a_wait_for_a_rank_that_does_something_is_none_for_ever(trials, how):
    result = trials.run(
        "stands_still.py", "--how", how, "--seconds", "12", slots=2, window=StepWindow(1, 2), patience_s=3.0
    )
    assert result.outcome == "completed", result.reason


STEPS_BY_ITSELF = """
from torch.optim.lr_scheduler import LambdaLR
config = {{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {{"stage": {stage}}}}}
config["zero_allow_untested_optimizer"] = True
own = torch.nn.Linear(4, 1)
passed = torch.optim.SGD(own.parameters(), lr=0.1)
before = LambdaLR(passed, lambda step: 1.0)
engine, returned, *_ = deepspeed.initialize(config=config, model=own, optimizer=passed)
after = LambdaLR(passed, lambda step: 1.0)
"""


@pytest.mark.parametrize(
    ("optimizer", "stage"),
    [
        ("passed", 2),
        ("returned", 0),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("passed", 0), ("returned", 2))),
    ],
)
def test_a_program_that_steps_an_optimizer_and_not_the_engine_is_told_so_at_once(ends, stage, optimizer):
    lines = f"""
while True:
    engine.backward(engine(torch.ones(2, 4)).sum())
    {optimizer}.step()
    {optimizer}.zero_grad()
"""
    result = ends(STEPS_BY_ITSELF.format(stage=stage) + lines, steps=0)
    assert result.outcome == "crashed"
    assert "The program steps its optimizer, and not DeepSpeed's engine." in result.reason


def test_engines_that_share_an_optimizer_step_it(ends):
    lines = """
import warnings
warnings.simplefilter("error", UserWarning)
engine, *_ = deepspeed.initialize(config=config, model=own, optimizer=passed)
for _ in range(9):
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    before.step()
"""
    result = ends(STEPS_BY_ITSELF.format(stage=0) + lines, steps=0)
    assert "steps its optimizer" not in result.reason
    assert "lr_scheduler" not in result.reason


@pytest.mark.parametrize("end", ["\\n", pytest.param("", marks=pytest.mark.long)])
def test_the_log_of_a_rank_that_prints_without_end_is_bounded(ends, end):
    lines = f"""
    print("its first words")
    for _ in range(200):
        sys.stdout.write("x" * (2**20 - 1) + "{end}")
    train(STEPS)
    raise ValueError("y" * 10**8)
    """
    result = ends(lines, steps=1)
    assert result.outcome == "crashed"
    assert result.reason.startswith("The program raised ValueError: yyyyy")
    log = Path(result.logs[0])
    assert log.stat().st_size <= watchdog.MOST_LOG_BYTES
    text = log.read_text(errors="replace")
    assert "its first words" in text
    assert "[ZeroTune has left out " in text
    assert text.rstrip().endswith("y")
    assert sum(file.stat().st_size for file in log.parent.iterdir()) < watchdog.MOST_LOG_BYTES + 2**20
