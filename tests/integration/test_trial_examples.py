"""The examples of trial classes, each trained on two ranks as its YAML says."""

from pathlib import Path

import pytest
from training_fixtures import EXAMPLES, Trainings

from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.launch.starters import WarmStarter
from zerotune.trial_lib.study.plans import merged_hparams


@pytest.mark.parametrize(
    ("folder", "config", "bound"),
    [
        ("hello_deepspeed", "trial.yaml", 5.6),  # guessing bytes at random has a loss of 5.5
        pytest.param("gan_two_engines", "deepspeed.yaml", 0.5, marks=pytest.mark.long),
        pytest.param("pipeline_parallel", "deepspeed.yaml", 0.65, marks=pytest.mark.long),
        pytest.param("custom_reducer", "deepspeed.yaml", 0.7, marks=pytest.mark.long),
        pytest.param("custom_mpu", "deepspeed.yaml", 0.5, marks=pytest.mark.long),
    ],
)
def test_an_example_trains(tmp_path: Path, warm_starter: WarmStarter, folder: str, config: str, bound: float) -> None:
    experiment = read_experiment(EXAMPLES / folder / config, EXAMPLES / folder)
    searcher = experiment.config.searcher
    assert experiment.entrypoint.trial_class is not None
    assert searcher.max_length is not None
    length = searcher.max_length.model_dump(exclude_none=True)
    ds_config_path = tmp_path / folder / "ds_config.json"
    training = Trainings(tmp_path, warm_starter).run(
        experiment.entrypoint.trial_class.partition(":")[2],
        folder,
        slots=experiment.config.resources.slots_per_trial,
        ds_config=experiment.ds_config,
        model_dir=EXAMPLES / folder,
        hparams=merged_hparams(experiment.config.hyperparameters, experiment.ds_config, ds_config_path),
        length={"batches": 12} if folder == "hello_deepspeed" else length,
        report_period=experiment.config.scheduling_unit,
        metric=searcher.metric,
        smaller_is_better=searcher.smaller_is_better,
    )
    assert training.succeeded, "\n".join(training.logs)
    assert training.finished is not None
    reached = training.finished["metrics"][searcher.metric]
    assert reached < bound if searcher.smaller_is_better else reached > bound
