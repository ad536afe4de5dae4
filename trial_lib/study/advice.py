"""What a study knows of its trials before they run: from its plan and from earlier studies."""

import logging
from collections.abc import Mapping
from typing import Any

from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.search.allocations import ForeseenArm
from zerotune.trial_lib.search.base import ExpectedArm
from zerotune.trial_lib.study.against_plan import AgainstPlan
from zerotune.trial_lib.study.earlier import HeadStart, earlier_studies_of
from zerotune.trial_lib.study.fingerprint import fingerprint_in
from zerotune.trial_lib.study.history import StudyState
from zerotune.trial_lib.study.open_search import foreseen_in, keep_arms
from zerotune.trial_lib.study.setup import StudySetup
from zerotune.trial_lib.study.study_plan import study_plan


class Advice:
    """Advises the search of one study, and compares the advice with the trials.

    A resumed study gets the same advice, because everything is in its folder.
    """

    def __init__(self, setup: StudySetup, log: logging.Logger) -> None:
        self._setup, self._paths, self._log = setup, setup.paths, log
        hosts = max(1, len(setup.experiment.config.resources.hosts))
        # None without one, or if it is of another program.
        self.plan = study_plan(self._paths.plan, setup.host, setup.slots, hosts)
        self._against = None if self.plan is None else AgainstPlan(self.plan, self._paths.planned_trials)
        self._without_plan = ""
        self._earlier = earlier_studies_of(self._paths)
        self._profile: TrialResult | None = None

    @property
    def foreseen(self) -> tuple[ForeseenArm, ...]:
        """The memory of arms as the plan has it. A study of an earlier version may have foreseen it without a plan."""
        return self.plan.foreseen if self.plan is not None else foreseen_in(self._paths.foreseen)

    @property
    def expected(self) -> tuple[ExpectedArm, ...]:
        """The arms of the plan; none without one."""
        return () if self.plan is None else self.plan.expected

    @property
    def head_start(self) -> HeadStart:
        return HeadStart(self._earlier, fingerprint_in(self._paths), self._profile)

    def profiled(self, profile: TrialResult, base_config: Mapping[str, Any]) -> None:
        """Leaves the plan out if it is of another program than the profile trial has found."""
        self._profile = profile
        unlike = ""
        if self.plan is not None and profile.profile is not None:
            unlike = self.plan.unlike(profile.profile, base_config)
        if self.plan is not None and unlike:
            self._without_plan = self.plan.left_out(unlike)
            self.plan = self._against = None

    def tell_plan(self, has_search: bool) -> None:
        """Logs what the plan gives, or why the study goes on without it. Its memory is kept for the report."""
        if self._without_plan:
            self._log.warning("%s", self._without_plan)
        elif self.plan is not None and not has_search:
            for sentence in self.plan.told():
                self._log.info("%s", sentence)
            if self.plan.foreseen:
                keep_arms(self.plan.foreseen, self._paths.foreseen)

    def compare(self, state: StudyState, base_config: Mapping[str, Any]) -> None:
        """Compares the trials that have ended with the plan."""
        if self._against is not None:
            self._against.add(state, base_config)
