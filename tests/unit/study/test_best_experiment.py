"""The answer of a study with switches of the program: the command to type, and the experiment for `zerotune train`."""

import json
import os
import shlex
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from study_setups import setup_of

from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.read_experiment import Experiment, read_experiment
from zerotune.trial_lib.messages.measurement import ProgramProfile
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.study.program import KnownProgram, environment_of, program_of
from zerotune.trial_lib.study.training_command import training_command
from zerotune.trial_lib.study.typed_command import read_command

HOST = Host("cuda", ["0", "1"], 2**30)
CONFIG = {MICRO_BATCH: 8, "zero_optimization": {"stage": 2}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text(json.dumps({MICRO_BATCH: 2, "zero_optimization": {"stage": 1}}))
    (tmp_path / "conf.yaml").write_text("batch: 2\nworkers: 0\n")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}/usr/bin")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def read(folder: Path, command: str, vary: dict[str, Any], **mappings: str) -> Experiment:
    return read_command(command.split(" "), mappings, folder, HOST, vary=vary)


def answered(folder: Path, experiment: Experiment, switches: dict[str, Any]) -> tuple[list[str], StudyPaths]:
    """Returns the lines of the best command, and the study's files."""
    setup = setup_of(experiment, folder / "study")
    setup.paths.root.mkdir()
    known = KnownProgram.of(experiment, setup.environment)
    return training_command(setup, known, CONFIG, switches).splitlines(), setup.paths


def test_the_answer_says_what_to_type(folder: Path) -> None:
    vary = {"--gc": [True, False], "--attn": ["sdpa", "eager"], "NCCL_ALGO": ["Ring", "Tree"]}
    command = "NCCL_ALGO=Ring deepspeed --num_gpus 2 train.py --deepspeed_config ds.json --gc --lr 1"
    experiment = read(folder, command, vary)
    (_, typed), paths = answered(folder, experiment, {"--gc": False, "--attn": "eager", "NCCL_ALGO": "Tree"})
    assert typed == (
        f"NCCL_ALGO=Tree deepspeed --num_gpus 2 train.py --deepspeed_config {paths.best_ds_config} --lr 1 --attn eager"
    )
    best = read_experiment(paths.best_experiment, folder)
    assert best.entrypoint.arguments == ("--deepspeed_config", "ds.json", "--lr", "1", "--attn", "eager")
    assert best.entrypoint.environment == {"NCCL_ALGO": "Tree"}
    assert (best.config.search_space, best.config.resources) == ({}, experiment.config.resources)
    assert stat.S_IMODE(paths.best_experiment.stat().st_mode) == 0o600


def test_zerotune_trains_with_the_switches_where_the_configuration_is_in_the_code(folder: Path) -> None:
    experiment = read(folder, "python train.py", {"--gc": [True, False]})
    lines, paths = answered(folder, experiment, {"--gc": True})
    assert f"train {paths.best_experiment} {folder} --ds-config {paths.best_ds_config}" in lines[-1]
    assert any(line.endswith("python train.py --gc") for line in lines)


def test_a_file_with_a_switch_and_the_batch_stays_one_file(folder: Path) -> None:
    command = "deepspeed train.py --deepspeed_config ds.json conf.yaml"
    experiment = read(folder, command, {"conf.yaml:workers": [0, 4]}, **{MICRO_BATCH: "conf.yaml:batch"})
    lines, paths = answered(folder, experiment, {"conf.yaml:workers": 4})
    best = read_experiment(paths.best_experiment, folder)
    copy = best.entrypoint.arguments[-1]
    assert Path(copy).read_text() == "batch: 8\nworkers: 4\n"
    assert lines[-1].endswith(copy)
    assert best.config.arg_mappings == {MICRO_BATCH: f"{copy}:batch"}
    # `zerotune train` sets the batch by the same mapping.
    environment = environment_of(best, (), "cpu")
    program = program_of(best, environment, folder / "t/ds.json", {MICRO_BATCH: 16}, folder / "t/spec.json")
    assert list(program.files.values()) == ["batch: 16\nworkers: 4\n"]


def test_an_answer_without_switches_names_the_experiment_itself(folder: Path) -> None:
    _, paths = answered(folder, read(folder, "python train.py", {}), {})
    assert not paths.best_experiment.exists()


def test_a_program_knows_its_switches_as_typed(folder: Path) -> None:
    vary = {"--gc": [True, False], "--attn": ["sdpa"], "OMP_NUM_THREADS": [1, 2]}
    experiment = read(folder, "deepspeed train.py --deepspeed_config ds.json --gc", vary)
    known = KnownProgram.of(experiment, {"OMP_NUM_THREADS": "2"})
    assert known.switches == {"--gc": True, "--attn": None, "OMP_NUM_THREADS": 2}
    assert "program" not in known.base_config
    learned = known.learned(ProgramProfile())
    assert learned.base_config["program"] == known.switches


def test_a_trial_that_varies_a_variable_starts_new_interpreters(folder: Path) -> None:
    experiment = read(folder, "deepspeed train.py --deepspeed_config ds.json", {"OMP_NUM_THREADS": [1, 2]})
    environment = {"OMP_NUM_THREADS": "1"}

    def starts_cold(**switches: Any) -> bool:
        program = program_of(experiment, environment, folder / "d.json", {}, folder / "s.json", {}, switches=switches)
        assert program.environment["OMP_NUM_THREADS"] == str(switches.get("OMP_NUM_THREADS") or 1)
        return program.starts_cold

    assert [starts_cold(**{"OMP_NUM_THREADS": value}) for value in (2, 1, None)] == [True, False, False]
    assert not starts_cold(**{"--gc": True})


def test_a_switch_that_zerotune_turned_is_an_option_of_the_trainer_or_a_line_to_write(folder: Path) -> None:
    vary = {"model:activation_checkpointing": ["none", "full"], "model:compile": [True, False]}
    experiment = read(folder, "deepspeed --num_gpus 2 train.py --deepspeed ds.json", vary)
    turnable = {"model:activation_checkpointing": ["none", "full"], "model:compile": [False, True]}
    winner = {"model:activation_checkpointing": "full", "model:compile": True}
    options = ["--gradient_checkpointing", "--gradient_checkpointing_kwargs", "--torch_compile"]
    found = ProgramProfile(turnable=turnable, trainer_options=options)
    setup = setup_of(experiment, folder / "study")
    setup.paths.root.mkdir()
    known = KnownProgram.of(experiment, setup.environment).learned(found)
    assert known.switches == {"model:activation_checkpointing": "none", "model:compile": False}
    (_, typed) = training_command(setup, known, CONFIG, winner).splitlines()
    assert shlex.split(typed)[-6:] == [
        *("--gradient_checkpointing", "True"),
        *("--gradient_checkpointing_kwargs", '{"use_reentrant": false}'),
        *("--torch_compile", "True"),
    ]
    best = read_experiment(setup.paths.best_experiment, folder)
    assert best.config.turned == winner
    without = known.learned(replace(found, trainer_options=[]))
    *lines, by_zerotune = training_command(setup, without, CONFIG, winner).splitlines()
    assert all(line.startswith("# ") for line in lines)
    assert "gradient_checkpointing_enable" in lines[0]
    assert "engine.compile()" in lines[1]
    assert f"zerotune train {setup.paths.best_experiment}" in by_zerotune


def test_what_the_user_typed_of_workers_leaves_the_command_if_the_winner_has_none(folder: Path) -> None:
    """The Trainer refuses `--dataloader_prefetch_factor` without workers, and torch `persistent_workers`."""
    typed = "--dataloader_num_workers 2 --dataloader_prefetch_factor 4 --dataloader_persistent_workers --lr 1"
    vary = {"loader:num_workers": [0, 2, 4]}
    experiment = read(folder, f"deepspeed --num_gpus 2 train.py --deepspeed ds.json {typed}", vary)
    setup = setup_of(experiment, folder / "study")
    setup.paths.root.mkdir()
    options = ["--dataloader_num_workers", "--dataloader_persistent_workers", "--dataloader_prefetch_factor"]
    found = ProgramProfile(turnable={"loader:num_workers": [2, 0, 4]}, trainer_options=options)
    known = KnownProgram.of(experiment, setup.environment).learned(found)

    def answer(workers: int) -> list[str]:
        (_, command) = training_command(setup, known, CONFIG, {"loader:num_workers": workers}).splitlines()
        return shlex.split(command)[6:]

    assert answer(0) == ["--dataloader_num_workers", "0", "--lr", "1"]
    assert answer(4) == typed.replace("workers 2", "workers 4").split(" ")
