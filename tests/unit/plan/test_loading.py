from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan.pretended_runs import pretended_run
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.answer import is_bound_by_loading
from zerotune.trial_lib.plan.arms import PlanArm
from zerotune.trial_lib.plan.devices import Cluster, known_devices, read_devices
from zerotune.trial_lib.plan.evaluation import Evaluation, best_arm
from zerotune.trial_lib.plan.scaling import ArmRuns, at_size, with_common_loading
from zerotune.trial_lib.plan.step_time import planned_step
from zerotune.trial_lib.search.sizes import BatchPolicy


def run(size: int, *seconds: float) -> ForeseenRun:
    return ForeseenRun(world=8, micro_batch=size, loading_s=seconds)


def arm(name: str, small: ForeseenRun, large: ForeseenRun | None = None, **switches: Any) -> ArmRuns:
    return ArmRuns(PlanArm(name, {"zerotune": switches} if switches else {}), small, large)


def test_all_arms_load_a_sample_in_the_same_time_however_disturbed_one_of_them_was() -> None:
    arms = [arm("z0", run(1, 0.9, 0.8)), arm("z1", run(1, 0.01, 0.03), run(2, 0.06, 0.08)), arm("z2", run(1, 0.02))]
    first, second, _ = with_common_loading(arms)
    assert first.small.loading_s == second.small.loading_s == (0.03,)
    assert second.large is not None
    assert second.large.loading_s == (0.06,)


def test_loading_grows_with_the_micro_batch_from_nothing() -> None:
    (one,) = with_common_loading([arm("z1", run(4, 0.04), run(8, 0.02))])
    for size in (1, 2, 16):
        assert one.step_at(1, size, 1).loading_s == (pytest.approx(size * 0.00625),)


def test_a_program_whose_loading_was_not_seen_has_no_loading_time() -> None:
    (one,) = with_common_loading([arm("z0", ForeseenRun(world=8))])
    assert one.small.loading_s == ()


@pytest.mark.parametrize("lacks", ["small", "large"])
def test_a_size_that_was_not_run_loads_if_one_of_the_runs_has_shown_it(lacks: str) -> None:
    small, large = (pretended_run({}, 8, size) for size in (2, 4))
    small, large = replace(small, loading_s=(0.02,)), replace(large, loading_s=(0.04,))
    if lacks == "small":
        small = replace(small, loading_s=())
    else:
        large = replace(large, loading_s=())
    assert at_size(small, large, 3).loading_s == pytest.approx((0.03,))
    assert at_size(small, large, 16).loading_s == pytest.approx((0.16,))


def _bound_by_loading(typed: tuple[int, int], seconds: float = 30.0) -> Evaluation:
    (asked,) = read_devices(["h100-80gb:8"], [], known_devices())
    small, large = (replace(pretended_run({}, 8, size), loading_s=(seconds * size,)) for size in (1, 2))
    runs = ArmRuns(PlanArm("z0", {}, is_own=True), small, large)
    return Evaluation(runs=runs, asked=asked, policy=BatchPolicy(64, 1, 8), typed=typed)


def test_a_tie_under_the_loaders_limit_goes_to_what_was_typed() -> None:
    for size in (1, 2, 4, 8):
        row = _bound_by_loading((size, 8 // size)).planned()
        assert (row.micro_batch, row.accumulation, row.is_typed) == (size, 8 // size, True)
        assert row.samples_per_s is not None
        assert row.speeds[size] == row.samples_per_s.value
    assert not _bound_by_loading((4, 1)).planned().is_typed


def test_a_row_that_loading_binds_has_the_speed_without_it() -> None:
    row, unbound = _bound_by_loading((4, 2)).planned(), _bound_by_loading((4, 2), seconds=1e-6).planned()
    assert is_bound_by_loading(row)
    assert not is_bound_by_loading(unbound)
    assert unbound.samples_per_s is not None
    assert row.without_loading == pytest.approx(unbound.samples_per_s.value, rel=0.05)


def test_a_tie_of_arms_goes_to_the_users_own() -> None:
    own = _bound_by_loading((4, 2)).planned()
    other = own.model_copy(update={"label": "z1", "is_own": False})
    assert best_arm([other, own]) == best_arm([own, other]) == "z0"


def test_batches_of_a_token_budget_count_as_they_arrive() -> None:
    cluster = Cluster(device=known_devices()["h100-80gb"], hosts=1, per_host=8)
    run = pretended_run({}, 8, 1)
    as_asked, as_arrived = planned_step(run, cluster), planned_step(replace(run, rows=24.0), cluster)
    assert as_arrived.seconds == as_asked.seconds
    assert as_arrived.samples_per_s == pytest.approx(24 * as_asked.samples_per_s)
