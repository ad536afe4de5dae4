"""What a study's and a full experiment's folder keep of the YAML."""

import dataclasses
import os
from pathlib import Path

import pytest

from zerotune.trial_lib.inputs.read_experiment import Experiment, read_experiment
from zerotune.trial_lib.study.folder import keep_experiment, new_id

YAML = """\
entrypoint: HF_TOKEN=hf_secret python3 train.py hf_secret
hyperparameters:
  deepspeed_config: {train_batch_size: 8}
  wandb_api_key: w_secret  # the old one was o_secret
  lr: 1e-4
environment:
  environment_variables: [MY_PASSWORD=p_secret]
  registry_auth: {password: r_secret}
checkpoint_storage: {secret_key: s_secret, bucket: checkpoints}
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    (tmp_path / "train.py").touch()
    path = tmp_path / "submitted.yaml"
    path.write_text(YAML)
    return read_experiment(path, tmp_path)


def with_text(experiment: Experiment, text: str) -> Experiment:
    return dataclasses.replace(experiment, document=dataclasses.replace(experiment.document, text=text))


def test_the_yaml_is_kept_for_its_user_alone(experiment: Experiment, tmp_path: Path) -> None:
    whole = tmp_path / "experiment.yaml"
    keep_experiment(experiment, whole)
    assert whole.read_text() == YAML
    assert whole.stat().st_mode & 0o777 == 0o600


def test_what_is_kept_already_is_not_written_again(experiment: Experiment, tmp_path: Path) -> None:
    whole = tmp_path / "experiment.yaml"
    keep_experiment(experiment, whole)
    before = whole.stat().st_ino
    keep_experiment(experiment, whole)
    assert whole.stat().st_ino == before
    changed = with_text(experiment, YAML.replace("1e-4", "1e-5"))
    keep_experiment(changed, whole)
    assert "1e-5" in whole.read_text()
    assert whole.stat().st_mode & 0o777 == 0o600


def test_a_full_disk_leaves_what_was_kept(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "experiment.yaml"
    keep_experiment(experiment, whole)
    changed = with_text(experiment, YAML.replace("1e-4", "1e-5"))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        keep_experiment(changed, whole)
    assert whole.read_text() == YAML


def test_a_long_name_makes_an_id_that_a_folder_can_have() -> None:
    assert len(new_id("x" * 5000)) < 128
