"""Studies that vary switches of the program: its trials run with them, and so does the training that follows."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from device_fixtures import TRAINER_FLAGS
from study_fixtures import TINY, Zerotune
from switched_fixtures import COMMAND, SHOWN, SWITCHED, ran_with, switched_with

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome

pytestmark = pytest.mark.alone


@pytest.fixture
def zerotune(tmp_path: Path, home: Path, server: PrefectServer, empty_store: Path) -> Zerotune:
    return switched_with(server, empty_store, tmp_path, home)


def tune(zerotune: Zerotune, *words: str, typed: tuple[str, ...] = (), trials: int = 6) -> dict[str, Any]:
    options = ("--json", "-z", "1", "--max-trials", str(trials), "--max-micro-batch", "8", "-m", "throughput")
    ended = zerotune.run("tune", *options, *words, "--", *COMMAND, *typed, timeout=600)
    assert ended.returncode == 0, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


@pytest.mark.long
def test_a_switch_that_costs_time_is_found_and_left_out_of_the_command(zerotune: Zerotune) -> None:
    document = tune(zerotune, "--vary", "--twice=true,false", typed=("--twice",), trials=4)
    study = zerotune.study
    had = ran_with(study, {"--twice": "True"})
    assert {each["--twice"] for each in had} == {"True", "False"}
    assert document["best"]["knobs"]["program"]["--twice"] is False
    assert document["gain_interval"][0] > 1
    assert "--twice" not in document["command"]
    assert "no --twice" in study.record["finding"]
    assert not json.loads(study.paths.best_ds_config.read_text()).keys() & {"program"}
    assert study.record["switches"] == {"--twice": True}


@pytest.mark.long
def test_a_switch_that_does_nothing_is_left_as_typed_or_said_to_be_worth_nothing_for_sure(zerotune: Zerotune) -> None:
    """On two ranks. A step sleeps most of its time. On a busy machine the readings may vary too much for a drop."""
    shutil.copytree(TINY, zerotune.folder, dirs_exist_ok=True)
    typed = (*COMMAND[:2], "2", *COMMAND[3:], "--num_steps", "400", "--step_seconds", "0.05", "--start_seconds", "0")
    vary = ("--vary", "--step_seconds=0.05,0.02", "--vary", "--start_seconds={values: [0.01, 0.02], coarse: false}")
    options = ("--json", "-z", "1", "--max-trials", "4", "--max-micro-batch", "2", "-m", "throughput")
    ended = zerotune.run("tune", *options, *vary, "--", *typed, timeout=300)
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["gain_interval"][0] > 1
    finding, command = document["confirmation"], Path(zerotune.study.paths.best_command).read_text()
    assert "--step_seconds 0.02" in command
    (idle,) = (worth for worth in finding["worths"] if "--start_seconds" in worth["knobs"])
    if idle["verdict"] == "dropped":
        assert "--start_seconds 0" in command
    elif idle["verdict"] == "untried":
        assert "its reading varies by" in finding["unweighed"]
    else:
        assert idle["without"]["high"] >= 1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_kind_of_place_is_varied_and_the_answer_runs_as_the_trials_did(zerotune: Zerotune) -> None:
    typed = "model:\n  loops: 3  # three times as much\n"
    (zerotune.folder / "train.yaml").write_text(typed)
    vary = {
        "train.yaml:model.loops": "1,3",
        "model.layers": "{values: [1, 2], changes_mathematics: true}",
        "OWN": ",b",
        # Its library reads it when it is imported, so a fork of one that has imported it would not see it.
        "OMP_NUM_THREADS": "{values: [1, 2], coarse: true}",
    }
    words = [word for place, values in vary.items() for word in ("--vary", f"{place}={values}")]
    document = tune(zerotune, *words, typed=("--config", "train.yaml", "--twice"), trials=10)
    study = zerotune.study
    had = ran_with(study, {"train.yaml:model.loops": "3", "--twice": "True"})
    assert {each["train.yaml:model.loops"] for each in had} == {"1", "3"}
    assert {each["model.layers"] for each in had} == {"1", "2"}
    assert {each["OMP_NUM_THREADS"] for each in had} == {"1", "2"}
    assert document["best"]["knobs"]["program"]["train.yaml:model.loops"] == 1
    assert (zerotune.folder / "train.yaml").read_text() == typed
    best = next(each for each in study.results.values() if each.number == document["best"]["trial"])
    expected = SHOWN.search(Path(best.logs[0]).read_text())
    assert expected is not None
    plain = subprocess.run(
        ["sh", study.paths.best_command], cwd=zerotune.folder, env=zerotune.environment, capture_output=True, text=True
    )
    assert expected[0] in plain.stdout, plain.stderr[-2000:]
    experiment, config = study.paths.best_experiment, study.paths.best_ds_config
    trained = zerotune.run("train", experiment, zerotune.folder, "--ds-config", config, timeout=300)
    assert trained.returncode == 0, trained.stderr
    (log,) = zerotune.folder.glob("zerotune-experiments/*/rank0.log")
    assert expected[0] in log.read_text()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_value_that_the_program_refuses_costs_its_trials_and_is_told(zerotune: Zerotune) -> None:
    tune(zerotune, "--vary", "model.layers=1,none", trials=7)
    searched = [result for result in zerotune.study.results.values() if result.purpose is Purpose.SEARCH]
    refused = [result for result in searched if result.outcome is Outcome.CRASHED]
    assert refused
    assert all("invalid literal for int() with base 10: 'none'" in result.reason for result in refused)
    assert any(result.outcome is Outcome.COMPLETED for result in searched)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_switches_of_a_trainer_are_turned_and_their_defaults_are_known(zerotune: Zerotune) -> None:
    """The Trainer turns `--gradient_checkpointing` into a call of the model, which has it in every trial or has not."""
    for name in ("trainer_switches.py", "model.py", "ds_auto.json"):
        shutil.copy(SWITCHED.parent / "any" / name, zerotune.folder)
    command = ("trainer_switches.py", "--deepspeed", "ds_auto.json", "--output_dir", "out", "--max_steps", "200")
    vary = ("--vary", "--gradient_checkpointing=true,false", "--vary", "--attn_implementation=sdpa,eager")
    options = ("--json", "-z", "1", "--max-trials", "7", "--max-micro-batch", "8", "-m", "throughput", *vary)
    typed = ("deepspeed", "--num_gpus", "1", *command, "--report_to", "none", *TRAINER_FLAGS)
    ended = zerotune.run("tune", *options, "--", *typed, timeout=800)
    assert ended.returncode == 0, ended.stderr
    study = zerotune.study
    # The flag has no default of its own in newer versions, which is off as well.
    base = json.loads(study.paths.trial(0).result.read_text())["program"]["switches"]
    assert (base["--attn_implementation"], base.get("--gradient_checkpointing", False)) == ("sdpa", False)
    seen = set()
    for number, result in study.results.items():
        shown = re.search(r"checkpointing (\w+) attention (\w+)", Path(result.logs[0]).read_text())
        if result.outcome not in (Outcome.COMPLETED, Outcome.TOO_SLOW) or shown is None:
            continue
        knobs = json.loads(study.paths.trial(number).candidate.read_text())["knobs"].get("program", {})
        had = (shown[1] == "True", shown[2])
        assert had == (knobs.get("--gradient_checkpointing", False), knobs.get("--attn_implementation", "sdpa"))
        seen.add(had)
    assert {checkpoints for checkpoints, _ in seen} == {True, False}
    assert {attention for _, attention in seen} == {"sdpa", "eager"}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_option_that_is_on_by_default_is_told_with_the_remedy(zerotune: Zerotune) -> None:
    text = (zerotune.folder / "train.py").read_text()
    twice = 'parser.add_argument("--twice"'
    pin = 'parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True)'
    (zerotune.folder / "train.py").write_text(text.replace(twice, f"{pin}\n{twice}"))
    ended = zerotune.run("tune", "--max-trials", "3", "--vary", "--pin=true,false", "--", *COMMAND, timeout=250)
    assert ended.returncode == 2, ended.stderr
    assert "your program's default of this option is true" in ended.stderr


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("vary", "said"),
    [
        ("--kernel=relu,none", "--vary --kernel: your program refuses a value of --kernel: argument --kernel: invalid"),
        ("--kernels=relu,gelu", "--vary --kernels: your program has no option --kernels, and --kernel is the nearest"),
    ],
)
def test_what_the_programs_own_parser_refuses_ends_the_study_after_its_profile_trial(
    zerotune: Zerotune, vary: str, said: str
) -> None:
    ended = zerotune.run("tune", "--max-trials", "3", "--vary", vary, "--", *COMMAND, timeout=250)
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr
    assert "InputError" not in ended.stderr
    assert not any(result.purpose is Purpose.SEARCH for result in zerotune.study.results.values())
