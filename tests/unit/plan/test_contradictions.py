"""What cannot be is no answer: an arm that grows as none does, and speeds that contradict themselves."""

from dataclasses import replace

import pytest

from tests.unit.plan.test_planning import Foresees, problem_of
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.devices import Constant, Efficiencies
from zerotune.trial_lib.plan.planning import WantedRun, plan
from zerotune.trial_lib.plan.step_time import planned_step


def _with_flops(run: ForeseenRun, times: float) -> ForeseenRun:
    return replace(run, operations=tuple(each.with_work(times * each.flops, each.moved) for each in run.operations))


class _OfLongRuns(Foresees):
    """A program whose runs take long, and whose stage 3 has operations of its own."""

    def __call__(self, run: WantedRun) -> ForeseenRun:
        found = super().__call__(run)
        return replace(_with_flops(found, 1.2 if found.stage == 3 else 1.0), seconds=60.0)


def test_an_arm_that_grows_as_no_other_does_is_run_at_both_sizes() -> None:
    foresee = _OfLongRuns()
    plan(problem_of("h100-80gb:8"), foresee)
    names = {run.name for run in foresee.wanted}
    assert {"z0-mbs1-of8", "z0-mbs2-of8", "z3-mbs1-of8", "z3-mbs2-of8"} <= names
    # Stage 2 grows as the user's own arm does, and stage 3 with offload as stage 3.
    assert not {"z2-mbs2-of8", "z3-offload-optimizer-mbs2-of8"} & names


class _OfFasterStages(Foresees):
    """Stage 3 does a share of the work, which cannot be, unless other code explains it."""

    def __init__(self, of_3: float = 0.5) -> None:
        super().__init__()
        self._of_3 = of_3

    def __call__(self, run: WantedRun) -> ForeseenRun:
        found = super().__call__(run)
        share = self._of_3 if found.stage == 3 else 1.0
        return replace(
            found, operations=tuple(each.with_work(share * each.flops, each.moved) for each in found.operations)
        )


def test_a_plan_in_which_more_communication_is_faster_refuses_itself() -> None:
    (one,) = plan(problem_of("h200-141gb:1"), _OfFasterStages()).devices
    assert (one.best, one.counts) == ("", ())
    assert {arm.samples_per_s for arm in one.arms} == {None}
    assert "no answer" in one.answer
    assert "The row z3 is" in one.answer
    assert "with the same micro-batch" in one.answer
    (sound,) = plan(problem_of("h200-141gb:1"), Foresees()).devices
    assert one.fewest == sound.fewest == 1
    assert sound.contradiction == ""
    assert sound.chosen is not None


@pytest.mark.parametrize(("share", "refuses"), [(0.9, False), (0.65, True)])
def test_a_difference_within_the_interval_of_a_time_contradicts_nothing(share: float, refuses: bool) -> None:
    # 0.65: stage 3 of a LoRA was once foreseen 1.55 times as fast as stage 0.
    (one,) = plan(problem_of("h200-141gb:1"), _OfFasterStages(share)).devices
    assert bool(one.contradiction) == refuses


def test_what_steps_of_a_device_have_in_common_sets_none_of_them_apart() -> None:
    (asked,) = problem_of("h200-141gb:1").asked
    run = Foresees()(WantedRun(name="z0", asked=asked))
    surely, hardly = (Efficiencies(whole=Constant(1.0, spread)) for spread in (0.01, 0.9))
    sure, unsure = (planned_step(run, asked.cluster, each) for each in (surely, hardly))
    assert sure.apart == unsure.apart
    assert 1.0 < sure.apart < sure.high / sure.seconds < unsure.high / unsure.seconds


class _OfFasterOffload(Foresees):
    def __call__(self, run: WantedRun) -> ForeseenRun:
        found = super().__call__(run)
        is_slow = "offload_optimizer" not in found.ds_config["zero_optimization"]
        return replace(
            found,
            operations=tuple(each.with_work((1 + 9 * is_slow) * each.flops, each.moved) for each in found.operations),
        )


def test_a_plan_in_which_an_offload_is_faster_refuses_itself() -> None:
    (eight,) = plan(problem_of("h200-141gb:8"), _OfFasterOffload()).devices
    assert "offloads more" in eight.answer


def test_a_plan_whose_kernels_are_faster_than_any_refuses_itself() -> None:
    (asked,) = problem_of("h100-80gb:8").asked
    fast = replace(asked.cluster.device, attained=4.0, bandwidth=1e15)
    problem = replace(problem_of("h100-80gb:8"), asked=(replace(asked, cluster=replace(asked.cluster, device=fast)),))
    assert plan(problem, Foresees()).devices[0].contradiction.endswith("no kernel reaches.")
