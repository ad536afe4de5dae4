"""What a study knows of its trials before they run: from its plan, or foreseen runs, and from earlier studies."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.launch.rank_starter import RankStarter
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.search.allocations import ForeseenArm
from zerotune.trial_lib.search.base import ExpectedArm
from zerotune.trial_lib.study.against_plan import AgainstPlan
from zerotune.trial_lib.study.earlier import HeadStart, earlier_studies_of
from zerotune.trial_lib.study.fingerprint import fingerprint_in
from zerotune.trial_lib.study.history import StudyState
from zerotune.trial_lib.study.open_search import foreseen_in, keep_arms
from zerotune.trial_lib.study.setup import StudySetup
from zerotune.trial_lib.study.simulated_arms import ArmSimulation, is_simulated_unasked, keep_simulated
from zerotune.trial_lib.study.study_plan import study_plan

# What runs beside the ranks meanwhile, in cores: ZeroTune's servers, which start, and the foreseen runs.
_SERVERS, _SIMULATIONS = 1, 2


def is_measured_beside(setup: StudySetup) -> bool:
    """Whether the profile trial may measure time, because the host has cores to spare."""
    if setup.arguments.ray_address is not None or setup.experiment.config.resources.hosts:
        return False
    on_the_processor = kind_of(setup.device).computes_on_the_processor
    cores = len(setup.host.slots) if on_the_processor else len(os.sched_getaffinity(0))
    foresees = setup.arguments.foresee or is_simulated_unasked(setup.device)
    return cores >= setup.slots + _SERVERS + (_SIMULATIONS if foresees else 0)


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
        self._simulation: ArmSimulation | None = None
        self._earlier = earlier_studies_of(self._paths)
        self._profile: TrialResult | None = None

    @property
    def foreseen(self) -> tuple[ForeseenArm, ...]:
        """The memory of arms: as the plan has it, or as it was foreseen beside the profile trial."""
        return self.plan.foreseen if self.plan is not None else foreseen_in(self._paths.foreseen)

    @property
    def expected(self) -> tuple[ExpectedArm, ...]:
        """The arms of the plan; none without one."""
        return () if self.plan is None else self.plan.expected

    @property
    def head_start(self) -> HeadStart:
        return HeadStart(self._earlier, fingerprint_in(self._paths), self._profile)

    # -- beside the profile trial --------------------------------------------------------------------------------

    def foresee(self, starter: RankStarter | None) -> None:
        """Begins to foresee the program until the profile trial has ended, on GPUs or if the user asks for it.

        `starter` starts processes on this host; None if there is none.
        """
        is_wanted = self._setup.arguments.foresee or is_simulated_unasked(self._setup.device)
        if starter is None or not is_wanted or self.plan is not None or self._profile or self._simulation:
            return
        self._simulation = ArmSimulation(self._setup, starter, self._paths.root / "foreseen")
        self._simulation.begin()

    def cancel(self) -> None:
        if self._simulation is not None:
            self._simulation.cancel()

    def end_foreseeing(self) -> None:
        """Keeps the arms that were foreseen. Call it before the profile, with which they decide what has room."""
        if self._simulation is not None:
            keep_simulated(self._simulation, self._paths.foreseen, self._log)

    def profiled(self, profile: TrialResult, base_config: Mapping[str, Any]) -> None:
        """Leaves the plan out if it is of another program than the profile trial has found."""
        self._profile = profile
        unlike = ""
        if self.plan is not None and profile.profile is not None:
            unlike = self.plan.unlike(profile.profile, base_config)
        if self.plan is not None and unlike:
            self._without_plan = self.plan.left_out(unlike)
            self.plan = self._against = None

    # -- for the log and the report ------------------------------------------------------------------------------

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
