"""Says why: where the time of a step goes, of the answer, of the user's configuration, and of each arm.

The figures are those of traced trials. An arm without a traced trial gets what the study's plan has foreseen for it, or
nothing.
"""

from collections.abc import Iterator
from dataclasses import replace

from trial_lib.launch.trial import TrialPlan
from trial_lib.records.candidate import Purpose
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.step_account import StepAccount, advice_on
from trial_lib.records.units import name_of
from trial_lib.search.base import key_in_plan, switches_in
from trial_lib.search.zero_settings import ZeroSettings
from trial_lib.study.driver import StudyDriver

_OWN = "your configuration"
_NEVER_TRACED = "No trial of it was traced."


def traced_once(driver: StudyDriver, plan: TrialPlan) -> TrialPlan:
    """A plan that traces steps after the counted ones, unless a trial of this configuration has done so."""
    same = (result for result in driver.state.results.values() if result.config_hash == plan.config_hash)
    return replace(plan, traces=all(result.traced is None for result in same))


def step_accounts(driver: StudyDriver, best: TrialResult) -> tuple[StepAccount, ...]:
    """The accounts of a study: the winner's, the user's, then those of other configurations and arms."""
    own = driver.state.submitted
    is_own = best.purpose is Purpose.SUBMITTED or (own is not None and own.config_hash == best.config_hash)
    found = [_of_trial(driver, best, "own" if is_own else "winner")]
    if own is not None and not is_own:
        found.append(_of_trial(driver, own, "own"))
    told = {best.config_hash, *(() if own is None else (own.config_hash,))}
    for result in driver.state.results.values():
        if result.config_hash not in told and result.traced is not None and result.traced.shares:
            told.add(result.config_hash)
            found.append(_of_trial(driver, result, "other"))
    return (*found, *_foreseen(driver, found))


def _of_trial(driver: StudyDriver, result: TrialResult, role: str) -> StepAccount:
    same = [each for each in driver.state.results.values() if each.config_hash == result.config_hash]
    traced = [each for each in same if each.traced is not None]
    good = next((each for each in traced if each.traced is not None and each.traced.shares), None)
    named = _named(driver, result, role)
    if good is None or good.traced is None:
        failure = next((each.traced.failure for each in traced if each.traced is not None), _NEVER_TRACED)
        return StepAccount(**named, basis="none", failure=failure)
    seconds, step = good.metrics.get("latency", good.traced.seconds), good.traced
    config = driver.state.candidates[good.number].complete(driver.known.base_config)
    return StepAccount(
        **named,
        basis="traced",
        trial=good.number,
        seconds=seconds,
        shares=step.shares,
        slowed=step.seconds / seconds if seconds else 1.0,
        advice=advice_on(step.shares, config, driver.setup.device, _measured_stages(driver)),
    )


def _named(driver: StudyDriver, result: TrialResult, role: str) -> dict[str, str]:
    name = _OWN if role == "own" else name_of(driver.state.candidates[result.number])
    return {"name": name, "role": role}


def _measured_stages(driver: StudyDriver) -> set[int]:
    state, base = driver.state, driver.known.base_config
    configs = [
        state.candidates[number].complete(base)
        for number, result in state.results.items()
        if result.outcome is Outcome.COMPLETED and result.purpose is not Purpose.PROFILE
    ]
    return {ZeroSettings.of(config).stage for config in configs}


def _foreseen(driver: StudyDriver, told: list[StepAccount]) -> Iterator[StepAccount]:
    """The accounts of the arms that were tried and not traced, if the study began with a plan for its devices.

    The plan's figures are those of the arm's best micro-batch.
    """
    plan, state, base = driver.plan, driver.state, driver.known.base_config
    if plan is None or plan.cluster is None:
        return
    foreseen = switches_in(plan.expected)
    candidates = state.candidates.items()
    keys = {number: key_in_plan(candidate.complete(base), base, foreseen) for number, candidate in candidates}
    traced = {keys[account.trial] for account in told if account.trial is not None}
    tried = {keys[number] for number, result in state.results.items() if result.purpose is not Purpose.PROFILE}
    for arm in plan.devices.arms:
        total = sum(arm.seconds.values())
        if plan.key_of(arm) in tried - traced and not arm.stopped and total > 0:
            shares = {part: seconds / total for part, seconds in arm.seconds.items() if seconds > 0}
            name = f"{arm.label}, micro-batch {arm.micro_batch}"
            yield StepAccount(name=name, role="arm", basis="foreseen", seconds=total, shares=shares)
