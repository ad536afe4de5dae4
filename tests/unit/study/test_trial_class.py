"""What the ranks of a trial class are told of the experiment."""

from pathlib import Path

from trial_lib.experiment.yaml_file import read_experiment
from trial_lib.study.trial_class import tuning_spec

YAML = """\
entrypoint: HF_TOKEN=hf_secret python3 -m determined.launch.deepspeed --trial model_def:Tiny
hyperparameters: {deepspeed_config: {train_batch_size: 8}, api_key: real, lr: 1}
data: {access_key: real}
environment:
  environment_variables: {MY_KEY: m_secret, A: b}
  registry_auth: {password: r_secret}
resources: {slots_per_trial: 1, resource_pool: gpus}
checkpoint_storage: {secret_key: s_secret}
"""


def test_the_code_gets_its_real_values_and_the_experiment_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "model_def.py").write_text("class Tiny: ...")
    path = tmp_path / "experiment.yaml"
    path.write_text(YAML)
    experiment = read_experiment(path, tmp_path)
    spec = tuning_spec(experiment, experiment.ds_config, tmp_path / "ds_config.json", tmp_path / "tensorboard")
    assert spec is not None
    assert spec.hparams["api_key"] == "real"
    config = spec.experiment_config
    assert config["entrypoint"].startswith("HF_TOKEN=<redacted> python3 -m ")
    assert config["hyperparameters"] == {"deepspeed_config": {"train_batch_size": 8}, "api_key": "<redacted>", "lr": 1}
    assert config["data"] == {"access_key": "real"}  # comes by no other way
    assert config["environment"] == {"environment_variables": {"MY_KEY": "<redacted>", "A": "b"}}
    assert config["resources"] == {"slots_per_trial": 1}
    assert "checkpoint_storage" not in config

    spec.write(tmp_path / "training.json")
    assert (tmp_path / "training.json").stat().st_mode & 0o777 == 0o600
