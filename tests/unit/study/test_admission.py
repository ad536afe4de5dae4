"""Which trials run: not those for which the host has no room, and those that offload by themselves."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.launch.starters import ColdStarter
from zerotune.trial_lib.launch.trial import ThisHost, TrialPlan
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.allocations import ForeseenArm, SizeLine
from zerotune.trial_lib.study import runner
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.runner import NotRun
from zerotune.trial_lib.study.setup import StudySetup

GIB = 2**30
CONFIG = """
name: t
entrypoint: deepspeed train.py
hyperparameters:
  deepspeed_config: {train_micro_batch_size_per_gpu: 2, optimizer: {type: AdamW}, zero_optimization: {stage: 1}}
search_space:
  zero_optimization.stage: [1, 2, 3]
  zero_optimization.offload_optimizer.device: {values: [none, cpu], when: {zero_optimization.stage: 2}}
max_restarts: 0
"""
MODEL = ModelProfile(
    num_params=2**30,
    trainable_num_params=2**30,
    activation_mem_per_gpu=GIB,
    gpu_mem=78 * GIB,
    host_mem=100 * GIB,
    data_parallel_size=1,
    flops_per_sample=1e12,
)
OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
NEEDED = 20 * GIB  # 32-bit parameters: master copy, gradients, two states, and the way back

Made = Callable[..., StudyDriver]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Makes the driver of a study on eight devices whose profile trial has ended."""

    def make(device: str = "cuda", free: int = 200 * GIB, model: ModelProfile = MODEL, **told: Any) -> StudyDriver:
        (tmp_path / "train.py").write_text("")
        config = tmp_path / "experiment.yaml"
        config.write_text(CONFIG)
        experiment = read_experiment(config, tmp_path)
        arguments = StudyArguments(config_path=config, model_dir=tmp_path, method="random", **told)
        host = Host(device, [str(slot) for slot in range(8)], 80 * GIB)
        place = ThisHost(ColdStarter("python", [], {}, lambda text: None), host, tmp_path)
        paths = StudyPaths(tmp_path / f"study-{device}-{free}-{model.host_mem}")
        paths.trials.mkdir(parents=True)
        monkeypatch.setattr(runner, "available_bytes", lambda: free)
        driver = StudyDriver(
            StudySetup.now("s", 0.0, experiment, arguments, paths, host), place, logging.getLogger("s")
        )
        driver.profile_plan()
        driver.tell(ended(0, Purpose.PROFILE, profile=model, metrics={"latency": 1.0}))
        return driver

    return make


def ended(number: int, purpose: Purpose = Purpose.SEARCH, **more: Any) -> TrialResult:
    told = {"outcome": Outcome.COMPLETED, **more}
    return TrialResult(trial_id=f"s-{number}", number=number, purpose=purpose, config_hash=str(number), **told)


def why_not(driver: StudyDriver, knobs: dict[str, Any], purpose: Purpose = Purpose.SEARCH) -> NotRun | None:
    return driver._admission.why_not(plan(driver, knobs, purpose))


def plan(driver: StudyDriver, knobs: dict[str, Any], purpose: Purpose = Purpose.SEARCH) -> TrialPlan:
    candidate = Candidate(knobs=knobs, micro_batch_size=2, slots=1, data_parallel_size=1)
    return driver._decide(9, purpose, candidate)


def offloads(candidate: Candidate) -> bool:
    return candidate.knobs["zero_optimization"].get("offload_optimizer", {}).get("device") == "cpu"


def test_the_host_has_to_have_room_by_the_profile_and_now(made: Made) -> None:
    assert why_not(made(), OFFLOAD) is None
    little = replace(MODEL, host_mem=10 * GIB)
    never = why_not(made(model=little), OFFLOAD)
    assert never is not None
    assert (never.outcome, never.from_outside) == (Outcome.OUT_OF_HOST_MEMORY, False)
    assert never.reason.startswith("Not tried: it would keep 20.0 GiB in the host's memory for each of its ranks")
    not_now = why_not(made(free=21 * GIB), OFFLOAD)
    assert not_now is not None
    assert (not_now.outcome, not_now.from_outside) == (Outcome.OUT_OF_HOST_MEMORY, True)
    assert "21.0 GiB are free now: other processes have the rest." in not_now.reason


def test_what_was_foreseen_on_the_host_counts(made: Made) -> None:
    driver, line = made(), SizeLine(0.0)
    config = {**driver.known.base_config, **OFFLOAD}
    arm = ForeseenArm(ds_config=config, initialize=line, backward=line, update=line, host=95.0 * GIB)
    driver.setup.paths.foreseen.write_text(json.dumps([asdict(arm)]))
    driver._learn(driver.state.results[0])
    never = why_not(driver, OFFLOAD)
    assert never is not None
    assert (never.outcome, never.from_outside) == (Outcome.OUT_OF_HOST_MEMORY, False)
    assert "it would keep 95.0 GiB in the host's memory" in never.reason


def test_what_stays_on_the_device_asks_nothing_of_the_host(made: Made) -> None:
    plain = {"zero_optimization": {"stage": 2}}
    assert why_not(made(free=1, model=replace(MODEL, host_mem=1)), plain) is None


def test_the_users_own_configuration_runs_whatever_it_takes(made: Made) -> None:
    driver = made(free=1)
    assert why_not(driver, OFFLOAD, Purpose.SUBMITTED) is None


def test_what_is_no_more_than_the_users_own_has_run_already(made: Made) -> None:
    driver = made(free=1)
    driver._admission.profiled(MODEL, OFFLOAD)
    assert why_not(driver, OFFLOAD) is None
    assert why_not(driver, {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}) is not None


def test_a_confirming_trial_waits_for_no_room_either(made: Made) -> None:
    assert why_not(made(free=1), OFFLOAD, Purpose.CONFIRM) is not None


def test_on_a_cpu_there_is_one_memory(made: Made) -> None:
    assert why_not(made("cpu", free=1), OFFLOAD) is None


def test_a_trial_that_offloads_runs_alone(made: Made) -> None:
    driver = made(max_trials=30, settings={"trials_per_random_config": 1})
    running: dict[int, Candidate] = {}
    had_company = waited = alone = 0
    while work := driver.next_work(driver.setup.concurrency - len(running)) or running:
        for each in work if isinstance(work, list) else []:
            running[each.numbers[0]] = each.plans[0].candidate
        count = sum(map(offloads, running.values()))
        assert count == 0 or len(running) == 1
        alone, had_company = alone + count, max(had_company, len(running))
        waited += bool(driver._admission.waiting)
        number = next(iter(running))
        running.pop(number)
        driver.tell(ended(number, metrics={"FLOPS_per_gpu": 1.0 * number, "throughput": 1.0}))
    assert alone > 1
    assert waited > 1
    assert had_company > 1


def test_on_a_cpu_trials_that_offload_run_beside_others(made: Made) -> None:
    driver = made("cpu", max_trials=30, settings={"trials_per_random_config": 1})
    work = driver.next_work(driver.setup.concurrency)
    assert len(work) == driver.setup.concurrency
    assert any(offloads(each.plans[0].candidate) for each in work)


def test_a_deadline_grows_with_what_is_offloaded(made: Made) -> None:
    plain = {"zero_optimization": {"stage": 2}}
    longer = plan(made(), OFFLOAD).deadline_s - plan(made(free=199 * GIB), plain).deadline_s
    assert longer > 5 * NEEDED / 1e9
    assert plan(made("cpu"), OFFLOAD).deadline_s == plan(made("cpu", free=1), plain).deadline_s
