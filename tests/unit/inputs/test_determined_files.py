"""Experiment files as Determined's users have them, also as its web interface writes them out."""

from pathlib import Path

import pytest

from zerotune.trial_lib.inputs.read_experiment import Experiment, read_experiment
from zerotune.trial_lib.messages.errors import InputError

EVERY_KEY = """
name: every-key
description: has each key that Determined knows
entrypoint: python3 -m determined.launch.deepspeed python3 train.py
hyperparameters: {deepspeed_config: ds_config.json}
labels: [a]
project: p
workspace: w
data: {path: /data}
data_layer: {type: shared_fs}
internal: {native: {command: [train]}}
debug: false
max_restarts: 0
records_per_epoch: 0
scheduling_unit: 50
perform_initial_validation: false
checkpoint_policy: none
min_checkpoint_period: {batches: 0}
min_validation_period: {epochs: 1}
preemption_timeout: 3600
reproducibility: {experiment_seed: 1}
bind_mounts: [{host_path: /tmp, container_path: /data}]
checkpoint_storage: {type: shared_fs, host_path: /tmp, save_experiment_best: 0, save_trial_best: 1}
tensorboard_storage: {type: shared_fs}
optimizations: {aggregation_frequency: 1, mixed_precision: O0}
profiling: {enabled: true, begin_on_batch: 0, end_after_batch: 100, sync_timings: true}
log_policies: [{pattern: ".*CUDA.*", action: exclude_node}]
retention_policy: {log_retention_days: 90}
integrations: {webhooks: {webhook_id: [1]}}
security: {kerberos: {config_file: /etc/krb5.conf}}
slurm: {sbatch_args: [--mem=1G], gpu_type: a100, slots_per_node: 8}
pbs: {pbsbatch_args: [-l], slots_per_node: 8}
searcher:
  name: single
  metric: loss
  smaller_is_better: true
  max_length: {batches: 100}
  source_trial_id: 1
  source_checkpoint_uuid: abc
resources:
  slots_per_trial: 1
  max_slots: 8
  slots: 8
  resource_pool: a100
  agent_label: l
  priority: 42
  weight: 1
  shm_size: 1 GiB
  native_parallel: false
  is_single_node: true
  devices: [{host_path: /dev/a, container_path: /dev/a, mode: mrw}]
environment:
  image: {cpu: a, cuda: b, rocm: c}
  environment_variables: {cpu: [A=1, B=2], cuda: [A=1], rocm: []}
  proxy_ports: [{proxy_port: 80, proxy_tcp: true}]
  ports: {http: 80}
  force_pull_image: false
  registry_auth: {username: u, password: p}
  add_capabilities: [CAP_A]
  drop_capabilities: [CAP_B]
  pod_spec: {spec: {}}
"""

# What the web interface hands out: everything stands in it, most of it empty, and hyperparameters are constants.
WRITTEN_OUT = """
name: written-out
description: null
data: {}
debug: false
labels: null
records_per_epoch: null
integrations: null
bind_mounts: []
entrypoint: [python3, -m, determined.launch.deepspeed, python3, train.py]
environment:
  image: {cpu: a, cuda: b}
  registry_auth: null
  environment_variables: {cpu: [], cuda: null, rocm: []}
hyperparameters:
  deepspeed_config: {type: const, val: ds_config.json}
  lr: {type: const, val: 0.1}
  model: {depth: {type: const, val: 2}, optimizer: {type: Adam, params: {lr: 1}}}
  overwrite_deepspeed_args: {zero_optimization: {stage: {type: const, val: 2}}}
resources: {slots_per_trial: 2, max_slots: null, priority: null}
searcher:
  name: single
  metric: loss
  max_length: {batches: 100, epochs: null, records: null}
  source_trial_id: null
reproducibility: {experiment_seed: null}
"""


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "ds_config.json").write_text('{"train_batch_size": 16, "zero_optimization": {"stage": 1}}')
    return tmp_path


def read(model_dir: Path, text: str) -> Experiment:
    path = model_dir / "experiment.yaml"
    path.write_text(text)
    return read_experiment(path, model_dir)


def refusal(model_dir: Path, section: str) -> str:
    text = f"entrypoint: python3 train.py\n{section}"
    if "hyperparameters" not in section:
        text += "\nhyperparameters: {deepspeed_config: ds_config.json}"
    with pytest.raises(InputError) as refused:
        read(model_dir, text)
    return str(refused.value).replace(f"{model_dir}/", "")


def test_every_key_is_known_and_what_has_no_effect_is_said_in_one_line(model_dir: Path) -> None:
    experiment = read(model_dir, EVERY_KEY)
    assert experiment.config.records_per_epoch is None
    assert experiment.environment_variables == {"A": "1", "B": "2"}
    no_effect, launcher = experiment.notes
    assert no_effect.endswith(" have no effect here.")
    assert "the launcher" in launcher
    for key in ("debug", "checkpoint_policy", "searcher.source_trial_id", "resources.priority", "environment.pod_spec"):
        assert key in no_effect.replace(",", "").split()
    for key in ("data", "max_restarts", "scheduling_unit", "searcher.max_length"):
        assert key not in no_effect.replace(",", "").split()


def test_a_file_that_determined_has_written_out_is_read_as_what_the_user_wrote(model_dir: Path) -> None:
    experiment = read(model_dir, WRITTEN_OUT)
    assert experiment.config.hyperparameters.as_dict() == {
        "deepspeed_config": "ds_config.json",
        "lr": 0.1,
        "model": {"depth": 2, "optimizer": {"type": "Adam", "params": {"lr": 1}}},
        "overwrite_deepspeed_args": {"zero_optimization": {"stage": 2}},
    }
    assert experiment.ds_config == {"train_batch_size": 16, "zero_optimization": {"stage": 2}}
    assert (experiment.environment_variables, experiment.config.labels) == ({}, [])
    assert experiment.config.reproducibility.experiment_seed == 0
    # What is empty is no wish of the user's.
    assert experiment.notes[0] == "bind_mounts, debug, environment.image have no effect here."


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("adaptive_asha", "runs one training for each choice of hyperparameters"),
        ("grid", "runs one training for each choice of hyperparameters"),
        ("custom", "leaves the search to another program"),
    ],
)
def test_another_searcher_is_told_what_to_do(model_dir: Path, name: str, why: str) -> None:
    said = refusal(model_dir, f"searcher: {{name: {name}, max_trials: 4, max_length: 3, unit: batches}}")
    assert said.startswith(f"experiment.yaml:2:11: searcher: {name} {why}")
    assert "Write `name: single`, with its `metric` and `max_length` alone" in said
    assert "`zerotune adaptive`" in said


@pytest.mark.parametrize(
    ("hyperparameters", "said"),
    [
        (
            "lr: {type: log, minval: -4, maxval: -2, base: 10}",
            "hyperparameters.lr: this is a range of type log, but one training has one value. Write the one value",
        ),
        (
            "model: {depth: {type: int, minval: 1, maxval: 4}}",
            "hyperparameters.model: depth is a range of type int, but one training has one value. Write the one value",
        ),
        (
            "overwrite_deepspeed_args: {zero_optimization: {stage: {type: categorical, vals: [1, 2]}}}",
            "zero_optimization.stage is a range of type categorical, but one training has one value. Write your value. "
            "The search varies it, within `search_space` if you name it there.",
        ),
    ],
)
def test_a_range_is_told_to_be_one_value(model_dir: Path, hyperparameters: str, said: str) -> None:
    assert said in refusal(model_dir, f"hyperparameters: {{deepspeed_config: ds_config.json, {hyperparameters}}}")


def test_variables_that_differ_by_device_are_to_be_told(model_dir: Path) -> None:
    section = "environment: {environment_variables: {cpu: [A=1], cuda: [A=2]}}"
    said = "A has different values on different kinds of devices: write one list, for this one."
    assert said in refusal(model_dir, section)
    named_so = "environment: {environment_variables: {gpu: 0}}\nhyperparameters: {deepspeed_config: ds_config.json}"
    assert read(model_dir, f"entrypoint: python3 train.py\n{named_so}").environment_variables == {"gpu": "0"}
