"""What the ranks of a trial and of a full experiment are told of the experiment."""

from pathlib import Path

from zerotune.trial_lib.deepspeed_config.overrides import get_ds_config_from_hparams
from zerotune.trial_lib.inputs.read_experiment import Experiment, read_experiment
from zerotune.trial_lib.messages.orders import TrainingSpec, read_training_spec
from zerotune.trial_lib.records.folders import FullExperimentPaths, TrialPaths
from zerotune.trial_lib.study.plans import full_length_spec, trial_spec

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
    spec = trial_spec(experiment, experiment.ds_config, TrialPaths(tmp_path))
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


def script(folder: Path) -> Experiment:
    (folder / "train.py").touch()
    (folder / "ds_config.json").write_text('{"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}')
    path = folder / "experiment.yaml"
    path.write_text(
        "entrypoint: python3 train.py\n"
        "hyperparameters: {deepspeed_config: ds_config.json, lr: 1}\n"
        "searcher: {metric: loss, max_length: {epochs: 3}}\n"
        "reproducibility: {experiment_seed: 7}\n"
    )
    return read_experiment(path, folder)


def test_a_script_in_a_trial_is_told_the_trials_configuration_and_no_length(tmp_path: Path) -> None:
    paths = TrialPaths(tmp_path / "0003")
    spec = trial_spec(script(tmp_path), {"train_micro_batch_size_per_gpu": 8}, paths)
    assert (spec.trial, spec.seed, spec.is_trial, spec.length) == (None, 7, True, None)
    assert spec.hparams["lr"] == 1
    assert spec.hparams["deepspeed_config"] == str(paths.ds_config)
    # For code that reads its own file by a fixed name, as Determined's trials did.
    own = {**spec.hparams, "deepspeed_config": str(tmp_path / "ds_config.json")}
    assert get_ds_config_from_hparams(own) == {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": 1.0}


def test_a_script_at_full_length_is_told_how_long_and_where_to(tmp_path: Path) -> None:
    paths = FullExperimentPaths(tmp_path / "full")
    paths.root.mkdir()
    full_length_spec(script(tmp_path), {"train_micro_batch_size_per_gpu": 8}, paths).write(paths.training_spec)
    spec: TrainingSpec = read_training_spec(paths.training_spec)
    assert (spec.trial, spec.is_trial, spec.length, spec.metric) == (None, False, {"epochs": 3}, "loss")
    assert (spec.checkpoints, spec.metrics) == (str(paths.checkpoints), str(paths.metrics))
    assert (spec.finished, spec.stop) == (str(paths.finished), str(paths.stop))


def test_code_with_a_configuration_of_its_own_is_told_none(tmp_path: Path) -> None:
    spec = full_length_spec(script(tmp_path), {}, FullExperimentPaths(tmp_path / "full"))
    assert spec.hparams == {"deepspeed_config": "ds_config.json", "lr": 1}
