"""The setup of a study: everything that stays as it is while the study runs."""

from dataclasses import dataclass

from trial_lib.device.base import Host
from trial_lib.device.this_host import kind_of
from trial_lib.inputs.read_experiment import Experiment
from trial_lib.inputs.search_space import read_search_space
from trial_lib.records.folders import StudyPaths
from trial_lib.records.switches import place_of
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.program import environment_of


@dataclass(frozen=True)
class StudySetup:
    """Everything that stays as it is while a study runs."""

    study_id: str  # unique over all studies
    opened_at: float  # seconds since the epoch. A trial never changes a user's file that is older.
    experiment: Experiment  # the experiment that the user submitted
    arguments: StudyArguments  # the study's arguments, as the user gave them
    paths: StudyPaths  # the study's files
    host: Host  # the devices
    environment: dict[str, str]  # the environment variables that ranks start from

    @classmethod
    def now(
        cls,
        study_id: str,
        opened_at: float,
        experiment: Experiment,
        arguments: StudyArguments,
        paths: StudyPaths,
        host: Host,
    ) -> "StudySetup":
        """Takes the environment of this moment. Prefect and MLflow change this process's later."""
        environment = environment_of(experiment, arguments.include, host.device)
        return cls(study_id, opened_at, experiment, arguments, paths, host, environment)

    @property
    def device(self) -> str:
        """`cuda` or `cpu`."""
        return self.host.device

    @property
    def slots(self) -> int:
        return self.experiment.config.resources.slots_per_trial

    @property
    def free_switches(self) -> tuple[str, ...]:
        """Places of the program's switches that may change the training, as the user says."""
        requests = read_search_space(self.experiment.config.search_space)
        return tuple(place_of(request.path) for request in requests if request.changes_mathematics)

    @property
    def concurrency(self) -> int:
        slots = self.arguments.max_slots or len(self.host.slots)
        return max(1, min(self.arguments.max_concurrent_trials, self.arguments.max_trials, slots // self.slots))

    @property
    def memory_limit(self) -> int | None:
        """The memory budget of a slot, in bytes. None leaves a trial all the memory of its GPU."""
        asked = self.experiment.config.resources.memory_per_slot
        return kind_of(self.device).budget(self.host, None if asked is None else int(asked))
