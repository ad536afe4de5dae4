import os
import platform
import shutil
import time
from pathlib import Path

import pytest

from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep
from zerotune.trial_lib.records.folders import StudyPaths, StudyRecord
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.history import Asked, AskedSweep, History, Told
from zerotune.trial_lib.study.known_trials import earlier_trials

TINY = Path(__file__).parents[2] / "programs" / "tiny_study"
PROFILE = ModelProfile(
    num_params=10,
    trainable_num_params=10,
    activation_mem_per_gpu=1,
    gpu_mem=1000,
    data_parallel_size=1,
    flops_per_sample=1.0,
)


def result(number, purpose=Purpose.SEARCH, outcome=Outcome.COMPLETED, host=None):
    return TrialResult(
        trial_id=f"s-{number}",
        number=number,
        purpose=purpose,
        config_hash="0",
        outcome=outcome,
        memory=Memory(peak=[10], after_initialize=[5]),
        profile=PROFILE if purpose is Purpose.PROFILE else None,
        host=host or platform.node(),
        started_at=time.time(),
    )


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in folder.iterdir():
        os.utime(path, (1000, 1000))
    return folder


@pytest.fixture
def experiment(model):
    return read_experiment(model / "deepspeed.yaml", model)


def candidate(size):
    return Candidate(micro_batch_size=size)


def study(tmp_path, experiment, study_id="tiny-1", host=None, started_at=2000.0, **changes):
    paths = StudyPaths(tmp_path / "zerotune-studies" / study_id)
    paths.trials.mkdir(parents=True)
    record = StudyRecord(
        study_id=study_id,
        name=experiment.name,
        method="random",
        metric="throughput",
        model_dir=str(experiment.model_dir),
        ds_config=experiment.ds_config,
        started_at=started_at,
    )
    paths.record.write_text(record.model_copy(update=changes).model_dump_json())
    paths.experiment.write_text(experiment.text)
    history = History(paths.history)
    history.append(Asked(0, Purpose.PROFILE, candidate(1)))
    history.append(Told(0, result(0, Purpose.PROFILE, host=host)))
    history.append(AskedSweep(2, Sweep((candidate(4), candidate(8)), 1.0, 0.05)))
    history.append(Told(2, result(2)))
    history.append(Told(3, result(3, outcome=Outcome.OUT_OF_MEMORY)))
    return paths


def test_without_a_study_nothing_is_known(tmp_path, experiment):
    assert earlier_trials(experiment, tmp_path) is None


def test_the_trials_of_an_earlier_study_are_known_a_sweeps_too(tmp_path, experiment):
    study(tmp_path, experiment)
    known = earlier_trials(experiment, tmp_path)
    assert known is not None
    assert known.model_profile == PROFILE
    assert known.profile[0].micro_batch_size == 1
    assert [(each.micro_batch_size, ended.outcome) for each, ended in known.trials] == [
        (4, Outcome.COMPLETED),
        (8, Outcome.OUT_OF_MEMORY),
    ]
    assert known.base_config["zero_optimization"]["stage"] == 1
    assert known.studies == ("tiny-1",)


def test_several_studies_are_known_together_the_newest_profile_counts(tmp_path, experiment):
    study(tmp_path, experiment, "tiny-1")
    study(tmp_path, experiment, "tiny-2")
    known = earlier_trials(experiment, tmp_path)
    assert known is not None
    assert known.studies == ("tiny-2", "tiny-1")
    assert len(known.trials) == 4


@pytest.mark.parametrize(
    "changes",
    [{"name": "other"}, {"model_dir": "/elsewhere"}, {"ds_config": {"train_batch_size": 1}}, {"host": "another-host"}],
)
def test_a_study_of_something_else_or_elsewhere_does_not_count(tmp_path, experiment, changes):
    study(tmp_path, experiment, **changes)
    assert earlier_trials(experiment, tmp_path) is None


def test_a_study_does_not_count_when_its_experiment_has_changed(tmp_path, experiment, model):
    study(tmp_path, experiment)
    config = model / "deepspeed.yaml"
    config.write_text(config.read_text().replace("600 MiB", "700 MiB"))
    assert earlier_trials(read_experiment(config, model), tmp_path) is None


def test_a_study_does_not_count_when_the_code_has_changed_since(tmp_path, experiment, model):
    study(tmp_path, experiment)
    os.utime(model / "train.py", (3000, 3000))
    assert earlier_trials(experiment, tmp_path) is None


def test_a_folder_that_is_no_study_and_a_damaged_history_are_passed_over(tmp_path, experiment):
    paths = study(tmp_path, experiment)
    paths.history.write_text("no record\n")
    (tmp_path / "zerotune-studies" / "other").mkdir()
    assert earlier_trials(experiment, tmp_path) is None
