"""Setups of studies that run no trial."""

from pathlib import Path

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.setup import StudySetup


def setup_of(experiment: Experiment, folder: Path, device: str = "cuda", **arguments: object) -> StudySetup:
    """Returns the setup of a study of an experiment, on as many devices as one of its trials takes.

    Args:
        experiment: what is tuned.
        folder: the study's.
        device: `cuda` or `cpu`.
        arguments: those of the study that are not the defaults.
    """
    slots = [str(slot) for slot in range(experiment.config.resources.slots_per_trial)]
    given = StudyArguments(config_path=Path("experiment.yaml"), model_dir=experiment.model_dir, **arguments)  # type: ignore[arg-type]
    return StudySetup.now("s", 0.0, experiment, given, StudyPaths(folder), Host(device, slots, 80 * 2**30))
