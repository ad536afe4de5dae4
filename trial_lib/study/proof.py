"""The run that shows whether the user's own command trains with the winner's configuration."""

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import psutil

from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.launch.outcome import PROGRAM, read_record
from zerotune.trial_lib.launch.trial import TrialPlan
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import OwnCommand, StudyPaths, TrialPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult, without_log
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.followed import followed, within
from zerotune.trial_lib.study.plans import TrialPlans
from zerotune.trial_lib.study.setup import StudySetup
from zerotune.trial_lib.study.typed_command import read_command

_LOOK_S, _LONGEST_START_S = 0.5, 180.0


class NotProvedError(Exception):
    """The user's own command with the winner's values was not seen to train as the winner did. The text says why."""


def prove(driver: StudyDriver, own: OwnCommand, winner: Candidate, best: TrialResult) -> None:
    """Runs the command as it would be typed, for a step. Raises NotProvedError if its engine is not the winner's."""
    wanted = _engine(driver.setup.paths.trial(best.number))
    if not wanted:
        raise NotProvedError("the winner's trial has no record of its engine")
    if driver.place.starter_here is None:
        raise NotProvedError("trials run on other hosts, where it was not tried")
    if driver.time.is_over:
        raise NotProvedError("the minutes of --max-minutes were over before it could be tried")
    plan = _plan(driver, own, winner)
    # Of another way to type it, which was not the winner's.
    shutil.rmtree(plan.paths.root, ignore_errors=True)
    result = _run(driver, plan)
    if result.outcome is not Outcome.COMPLETED:
        raise NotProvedError(f"a run of it ended ({result.outcome.value}): {without_log(result.reason)}")
    if differences := list(_differences(wanted, _engine(plan.paths))):
        raise NotProvedError(f"in a run of it {'; '.join(differences[:3])}")
    shutil.rmtree(plan.paths.root.parent, ignore_errors=True)


def _plan(driver: StudyDriver, own: OwnCommand, winner: Candidate) -> TrialPlan:
    setup, check = driver.setup, driver.plans.check
    folder = setup.experiment.model_dir
    words = [*(f"{name}={value}" for name, value in own.variables.items()), *own.words]
    in_time = within(_LONGEST_START_S, own.words[0], check)
    found = followed(words, folder, lambda sentence: None, in_time, environment=psutil.Process().environ())
    if found.folder != folder:
        raise NotProvedError(f"it starts its training in {found.folder}")
    experiment = read_command(found.words, {}, folder, setup.host, setup.arguments.include)
    if experiment.config.resources.slots_per_trial != setup.slots:
        raise NotProvedError("it starts another number of ranks")
    plans = TrialPlans(_started(setup, experiment))
    plans.check = check
    plan = plans.plan(driver.state.next_number, Purpose.SUBMITTED, winner, driver.known, driver.state.profiled)
    return replace(
        plan, window=StepWindow(start_step=1, end_step=1, max_steps=1), program=replace(plan.program, files=own.copies)
    )


def _started(setup: StudySetup, experiment: Experiment) -> StudySetup:
    # The study's setup with another command, whose records are beside the copies.
    before, now = setup.experiment.entrypoint, experiment.entrypoint
    set_ = {*before.environment, *before.launcher_environment}
    environment = {name: value for name, value in setup.environment.items() if name not in set_}
    environment |= {**experiment.environment_variables, **now.launcher_environment}
    return replace(setup, experiment=experiment, environment=environment, paths=StudyPaths(setup.paths.best))


def _run(driver: StudyDriver, plan: TrialPlan) -> TrialResult:
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(driver.run_beside, plan)
        try:
            while not wait([running], _LOOK_S).done:
                driver.plans.check()
        except BaseException:
            driver.cancel()
            raise
        return running.result()


def _engine(paths: TrialPaths) -> dict[str, Any]:
    found = read_record(paths.engine_built(0), PROGRAM)
    return {} if found is None else found.engine


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in sorted({*wanted, *found}):
        here, there = wanted.get(name), found.get(name)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            yield from _differences(here, there, f"{prefix}{name}.")
        elif here != there:
            yield f"{prefix}{name} is {there!r}, and {here!r} in the trials"
