"""The slots that a study's trials may have, and what starts them; GPUs are made up."""

from pathlib import Path

import pytest
from nvml_fixtures import PretendGpu, pretend_gpus

from zerotune.trial_lib.inputs.read_experiment import Experiment, read_experiment
from zerotune.trial_lib.launch.starters import ColdStarter
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.study import setup as study_setup
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.setup import StudySetup, check_slots, slots_for, starter_of

GIB = 2**30


def experiment(folder: Path, slots: int) -> Experiment:
    (folder / "train.py").touch()
    (folder / "ds_config.json").write_text('{"train_batch_size": 8}')
    path = folder / "experiment.yaml"
    path.write_text(
        "entrypoint: python3 train.py --deepspeed_config ds_config.json\n"
        "hyperparameters: {deepspeed_config: ds_config.json}\n"
        f"resources: {{slots_per_trial: {slots}}}\n"
    )
    return read_experiment(path, folder)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


def test_two_ranks_on_instances_of_a_gpu_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [PretendGpu("MIG-a", 20 * GIB), PretendGpu("MIG-b", 20 * GIB)]
    pretend_gpus(monkeypatch, [PretendGpu("GPU-0", instances=parts)])
    host = slots_for(experiment(tmp_path, 1))
    check_slots(experiment(tmp_path, 1), host)
    with pytest.raises(InputError, match="one instance of a GPU") as refused:
        check_slots(experiment(tmp_path, 2), host)
    assert refused.value.remedy == "Set resources.slots_per_trial to 1."


def test_trials_choose_among_cards_of_one_model_and_their_ops_are_built_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = PretendGpu("GPU-small", 8 * GIB, model="NVIDIA RTX A2000")
    pretend_gpus(monkeypatch, [small, PretendGpu("GPU-0"), PretendGpu("GPU-1")])
    submitted = experiment(tmp_path, 1)
    host = slots_for(submitted)
    assert (host.slots, host.memory_per_slot) == (["1", "2"], 80 * GIB)
    environments: list[dict[str, str]] = []

    def cold(
        interpreter: str, builders: list[str], environment: dict[str, str], note: object, ahead: list[str]
    ) -> ColdStarter:
        environments.append(environment)
        return ColdStarter(interpreter, builders, environment, lambda text: None, ahead)

    monkeypatch.setattr(study_setup, "ColdStarter", cold)
    arguments = StudyArguments(config_path=submitted.path, model_dir=tmp_path, start="cold")
    setup = StudySetup.now("s", 0.0, submitted, arguments, StudyPaths(tmp_path / "study"), host)
    starter_of(setup, [], lambda text: None).close()
    assert environments[0]["CUDA_VISIBLE_DEVICES"] == "1"
