import math

import pytest
from synthetic import TWO, carried, moving, product, run_of

from benchmarks.foresee.public_gpus.speed import changed
from benchmarks.gpu.refit import MeasuredStep, refit
from zerotune.trial_lib.plan.devices import Efficiencies
from zerotune.trial_lib.plan.step_time import planned_step

RUNS = [
    run_of(("forward", [product(1.0), moving(0.2)]), ("update", [])),
    run_of(("forward", [product(0.3), moving(1.0)]), ("update", [])),
    run_of(("forward", [product(0.5), moving(0.5)]), ("backward", [carried(1.0, "all_reduce")]), ("update", [])),
    run_of(("forward", [product(0.5)]), ("backward", [carried(3.0, "all_reduce")]), ("update", [])),
]
TRUE = changed(Efficiencies(), {"matmul": -0.2, "memory": 0.15, "link": -0.3})


def measured_with(constants: Efficiencies, noise: float = 0.06) -> list[MeasuredStep]:
    return [MeasuredStep(run, TWO, planned_step(run, TWO, constants).seconds, noise) for run in RUNS]


def test_measured_steps_bring_the_constants_nearer() -> None:
    found = refit(measured_with(TRUE, 0.01))
    for name in ("matmul", "memory", "link"):
        before, after, true = (getattr(each, name).value for each in (Efficiencies(), found, TRUE))
        assert abs(math.log(after / true)) < 0.5 * abs(math.log(before / true))
        assert getattr(found, name).spread < getattr(Efficiencies(), name).spread
    for each in measured_with(TRUE):
        assert planned_step(each.run, each.cluster, found).seconds == pytest.approx(each.seconds, rel=0.02)


def test_what_no_step_depends_on_stays() -> None:
    found = refit(measured_with(TRUE))
    for name in ("network", "attention", "host_update"):
        assert getattr(found, name).value == pytest.approx(getattr(Efficiencies(), name).value)
        assert getattr(found, name).spread == pytest.approx(getattr(Efficiencies(), name).spread)


def test_the_interval_of_a_measured_device_is_narrower() -> None:
    before, after = planned_step(RUNS[2], TWO), planned_step(RUNS[2], TWO, refit(measured_with(TRUE)))
    assert after.high / after.low < before.high / before.low
    assert refit([]) == Efficiencies()
