"""A file that somebody edits while a study runs is named, once; one that is only touched is not."""

import logging
import os
from pathlib import Path

import pytest

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.fingerprint import Edits, fingerprint_in, fingerprint_of
from zerotune.trial_lib.study.setup import StudySetup

YAML = "entrypoint: deepspeed train.py\nhyperparameters:\n  deepspeed_config: {train_micro_batch_size_per_gpu: 1}\n"


def edits_of(folder: Path, config: Path, yaml: str = YAML, include: tuple[Path, ...] = ()) -> Edits:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "train.py").write_text("print(1)\n")
    config.write_text(yaml)
    experiment = read_experiment(config, model, include=include)
    arguments = StudyArguments(
        config_path=config, model_dir=model, method="random", metric="throughput", include=include
    )
    paths = StudyPaths(folder / "study")
    paths.root.mkdir()
    setup = StudySetup.now("s", 0.0, experiment, arguments, paths, Host("cpu", ["0"], 2**30))
    paths.fingerprint.write_text(fingerprint_of(setup).model_dump_json())
    return Edits(experiment, include, paths, logging.getLogger("edits"))


@pytest.fixture
def edits(tmp_path: Path) -> Edits:
    return edits_of(tmp_path, tmp_path / "experiment.yaml")


def test_an_edited_script_is_named_once_and_nothing_is_learned_from_the_study(
    edits: Edits, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edits.look()
    assert (edits.sentence, caplog.messages) == ("", [])
    (tmp_path / "model" / "train.py").write_text("print(2)  # broken\n")
    edits.look()
    edits.look()
    assert edits.sentence == "Edited while the study ran: train.py."
    assert len(caplog.messages) == 1
    assert fingerprint_in(StudyPaths(tmp_path / "study")).is_mixed


def test_a_file_that_is_saved_as_it_was_is_no_edit(edits: Edits, tmp_path: Path) -> None:
    os.utime(tmp_path / "model" / "train.py", (1, 1))
    edits.look()
    assert edits.sentence == ""


def test_one_that_is_gone_is_named(edits: Edits, tmp_path: Path) -> None:
    (tmp_path / "model" / "train.py").unlink()
    edits.look()
    assert edits.sentence == "Edited while the study ran: train.py (gone)."


def test_an_edited_configuration_does_not_pass_in_silence_and_does_not_count(
    edits: Edits, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "experiment.yaml").write_text(YAML + "name: other\n")
    edits.look()
    assert "The study continues with the file as it was at its start" in caplog.text
    assert not fingerprint_in(StudyPaths(tmp_path / "study")).is_mixed


def test_an_edited_configuration_beside_the_code_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model").mkdir()
    config = tmp_path / "model" / "experiment.yaml"
    edits = edits_of(tmp_path, config)
    config.write_text(YAML + "name: other\n")
    edits.look()
    assert edits.sentence == f"Edited while the study ran: {config}."
    (message,) = caplog.messages
    assert "The study continues with the file as it was at its start" in message


def test_edited_code_that_was_included_is_named(tmp_path: Path) -> None:
    folder, file = tmp_path / "kit", tmp_path / "helper.py"
    folder.mkdir()
    (folder / "layers.py").write_text("a = 1\n")
    file.write_text("b = 1\n")
    edits = edits_of(tmp_path, tmp_path / "experiment.yaml", include=(folder, file))
    edits.look()
    assert edits.sentence == ""
    (folder / "layers.py").write_text("a = 2  # broken\n")
    file.write_text("b = 2  # broken\n")
    edits.look()
    assert edits.sentence == "Edited while the study ran: kit/layers.py, helper.py."


def test_an_edited_deepspeed_configuration_elsewhere_is_named(tmp_path: Path) -> None:
    elsewhere = tmp_path / "ds.json"
    elsewhere.write_text('{"train_micro_batch_size_per_gpu": 1}')
    yaml = f"entrypoint: deepspeed train.py\nhyperparameters:\n  deepspeed_config: {elsewhere}\n"
    edits = edits_of(tmp_path, tmp_path / "experiment.yaml", yaml)
    elsewhere.write_text('{"train_micro_batch_size_per_gpu": 16}')
    edits.look()
    assert edits.sentence == f"Edited while the study ran: {elsewhere}."
    assert fingerprint_in(StudyPaths(tmp_path / "study")).is_mixed
