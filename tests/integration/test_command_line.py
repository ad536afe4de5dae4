"""What the command says to input that it cannot use, and what its help says."""

import os
from pathlib import Path

import pytest
from case_fixtures import quick_first, quick_only
from study_fixtures import Zerotune, run_here

MAX_CPU_S = 2.0  # of a refusal; on an idle machine it is its wall time

# One refusal each: what is edited (file, old, new), the options, and what the message names: the place, the remedy.
EDITS = {
    "yaml": ("experiment.yaml", "resources:", "resources: [", ["experiment.yaml:7:18:", "Mend the YAML there."]),
    "key": ("experiment.yaml", "slots_per_trial", "slots_per_trail", ["experiment.yaml:6", "slots_per_trial"]),
    "type": ("experiment.yaml", "slots_per_trial: 1", "slots_per_trial: two", ["experiment.yaml:6", "slots_per_trial"]),
    "other config": (
        "experiment.yaml",
        "--deepspeed_config ds_config.json",
        "--deepspeed_config other.json",
        ["experiment.yaml:2", "other.json", "Name the same file in both places."],
    ),
    "slots": (
        "experiment.yaml",
        "slots_per_trial: 1",
        "slots_per_trial: 4096",
        ["experiment.yaml", "4096", "Set resources.slots_per_trial to at most"],
    ),
    "entrypoint": ("experiment.yaml", "train.py", "trian.py", ["experiment.yaml:2", "trian.py", "Name a script"]),
    "json": ("model/ds_config.json", '"optimizer":', '"optimizer"', ["ds_config.json:3:", "experiment.yaml:4"]),
}
OPTIONS = {
    "one trial": (["-mt", "1"], ["--max-trials", "Allow at least 2."]),
    "no trial": (["-mt", "0"], ["--max-trials", "greater than 0"]),
    "metric": (["-m", "speed"], ["--metric", "speed", "throughput"]),
    "stage": (["-z", "1", "7"], ["--zero-stages", "7", "0<=x<=3"]),
    "include": (["-i", "none.py"], ["--include none.py", "Name an existing file or folder."]),
    "max slots": (["-ms", "4096"], ["--max-slots", "4096", "Leave it out"]),
    "window": (["--start-profile-step", "9"], ["start_profile_step(9)", "zerotune asha --help"]),
    "setting": (["--divisor", "1"], ["--divisor", "greater than or equal to 2"]),
}

# One refusal each of `tune` and `micro-batch`: what follows the command's name, and what the message names.
TYPED = {
    "no command": ("", ["There is no `--` with a command behind it", "-- deepspeed train.py"]),
    "nothing behind": ("--", ["Nothing follows `--`"]),
    "forgotten dashes": ("deepspeed --num_gpus 1 train.py", ["There is no `--`"]),
    "script": ("-- deepspeed trian.py", ["the command: the script trian.py is not in"]),
    "program": ("-- brush run.sh", ["the command: brush is not found"]),
    "launcher option": ("-- deepspeed --num_gpsu 1 train.py", ["--num_gpsu", "Did you mean --num_gpus?"]),
    "nodes": ("-- torchrun --nnodes 2 train.py", ["--nnodes 2 asks for several nodes"]),
    "slots": ("-- deepspeed --num_gpus 4096 train.py", ["it starts 4096 ranks", "Ask the launcher for fewer."]),
    "config": ("-- python train.py --deepspeed none.json", ["none.json does not exist", "Name an existing JSON file"]),
    "map place": ("--map train_batch_size=argv:4 -- python train.py 1 2", ["argv:4", "where 2 stand", "Count them"]),
    "map key": ("--map batch=--b -- python train.py", ["--map batch=--b", 'the key "batch" cannot be mapped']),
    "map target": (
        "--map train_batch_size=9 -- python train.py",
        ["--map train_batch_size=9", "is no place in"],
    ),
    "trials": ("--max-trials 1 -- python train.py", ["--max-trials", "Allow at least 2."]),
    "flag": ("--no-such-flag -- python train.py", ["No such option", "--no-such-flag"]),
}


@pytest.fixture
def zerotune(tmp_path: Path) -> Zerotune:
    return Zerotune(tmp_path, tmp_path / "unused-home")


def contents(zerotune: Zerotune) -> set[str]:
    """Returns what stands in the working folder, but for what this test redirects there."""
    files = (file for file in zerotune.folder.rglob("*") if file.suffix not in (".out", ".err"))
    return {str(file.relative_to(zerotune.folder)) for file in files}


def refusal(zerotune: Zerotune, *arguments: str | Path) -> str:
    """Runs the command in this process, checks that it refuses as it should, and returns its message."""
    before = contents(zerotune)
    ended = run_here(zerotune.folder, *zerotune.words(*arguments), XDG_DATA_HOME=zerotune.environment["XDG_DATA_HOME"])
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert len([line for line in ended.stderr.splitlines() if line.startswith(("zerotune: ", "Error: "))]) == 1
    assert contents(zerotune) == before
    return ended.stderr


@pytest.mark.parametrize("case", quick_only(("yaml", "key", "json"), EDITS))
def test_a_mistake_in_a_file_is_told_with_its_place_and_its_remedy(zerotune: Zerotune, case: str) -> None:
    name, old, new, said = EDITS[case]
    file = zerotune.folder / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    message = refusal(zerotune, "asha")
    for words in said:
        assert words in message, message


@pytest.mark.parametrize("case", quick_only(("one trial", "metric", "window"), OPTIONS))
def test_a_mistake_in_a_flag_is_told_with_its_name_and_its_remedy(zerotune: Zerotune, case: str) -> None:
    options, said = OPTIONS[case]
    message = refusal(zerotune, "asha", *options)
    for words in said:
        assert words in message, message


@pytest.mark.parametrize("command", ["tune", pytest.param("micro-batch", marks=pytest.mark.long)])
@pytest.mark.parametrize("case", quick_only(("no command", "script", "launcher option", "map target", "flag"), TYPED))
def test_a_mistake_in_a_command_is_told_with_its_place_and_its_remedy(
    zerotune: Zerotune, command: str, case: str
) -> None:
    words, said = TYPED[case]
    zerotune.folder = zerotune.model
    message = refusal(zerotune, command, *words.split())
    for part in said:
        assert part in message, message


def test_a_method_that_there_is_not_is_told(zerotune: Zerotune) -> None:
    message = refusal(zerotune, "tune", "--method", "magic", "--", "python", "train.py")
    assert "'magic' is not one of 'adaptive', 'asha', 'binary', 'random'" in message


def test_a_yaml_or_a_model_directory_that_does_not_exist_is_told(zerotune: Zerotune) -> None:
    zerotune.config = zerotune.folder / "none.yaml"
    assert "none.yaml: the file does not exist." in refusal(zerotune, "binary")
    zerotune.config, zerotune.model = zerotune.folder / "experiment.yaml", zerotune.folder / "none"
    assert "none: the model directory does not exist." in refusal(zerotune, "random")


def test_a_working_folder_that_cannot_hold_studies_is_told(zerotune: Zerotune) -> None:
    (zerotune.folder / "zerotune-studies").touch()
    message = refusal(zerotune, "asha")
    assert "zerotune-studies" in message
    assert "Run zerotune in a folder that you may write to." in message


def test_a_folder_that_is_no_study_cannot_be_resumed(zerotune: Zerotune) -> None:
    message = refusal(zerotune, "resume", zerotune.model)
    assert f"{zerotune.model}: this is not a study's folder: it has no study.json." in message


@pytest.mark.parametrize("typed", [("asha",), ("tune", "--", "deepspeed", "trian.py")], ids=["asha", "tune"])
def test_a_process_that_refuses_takes_no_time_and_leaves_nothing(zerotune: Zerotune, typed: tuple[str, ...]) -> None:
    zerotune.write_config(slots=4096)
    before, cpu_before = contents(zerotune), os.times()
    ended = zerotune.run(*typed, PYTHONPROFILEIMPORTTIME="1")
    cpu = os.times()
    assert (ended.returncode, ended.stdout) == (2, "")
    imports = [line for line in ended.stderr.splitlines() if line.startswith("import time")]
    assert len([line for line in ended.stderr.splitlines() if line not in imports]) == 1
    imported = {line.rpartition("|")[2].strip() for line in imports}
    assert "pydantic" in imported
    assert not {"torch", "deepspeed", "prefect", "mlflow"} & imported
    assert contents(zerotune) == before
    assert cpu.children_user + cpu.children_system - cpu_before.children_user - cpu_before.children_system < MAX_CPU_S


@pytest.mark.parametrize(
    ("method", "flags"),
    quick_first(
        1,
        [
            (
                "asha",
                {
                    "--max-rungs": "5",
                    "--min-binary-search-trials": "3",
                    "--asha-early-stopping": "0",
                    "--divisor": "2",
                    "--search-range-factor": "1.0",
                },
            ),
            ("binary", {"--search-range-factor": "1.0"}),
            ("random", {"--trials-per-random-config": "5", "--early-stopping": "never"}),
        ],
    ),
)
def test_help_lists_dsats_flags_with_defaults_and_units(method: str, flags: dict[str, str], tmp_path: Path) -> None:
    text = " ".join(run_here(tmp_path, method, "--help").stdout.split())
    common = {
        "-i, --include": "",
        "-mt, --max-trials": "50",
        "-ms, --max-slots": "all of this host",
        "-mct, --max-concurrent-trials": "16",
        "-m, --metric": "FLOPS_per_gpu",
        "--run-full-experiment": "",
        "-z, --zero-stages": "1 2 3",
        "--start-profile-step": "3",
        "--end-profile-step": "5",
        "-r, --random-seed": "42",
        "--max-search-runner-restarts": "5",
    }
    for flag, default in {**common, **flags}.items():
        assert flag in text
        after = text.split(f"{flag} ", 1)[1]
        assert not default or f"[default: {default}" in after.split(" --", 1)[0], flag
    for unit in ("FLOPS_per_gpu in FLOP/s", "throughput in samples/s", "latency in s"):
        assert unit in text


def test_a_configured_prefect_server_that_does_not_answer_is_told(zerotune: Zerotune) -> None:
    ended = zerotune.run("asha", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert ended.returncode == 1
    assert "PREFECT_API_URL: the Prefect server http://127.0.0.1:9/api" in ended.stderr
    assert "Traceback" not in ended.stderr
