"""The answer of a study whose command a wrapper starts: the user's own words, if they train with the winner."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from study_setups import setup_of

from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.messages.measurement import ProgramProfile
from zerotune.trial_lib.study import followed as follow
from zerotune.trial_lib.study.followed import Followed
from zerotune.trial_lib.study.program import KnownProgram
from zerotune.trial_lib.study.training_command import training_command
from zerotune.trial_lib.study.typed_command import read_command

CONFIG = {MICRO_BATCH: 8, "zero_optimization": {"stage": 2}}
WRAPPER = ["bash", "run.sh"]
BY_DEEPSPEED = "deepspeed --num_gpus 2 train.py"
BY_ACCELERATE = "accelerate launch --config_file acc.yaml train.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text(json.dumps({MICRO_BATCH: 2, "zero_optimization": {"stage": 1}}))
    (tmp_path / "acc.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"
    )
    monkeypatch.setattr(follow, "_typed_before", lambda began, ranks: {})
    return tmp_path


def answer(
    folder: Path,
    patch: pytest.MonkeyPatch,
    started: str,
    arguments: str,
    found: ProgramProfile | None = None,
    switches: dict[str, Any] | None = None,
    assigned: Callable[[dict[str, str]], dict[str, str]] = lambda typed: typed,
    **vary: Any,
) -> tuple[list[str], list[str]]:
    """Returns the lines of the best command, of the launch and by a wrapper that hands its last words over.

    `assigned` gives the variables of the launch from those that are typed before the wrapper.
    """

    def followed(words: Sequence[str], folder: Path, *_: object, **__: object) -> Followed:
        begin = list(words).index(WRAPPER[0])
        set_ = assigned(dict(word.split("=", 1) for word in words[:begin]))
        launch = [word for word in started.split() if "=" not in word]
        words = [*(f"{name}={value}" for name, value in set_.items()), *launch, *words[begin + len(WRAPPER) :]]
        return Followed(tuple(words), folder)

    patch.setattr(follow, "followed", followed)
    words, host = [*started.split(), *arguments.split()], Host("cuda", ["0", "1"], 2**30)
    experiment = read_command(words, {}, folder, host, vary=vary, wrapper=[*WRAPPER, *arguments.split()])
    setup = setup_of(experiment, folder / "study")
    setup.paths.root.mkdir()
    known = KnownProgram.of(experiment, setup.environment)
    known = known if found is None else known.learned(found)
    plain = training_command(setup, known, CONFIG, switches).splitlines()
    return plain, training_command(setup, known, CONFIG, switches, by_wrapper=True).splitlines()


def test_a_wrapper_that_hands_the_configuration_over_is_the_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (*_, line) = answer(folder, monkeypatch, BY_DEEPSPEED, "--deepspeed_config ds.json")
    assert line.endswith(f"bash run.sh --deepspeed_config {folder / 'study' / 'best_ds_config.json'}")


def test_a_wrapper_whose_launcher_names_the_configuration_is_not_the_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, by_wrapper = answer(folder, monkeypatch, BY_ACCELERATE, "--epochs 3")
    assert by_wrapper == plain
    assert f"--deepspeed_config_file {folder / 'study' / 'best_ds_config.json'}" in plain[-1]


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_wrapper_that_overwrites_a_variable_of_the_winner_is_not_the_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """As `: ${NCCL_ALGO:=Ring}` keeps what is typed, and `export NCCL_ALGO=Ring` does not."""

    def assigned(typed: dict[str, str]) -> dict[str, str]:
        return {"NCCL_ALGO": "Ring", **typed} if is_kept else {**typed, "NCCL_ALGO": "Ring"}

    started, arguments = f"NCCL_ALGO=Ring {BY_DEEPSPEED}", "--deepspeed_config ds.json"
    vary, winner = {"NCCL_ALGO": ["Ring", "Tree"]}, {"NCCL_ALGO": "Tree"}
    _, by_wrapper = answer(folder, monkeypatch, started, arguments, switches=winner, assigned=assigned, **vary)
    assert "NCCL_ALGO=Tree" in by_wrapper[-1]
    assert ("bash run.sh" in by_wrapper[-1]) is is_kept


def test_a_wrappers_answer_asks_for_no_line_that_the_code_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ProgramProfile(turnable={"model:compile": [True, False]})
    vary, winner = {"model:compile": [True, False]}, {"model:compile": True}
    arguments = "--deepspeed_config ds.json"
    plain, by_wrapper = answer(folder, monkeypatch, BY_DEEPSPEED, arguments, found, winner, **vary)
    assert len(plain) == len(by_wrapper) == 2
    assert "bash run.sh" in by_wrapper[-1]


def test_a_function_of_the_users_shell_is_not_typed_before_the_wrapper() -> None:
    began = {"BASH_FUNC_module%%": "() {  eval 2\n}", "NPROC": "2", "WITH_FUNC%%": "2"}
    assert follow._typed_before(began, "2") == {"NPROC": "2"}
