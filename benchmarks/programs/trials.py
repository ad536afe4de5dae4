"""Trials of a program in fresh processes, as a confirmation runs them, without a search around them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from benchmarks.programs.commands import Program
from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.open_study import new_study
from zerotune.trial_lib.study.runner import Work
from zerotune.trial_lib.study.typed_command import check_mappings


class Trials:
    """Of one program, which has been profiled.

    Args:
        driver: of a study that nothing has been asked of.

    Attributes:
        driver: the same.
        profile: the profile trial's result.
        own: what the user has typed; None where the profile trial has failed or its batch is not known.
    """

    def __init__(self, driver: StudyDriver) -> None:
        self.driver = driver
        self.profile = self.run(driver.profile_plan())
        submitted = driver.submitted_plan() if self.profile.outcome is Outcome.COMPLETED else None
        self.own = None if submitted is None else submitted.candidate

    def measured(self, candidate: Candidate) -> TrialResult:
        """Runs one."""
        return self.run(self.driver.plan_again(Purpose.CONFIRM, candidate))

    def run(self, plan: TrialPlan) -> TrialResult:
        """Runs one plan."""
        (result,) = self.driver.run(Work((plan,)))
        self.driver.next_ended(timeout_s=0.0)
        assert isinstance(result, TrialResult)
        self.driver.tell(result)
        return result


@contextmanager
def trials_of(program: Program, folder: Path) -> Iterator[Trials]:
    """Profiles a program and yields its trials.

    Args:
        program: which one.
        folder: its copy; the study stands beside it.
    """
    arguments = StudyArguments(
        command=program.typed, model_dir=folder, arg_mappings=check_mappings(program.mappings), metric="throughput"
    )
    with patch.dict(os.environ, program.variables):
        study = new_study(arguments, folder.parent)
        try:
            yield Trials(study.driver)
        finally:
            study.close()
