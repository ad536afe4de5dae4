"""What a study's trials run with, in full: a candidate becomes a `TrialPlan`."""

from collections.abc import Mapping
from typing import Any

from trial_lib.experiment.candidate import Candidate, Purpose
from trial_lib.experiment.overrides import config_hash
from trial_lib.experiment.result import TrialResult
from trial_lib.experiment.study import StudyPaths
from trial_lib.experiment.window import StepWindow
from trial_lib.experiment.yaml_file import Experiment
from trial_lib.launch.hardware import Host
from trial_lib.launch.trial import TrialPlan
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.deadline import PROFILE_DEADLINE_S, deadline_s
from trial_lib.study.program import program_of
from trial_lib.study.training_spec import trial_spec


class TrialPlans:
    """Makes the plans of one study's trials.

    Args:
        study_id: unique over all studies.
        opened_at: seconds since the epoch: no trial changes a file of the user's that is older.
        experiment: what the user submitted.
        arguments: the study's.
        paths: its files.
        host: the devices.
        environment: what the ranks start from.

    Attributes:
        memory_limit: the budget of a CPU slot, in bytes; None on a GPU, which has its own memory.
    """

    def __init__(
        self,
        study_id: str,
        opened_at: float,
        experiment: Experiment,
        arguments: StudyArguments,
        paths: StudyPaths,
        host: Host,
        environment: Mapping[str, str],
    ) -> None:
        self._study_id = study_id
        self._opened_at = opened_at
        self._experiment = experiment
        self._arguments = arguments
        self._paths = paths
        self._environment = environment
        asked = experiment.config.resources.memory_per_slot
        budget = host.memory_per_slot if asked is None else int(asked)
        self.memory_limit = budget if host.device == "cpu" else None

    def plan(
        self,
        number: int,
        purpose: Purpose,
        candidate: Candidate,
        base_config: Mapping[str, Any],
        arg_mappings: Mapping[str, str],
        profiled: tuple[TrialResult, Candidate] | None,
    ) -> TrialPlan:
        """Returns everything that decides a trial.

        Args:
            number: in the study.
            purpose: why it runs.
            candidate: what it runs with.
            base_config: the user's DeepSpeed configuration, as far as it is known.
            arg_mappings: the flag or the environment variable that sets each DeepSpeed key.
            profiled: the profile trial and its candidate; None for the profile trial itself.
        """
        arguments = self._arguments
        if profiled is None:
            window = StepWindow(start_step=1, end_step=1, max_steps=1)
            deadline = PROFILE_DEADLINE_S
        else:
            window = StepWindow(start_step=arguments.start_profile_step, end_step=arguments.end_profile_step)
            deadline = deadline_s(*profiled, candidate, window)
        paths = self._paths.trial(number)
        config = candidate.complete(base_config)
        return TrialPlan(
            trial_id=f"{self._study_id}-{number:04d}",
            number=number,
            purpose=purpose,
            candidate=candidate,
            ds_config=config,
            config_hash=config_hash(config),
            program=program_of(
                self._experiment, dict(self._environment), paths.ds_config, config, paths.training_spec, arg_mappings
            ),
            window=window,
            memory_limit=self.memory_limit,
            deadline_s=deadline,
            paths=paths,
            training_spec=trial_spec(self._experiment, config, paths),
            protected_before=self._opened_at,
        )
