"""A training at full length whose command a wrapper starts, from files that the program itself is not given."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from study_setups import setup_of

from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.study import followed as follow
from zerotune.trial_lib.study import open_full_experiment as opening
from zerotune.trial_lib.study.folder import hold_lock, keep_experiment, write_wrapper
from zerotune.trial_lib.study.full_experiment import FullExperiment, TrainingArguments
from zerotune.trial_lib.study.program import KnownProgram
from zerotune.trial_lib.study.setup import StudySetup
from zerotune.trial_lib.study.training_command import write_best_experiment
from zerotune.trial_lib.study.typed_command import read_command

HOST = Host("cpu", ["0"], 2**30)
WRAPPER = ("python", "deepy.py", "train.py", "small.yml")
COMMAND = ["python", "train.py", "--size"]


@pytest.fixture(autouse=True)
def wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper that hands the batch of its file over as an option."""

    def followed(words: Any, folder: Path, tell: Any, check: Any) -> Any:
        return SimpleNamespace(words=(*COMMAND, Path(words[-1]).read_text().split()[-1]))

    monkeypatch.setattr(follow, "followed", followed)
    monkeypatch.setattr(opening, "slots_for", lambda experiment: HOST)


@pytest.fixture
def setup(tmp_path: Path) -> StudySetup:
    """A study of the wrapper, with an answer."""
    for name in ("train.py", "deepy.py"):
        (tmp_path / name).touch()
    (tmp_path / "small.yml").write_text("batch: 2\n")
    mappings = {MICRO_BATCH: "small.yml:batch"}
    experiment = read_command([*COMMAND, "2"], mappings, tmp_path, HOST, vary={"--gc": [True, False]}, wrapper=WRAPPER)
    setup = setup_of(experiment, tmp_path / "study", "cpu")
    setup.paths.root.mkdir()
    keep_experiment(experiment, setup.paths.experiment)
    write_wrapper(setup.paths, WRAPPER)
    hold_lock(setup.paths.lock, "study").release()
    setup.paths.best_ds_config.write_text(f'{{"{MICRO_BATCH}": 8}}')
    return setup


def trained(training: FullExperiment | None) -> list[str]:
    """Returns the arguments of the training's program."""
    assert training is not None
    training.close()
    return training._plan.program.arguments


def of_study(setup: StudySetup, monkeypatch: pytest.MonkeyPatch) -> FullExperiment | None:
    monkeypatch.setattr(opening, "_winners_switches", lambda study: [])
    known = KnownProgram.of(setup.experiment, setup.environment)
    driver = SimpleNamespace(setup=setup, known=known, log=logging.getLogger())
    record = SimpleNamespace(study_id="s")
    return opening.full_experiment_of(SimpleNamespace(paths=setup.paths, driver=driver, record=record))  # type: ignore[arg-type]


def best_of(setup: StudySetup) -> Path:
    mappings = KnownProgram.of(setup.experiment).arg_mappings
    return write_best_experiment(setup, mappings, {MICRO_BATCH: 8}, {"--gc": True})


def test_a_study_trains_with_what_its_wrapper_makes_of_the_answer(
    setup: StudySetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trained(of_study(setup, monkeypatch)) == ["--size", "8"]
    # The same again, when it is resumed by itself.
    assert trained(opening.resume_full_experiment(setup.paths.full_experiment.root)) == ["--size", "8"]


def test_the_winners_switches_stay_in_the_words_that_the_wrapper_starts(
    setup: StudySetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    best_of(setup)
    assert trained(of_study(setup, monkeypatch)) == ["--size", "8", "--gc"]


@pytest.mark.parametrize(("has_switches", "words"), [(False, ["--size", "8"]), (True, ["--size", "8", "--gc"])])
def test_the_experiment_of_a_study_may_be_trained(
    setup: StudySetup, tmp_path: Path, has_switches: bool, words: list[str]
) -> None:
    file = best_of(setup) if has_switches else setup.paths.experiment
    arguments = TrainingArguments(config_path=file, model_dir=tmp_path, ds_config=setup.paths.best_ds_config)
    assert trained(opening.new_full_experiment(arguments, tmp_path / "work")) == words
    assert trained(opening.resume_newest(arguments, tmp_path / "work")) == words


def test_a_configuration_beside_the_script_is_the_programs_own(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").touch()
    (tmp_path / "src" / "ds.json").write_text("{}")
    file = tmp_path / "experiment.yaml"
    file.write_text("name: n\nentrypoint: deepspeed src/train.py --deepspeed ds.json\n")
    arguments = TrainingArguments(config_path=file, model_dir=tmp_path)
    training = opening.new_full_experiment(arguments, tmp_path / "work")
    assert trained(training) == ["--deepspeed", "ds.json"]
