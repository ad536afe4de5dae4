from typing import Any

import pytest

from trial_lib.foresee.plan.arm_runs import ArmRuns, with_common_loading
from trial_lib.foresee.plan.arms import PlanArm
from trial_lib.wire.foreseen_run import ForeseenRun


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
