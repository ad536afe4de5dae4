"""Programs as people write them, each in a trial: however they call DeepSpeed, and whatever they do beside it."""

import base64
import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from case_fixtures import quick_first
from conftest import PROGRAMS

from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Purpose

SHORT = StepWindow(start_step=2, end_step=3, max_steps=2)
PROFILE = {"purpose": Purpose.PROFILE, "micro_batch": 1, "window": StepWindow(1, 1, max_steps=1)}

OWN = {
    "train_micro_batch_size_per_gpu": 5,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}

TRAIN = """
import argparse, base64, json, os, sys, threading
import deepspeed, torch

OWN = json.load(open("own.json"))
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args, others = deepspeed.add_config_arguments(parser).parse_known_args()
model = torch.nn.Linear(4, 1)
weights = model.parameters()
{build}
def train(steps=1000):
    for _ in range(steps):
        engine.backward(engine(torch.ones({size}, 4)).sum())
        engine.step()
{body}
"""
BUILD = "engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=weights)"


@pytest.fixture
def run(trials, tmp_path):
    """Runs a program made of the parts above, in a folder of its own."""

    def run(build=BUILD, body="train()", size="engine.train_micro_batch_size_per_gpu()", arguments=(), **options):
        folder = tmp_path / "program"
        folder.mkdir(exist_ok=True)
        (folder / "own.json").write_text(json.dumps(OWN))
        body = textwrap.dedent(body)
        (folder / "train.py").write_text(TRAIN.format(build=textwrap.dedent(build), body=body, size=size))
        options = {"window": SHORT, "micro_batch": 3, "model_dir": folder, **options}
        if options.pop("config_in_code", False):
            options["config_flag"] = "--something"
        return trials.run("train.py", *arguments, **options)

    return run


# -- however DeepSpeed is called -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "deepspeed.initialize(model=model, model_parameters=weights, config=OWN)",
        "deepspeed.initialize(None, model, None, weights, None, None, 29500, None, None, None, OWN)",
        "deepspeed.initialize(argparse.Namespace(deepspeed_config='own.json'), model, model_parameters=weights)",
        *(
            pytest.param(f"deepspeed.initialize({arguments})", marks=pytest.mark.long)
            for arguments in (
                "model=model, model_parameters=weights, config='own.json'",
                "model=model, model_parameters=weights, config_params=OWN",
                "model=model, model_parameters=weights, config_params='own.json'",
                "argparse.Namespace(deepscale_config='own.json'), model, model_parameters=weights",
                "model=model, model_parameters=weights, config=base64.urlsafe_b64encode("
                "json.dumps(OWN).encode()).decode()",
            )
        ),
    ],
)
def test_the_candidate_arrives_wherever_the_code_has_its_configuration(run, call):
    result = run(build=f"engine, *_ = {call}", config_in_code=True)
    assert result.outcome == "completed", result.reason
    assert result.micro_batch_arrived == 3


def test_the_candidate_arrives_by_a_name_that_the_code_has_imported(run):
    build = (
        "from deepspeed import initialize as init\nengine, *_ = init(model=model, config=OWN, model_parameters=weights)"
    )
    assert run(build=build, config_in_code=True).micro_batch_arrived == 3


def test_a_dictionary_of_the_code_follows_the_candidate(run):
    build = "engine, *_ = deepspeed.initialize(model=model, model_parameters=weights, config=OWN)"
    result = run(build=build, config_in_code=True, size="OWN['train_micro_batch_size_per_gpu']")
    assert result.outcome == "completed", result.reason


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 2)), 3])
def test_an_engine_that_does_not_train_keeps_its_configuration_and_the_students_batch_counts(trials, stage):
    result = trials.run("distills.py", slots=2, zero={"stage": stage}, **{**PROFILE, "micro_batch": 3})
    assert result.outcome == "completed", result.reason
    assert result.micro_batch_arrived == 3
    assert result.program.ds_config["train_micro_batch_size_per_gpu"] == 3
    log = trials.log(result)
    assert "teacher: stage 0, micro-batch 1" in log
    assert f"student: stage {stage}" in log


def test_a_program_without_an_optimizer_is_told_so(run):
    build = "engine, *_ = deepspeed.initialize(model=model, config={'train_micro_batch_size_per_gpu': 3})"
    result = run(build=build, body="", config_in_code=True)
    assert "None of the program's DeepSpeed engines has an optimizer" in result.reason


def test_every_engine_that_trains_follows_the_candidate(run):
    build = f"""
    other = torch.nn.Linear(4, 1)
    second, *_ = deepspeed.initialize(model=other, model_parameters=other.parameters(), config=OWN)
    {BUILD}
    """
    body = """
    print("second", second.train_micro_batch_size_per_gpu(), flush=True)
    train()
    """
    result = run(build=build, body=body)
    assert result.outcome == "completed", result.reason
    assert "second 3" in Path(result.logs[0]).read_text()


def test_a_short_phase_before_another_engine_trains_is_told_as_what_it_is(run):
    body = """
        train(2)
        other = torch.nn.Linear(4, 1)
        engine, *_ = deepspeed.initialize(args=args, model=other, model_parameters=other.parameters())
        train(6)
    """
    result = run(body=body, window=StepWindow(start_step=3, end_step=5, max_steps=3))
    assert result.outcome == "out_of_data"
    assert "The program ended after 2 optimizer steps" in result.reason
    assert "other engines have taken 6 optimizer steps" in result.reason


def test_the_profile_trial_finds_the_configuration_in_the_code(run):
    config = {**OWN, "zero_optimization": {"stage": 2}, "wandb": {"enabled": False}}
    build = f"engine, *_ = deepspeed.initialize(model=model, model_parameters=weights, config={config})"
    result = run(build=build, config_in_code=True, **PROFILE)
    assert result.outcome == "completed", result.reason
    assert result.program.ds_config == config


def test_what_deepspeed_would_write_elsewhere_is_off_in_a_trial(run, tmp_path):
    monitors = {"tensorboard": {"enabled": True, "output_path": "tb"}, "csv_monitor": {"enabled": True}}
    build = f"engine, *_ = deepspeed.initialize(model=model, model_parameters=weights, config={{**OWN, **{monitors}}})"
    assert run(build=build, config_in_code=True).outcome == "completed"
    assert sorted(path.name for path in (tmp_path / "program").iterdir()) == ["own.json", "train.py"]


def test_what_deepspeed_refuses_it_refuses_in_its_own_words(run):
    build = "deepspeed.initialize(model=model, model_parameters=weights, config='missing_file.json')"
    assert "missing_file.json" in run(build=build).reason
    assert "unexpected keyword argument 'modell'" in run(build="deepspeed.initialize(modell=model)").reason


# -- whatever a program does beside it -------------------------------------------------------------------------------


BODIES = {
    "catches SystemExit": "try:\n    train()\nexcept SystemExit:\n    train()",
    "catches everything": "while True:\n    try:\n        train()\n    except BaseException:\n        pass",
    "trains in a thread": "threading.Thread(target=train).start()",
    "ignores signals": (
        "import signal\nfor number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):\n"
        "    signal.signal(number, signal.SIG_IGN)\ntrain()"
    ),
    "has an alarm": (
        "import signal\ndef ring(*_):\n    raise RuntimeError('rung')\nsignal.signal(signal.SIGALRM, ring)\n"
        "try:\n    signal.setitimer(signal.ITIMER_REAL, 30)\n    train()\nexcept RuntimeError:\n    pass"
    ),
    "changes its folder": "os.chdir('/')\ntrain()",
    "closes its output": "sys.stdout.close()\nsys.stderr.close()\ntrain()",
    "closes its descriptor": "os.close(1)\nsys.stdout = None\ntrain()",
    "sleeps at exit": "import atexit, time\natexit.register(time.sleep, 1000)\ntrain()",
    "leaves a thread": "threading.Thread(target=__import__('time').sleep, args=(1000,)).start()\ntrain()",
    "ends by itself": "train(10)",
}
QUICK = ("catches everything", "trains in a thread", "ignores signals", "closes its descriptor", "leaves a thread")


@pytest.mark.parametrize(
    "body", [body if body in QUICK else pytest.param(body, marks=pytest.mark.long) for body in BODIES]
)
def test_a_trial_ends_with_its_measurement_whatever_the_program_does(run, body):
    result = run(body=BODIES[body], deadline_s=60)
    assert result.outcome == "completed", result.reason


@pytest.mark.parametrize(
    "ends",
    [
        "raise ValueError('in a child')",
        *(pytest.param(how, marks=pytest.mark.long) for how in ("return", "sys.exit(3)", "os._exit(4)")),
    ],
)
def test_a_forked_child_is_not_the_rank(run, ends, trials):
    body = f"""
    train(2)
    def child():
        {ends}
    pid = os.fork()
    if pid == 0:
        child()
    else:
        print("status", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        train()
    """
    result = run(body=body, window=StepWindow(start_step=4, end_step=6, max_steps=3))
    assert result.outcome == "completed", result.reason
    status = {"return": 0, "os._exit(4)": 4, "sys.exit(3)": 3}.get(ends, 1)
    assert f"status {status}" in trials.log(result)
    assert ("ValueError: in a child" in trials.log(result)) == ends.startswith("raise")


@pytest.mark.long
def test_workers_of_a_data_loader_are_not_the_rank(run):
    body = """
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 10_000
        def __getitem__(self, index):
            return torch.ones(4)
    for epoch in range(1000):
        loader = torch.utils.data.DataLoader(Data(), batch_size=engine.train_micro_batch_size_per_gpu(), num_workers=2)
        for number, batch in enumerate(loader):
            engine.backward(engine(batch).sum())
            engine.step()
            if number == 1:
                break
    """
    result = run(body=body, window=StepWindow(start_step=3, end_step=7, max_steps=5))
    assert result.outcome == "completed", result.reason


def test_hundreds_of_megabytes_of_output_hold_nothing_up(run, trials):
    body = """
    line = "x" * 9_999 + "\\n"
    for _ in range(20_000):
        sys.stdout.write(line)
    train()
    """
    result = run(body=body)
    assert result.outcome == "completed", result.reason
    log = Path(result.logs[0])
    assert log.stat().st_size < 40_000_000


def test_a_program_reads_itself_in_its_globals_as_under_python(run, trials):
    body = """
    import pickle
    class Own:
        pass
    print("main", __name__, __file__ == os.path.join(os.getcwd(), "train.py"), __spec__, sys.argv[0])
    assert isinstance(pickle.loads(pickle.dumps(Own())), Own)
    train()
    """
    result = run(body=body)
    assert "main __main__ True None train.py" in trials.log(result), result.reason


# -- programs that fail ----------------------------------------------------------------------------------------------


def failure(result):
    return json.loads(Path(result.logs[0]).with_name("rank0.failure.json").read_text())


def test_a_program_that_fails_leaves_the_traceback_of_plain_python(trials, tmp_path):
    (tmp_path / "helper.py").write_text("def work():\n    raise KeyError('labels')\n")
    script = """
    import helper
    try:
        helper.work()
    except KeyError as error:
        raise ValueError("bad") from error
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    plain = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True).stderr
    result = trials.run("train.py", model_dir=tmp_path)
    assert result.outcome == "crashed"
    assert "The program raised ValueError: bad" in result.reason
    assert plain.count("Traceback") == 2
    assert failure(result)["traceback"] == plain
    assert trials.log(result) == plain
    assert failure(result)["engine_built"] is False


def test_a_traceback_has_no_frame_of_ours_in_the_middle(run):
    class_ = "class Bad(torch.nn.Linear):\n    def forward(self, x):\n        raise OSError('no such tensor')\n"
    result = run(build=f"{class_}model = Bad(4, 1)\nweights = model.parameters()\n{BUILD}")
    trace = failure(result)["traceback"]
    assert "trial_lib" not in trace
    assert "runpy" not in trace
    assert "in train" in trace
    assert "in forward" in trace
    assert failure(result)["engine_built"] is True
    refused = run(build="deepspeed.initialize(modell=model)")
    assert "trial_lib" not in failure(refused)["traceback"]


def test_a_mistake_in_a_module_is_shown_as_python_shows_it(run, tmp_path):
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "broken.py").write_text("def f(:\n    pass\n")
    trace = failure(run(build="import broken"))["traceback"]
    assert trace.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}/program/train.py", line 11')
    assert "importlib" not in trace
    assert trace.count("File") == 2


def test_a_wrong_flag_is_named_by_the_programs_own_words(run):
    build = "parser.parse_args(['--bach-size', '3'])"
    result = run(build=build)
    assert result.outcome == "crashed"
    assert "unrecognized arguments: --bach-size 3" in result.reason


@pytest.mark.long
def test_a_program_without_a_deepspeed_call_is_told_so_when_its_time_is_over(run):
    result = run(build="print('waiting for the licence', flush=True)\n__import__('time').sleep(600)", deadline_s=8)
    assert result.outcome == "timed_out"
    assert "no DeepSpeed engine after 8 s" in result.reason
    assert "waiting for the licence" in result.reason


# -- the batch that arrives ------------------------------------------------------------------------------------------


def test_a_flag_that_sets_the_batch_is_found_in_the_profile_trial(run):
    for arguments in (["--epochs", "7", "--train-batch", "7"], ["--train-batch=7"]):
        result = run(size="7", arguments=arguments, **PROFILE)
        assert result.outcome == "invalid"
        assert "--map train_micro_batch_size_per_gpu=--train-batch " in result.reason
        assert "arg_mappings: {train_micro_batch_size_per_gpu: --train-batch}" in result.reason


def test_a_variable_that_sets_the_batch_is_found_in_the_profile_trial(run, monkeypatch):
    monkeypatch.setenv("BATCH_SIZE", "7")
    result = run(size="int(os.environ['BATCH_SIZE'])", **PROFILE)
    assert "--map train_micro_batch_size_per_gpu=BATCH_SIZE " in result.reason


def test_a_file_that_the_code_reads_by_its_name_is_found_in_the_profile_trial(run):
    result = run(size="OWN['train_micro_batch_size_per_gpu']", **PROFILE)
    assert "own.json has train_micro_batch_size_per_gpu 5" in result.reason


def test_a_size_in_the_code_is_to_be_read_from_the_engine(run):
    config = {**OWN, "train_micro_batch_size_per_gpu": 9}
    build = f"engine, *_ = deepspeed.initialize(model=model, model_parameters=weights, config={config})"
    result = run(build=build, size="9", config_in_code=True, **PROFILE)
    assert "The configuration in the code has train_micro_batch_size_per_gpu 9" in result.reason
    assert "engine.train_micro_batch_size_per_gpu()" in result.reason


def test_encoded_json_reaches_the_engine_from_the_command_line(trials):
    text = base64.urlsafe_b64encode(json.dumps(OWN).encode()).decode()
    result = trials.run("plain.py", "--deepspeed_config", text, window=SHORT)
    assert result.outcome == "completed", result.reason


@pytest.mark.parametrize(
    ("name", "arguments", "variables"),
    quick_first(
        3,
        [
            ("raw_engine.py", [], {}),
            ("raw_json.py", [], {}),
            ("raw_flag.py", ["--batch-size", "3"], {}),
            ("raw_environment.py", [], {"BATCH_SIZE": "3"}),
            ("raw_dict.py", None, {}),
        ],
    ),
)
def test_a_raw_program_follows_the_candidate_as_it_is(trials, name, arguments, variables):
    plan = trials.plan(
        name,
        *(arguments or []),
        micro_batch=3,
        accumulation=2,
        slots=2,
        window=SHORT,
        model_dir=PROGRAMS / "any",
        environment={**os.environ, **variables},
        local_rank_option="--local_rank",
    )
    if arguments is None:
        # It knows no file of a configuration.
        plan = dataclasses.replace(plan, program=dataclasses.replace(plan.program, arguments=[]))
    result = trials.start(plan).result()
    assert result.outcome == "completed", (result.reason, trials.log(result))
    assert result.micro_batch_arrived == 3
    assert result.metrics["throughput"] * result.metrics["latency"] == pytest.approx(3 * 2 * 2)
