"""One arm on one cluster: what fits, what is fastest, what it costs."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.plan.pretended_runs import MIB, pretended_run
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.arm_work import hopeless_arms
from zerotune.trial_lib.plan.arms import PlanArm
from zerotune.trial_lib.plan.device_memory import AllocatorSettings
from zerotune.trial_lib.plan.devices import known_devices, read_devices
from zerotune.trial_lib.plan.evaluation import Evaluation, best_arm, counted, host_room, in_order, unlike_measured
from zerotune.trial_lib.plan.fits import UNLIKE
from zerotune.trial_lib.plan.plan_record import PlannedArm
from zerotune.trial_lib.plan.scaling import ArmRuns, divided_anew
from zerotune.trial_lib.search.sizes import BatchPolicy

GIB = 2.0**30
KNOWN = known_devices()


def _evaluation(stage: int, on: str = "a100-40gb:8", price: float | None = None, **zero: Any) -> Evaluation:
    (asked,) = read_devices([on], [f"{on.partition(':')[0]}={price}"] if price else [], KNOWN)
    config = {"zero_optimization": {"stage": stage, **zero}}
    small, large, wider = pretended_run(config, 8, 1), pretended_run(config, 8, 2), pretended_run(config, 16, 1)
    runs = ArmRuns(PlanArm(f"z{stage}", config), small, large, wider, ("a", "b"))
    return Evaluation(runs=runs, asked=asked, policy=BatchPolicy(asked.count * 64, 1, asked.count))


def test_a_larger_stage_leaves_room_for_a_larger_micro_batch() -> None:
    sizes = [_evaluation(stage).largest for stage in (0, 1, 2, 3)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[3]


def test_what_fits_is_what_the_memory_says() -> None:
    evaluation = _evaluation(1)
    largest = evaluation.largest
    assert evaluation.fits(largest) >= 0.5 > evaluation.fits(2 * largest)
    row = evaluation.planned()
    assert row.peak is not None
    assert row.peak.low < row.peak.value < row.peak.high
    assert row.fits >= 0.8
    assert row.micro_batch * row.accumulation * 8 == 512
    assert row.ds_config["train_batch_size"] == 512
    assert row.memory["logits"] == pytest.approx(row.micro_batch * 500 * MIB, rel=0.01)
    assert sum(row.memory.values()) == pytest.approx(row.peak.value, rel=0.01)


def test_an_interval_is_wider_where_nothing_like_it_was_measured() -> None:
    known, other = _evaluation(1, "h100-80gb:8"), _evaluation(1, "mi300x-192gb:8")
    shares = [each.deviation / each.mean for each in (other.forecast(8).allocated, known.forecast(8).allocated)]
    assert shares[0] == pytest.approx(UNLIKE * shares[1])
    run = replace(known.runs.small, tokens=2048)
    assert unlike_measured(run, known.asked) == ()
    (sentence,) = unlike_measured(replace(run, tokens=None, modules=("", "mlp.experts.0")), other.asked)
    assert "No peak of batches without tokens or of experts or of mi300x-192gb" in sentence


def test_the_users_settings_of_the_allocator_count() -> None:
    evaluation = _evaluation(1)
    rounded = replace(evaluation, allocator=AllocatorSettings(roundup_power2_divisions=((0, 2),)))
    # Parameters of 2 GB are rounded to 2 GiB, and so on.
    assert rounded.memory.at(1).needed.mean > evaluation.memory.at(1).needed.mean + 0.1 * GIB


def test_a_device_of_the_users_own_has_the_workspaces_of_its_kind_whatever_its_name() -> None:
    hopper = _evaluation(1, "h100-80gb:8")
    own = replace(hopper.asked.cluster.device, name="ours")
    named = replace(hopper, asked=replace(hopper.asked, cluster=replace(hopper.asked.cluster, device=own)))
    older = replace(
        named, asked=replace(named.asked, cluster=replace(named.asked.cluster, device=replace(own, capability=8.0)))
    )
    assert named.memory.at(1).needed.mean == hopper.memory.at(1).needed.mean
    # Two workspaces of cuBLAS: 32 MiB each from Hopper on, and 8,320 KiB before.
    assert named.memory.at(1).needed.mean - older.memory.at(1).needed.mean == pytest.approx(
        2 * (32 - 8.125) * MIB, rel=0.2
    )


def test_speed_comes_with_an_interval_and_a_price() -> None:
    row = _evaluation(2, "h100-80gb:8", price=2.0).planned()
    assert row.samples_per_s is not None
    assert row.tokens_per_s is not None
    assert row.cost is not None
    assert row.samples_per_s.low < row.samples_per_s.value < row.samples_per_s.high
    assert row.tokens_per_s.value == pytest.approx(2048 * row.samples_per_s.value)
    assert row.cost.value == pytest.approx(2.0 * 8 / 3600 * 1e9 / row.tokens_per_s.value)
    assert row.cost.low < row.cost.value < row.cost.high
    assert row.mfu is not None
    assert 0 < row.mfu.value < 1


def test_states_are_divided_over_other_numbers_of_devices() -> None:
    eight, sixteen = _evaluation(3), _evaluation(3, "a100-40gb:2x8")
    first, second = eight.memory.at(1).live.peak, sixteen.memory.at(1).live.peak
    assert first - second == pytest.approx(16 * 10**9 * (1 / 8 - 1 / 16), rel=0.02)
    assert sixteen.planned().is_scaled
    assert not eight.planned().is_scaled


def test_without_a_run_on_another_number_the_formula_divides_what_the_stage_partitions() -> None:
    config = {"zero_optimization": {"stage": 2}}
    divided = divided_anew(pretended_run(config, 8, 1), 16)
    expected = pretended_run(config, 16, 1)
    assert [each.size for each in divided.storages] == pytest.approx([each.size for each in expected.storages], abs=1)
    assert divided.world == divided.replicas == 16


def test_offloaded_states_need_room_on_the_host() -> None:
    evaluation = _evaluation(2, offload_optimizer={"device": "cpu"})
    assert evaluation.on_host.held == 2**31  # 1.5 GB, pinned as a power of two
    assert evaluation.host_fits > 0.99
    assert evaluation.planned().seconds["host_update"] > 0


def test_a_stopped_arm_says_why_and_stands_last() -> None:
    stopped = PlannedArm(label="z3", stopped="no fake of the operator")
    fast, slow = _evaluation(1, "h100-80gb:8").planned(), _evaluation(3, "h100-80gb:8").planned()
    none = PlannedArm(label="z0", peak=fast.peak)
    assert [arm.label for arm in in_order([stopped, none, slow, fast])][2:] == ["z0", "z3"]
    assert best_arm([stopped, none]) == ""
    assert best_arm([stopped, none, fast]) == "z1"


def test_a_program_of_one_size_is_judged_at_that_size() -> None:
    config = {"zero_optimization": {"stage": 2}}
    (asked,) = read_devices(["h100-80gb:8"], [], KNOWN)
    runs = ArmRuns(PlanArm("z2", config), pretended_run(config, 8, 4))
    evaluation = Evaluation(runs=runs, asked=asked, policy=BatchPolicy(256, 1, 8))
    assert evaluation.sizes == (4,)
    assert evaluation.planned().largest_micro_batch == 4


def test_a_count_whose_batch_has_no_known_size_has_the_next_batch_with_it() -> None:
    (asked,) = read_devices(["a100-40gb:8"], [], KNOWN)
    runs = ArmRuns(PlanArm("z0", {}), pretended_run({}, 8, 8), names=("a",))
    evaluation = Evaluation(runs=runs, asked=asked, policy=BatchPolicy(64, 1, 8))
    counts = counted([evaluation], lambda count, size: BatchPolicy(64 if size is None else count * size, 1, count))
    assert [each.devices for each in counts] == [2**power for power in range(11)]
    assert {each.micro_batch for each in counts} == {8}
    assert [each.other_batch for each in counts] == [None] * 4 + [8 * 2**power for power in range(4, 11)]


def test_one_device_of_a_host_has_its_share_of_the_hosts_memory() -> None:
    one, all_eight = (read_devices([f"a100-40gb:{count}"], [], KNOWN)[0] for count in (1, 8))
    assert host_room(one) == host_room(all_eight) < KNOWN["a100-40gb"].host_memory


def test_an_offloaded_arm_is_not_hopeless_for_gradients_that_go_to_the_host() -> None:
    config = {"zero_optimization": {"stage": 2}}
    (asked,) = read_devices(["rtx4090-24gb:1"], [], KNOWN)
    run = pretended_run(config, 1, 1, parameters=9 * 10**9)
    offloaded = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    arms = [PlanArm("z2-offload-optimizer", offloaded), PlanArm("z0", {})]
    assert [arm.label for arm in hopeless_arms(arms, run, [asked], 0.0)] == ["z0"]


def _of_pipeline(stages: int) -> Evaluation:
    """Two replicas, and a global batch of 48: 24 samples for each, in micro-batches of 1 to 8."""
    (asked,) = read_devices([f"a100-80gb:{2 * stages}"], [], KNOWN)
    small, large = (
        replace(pretended_run({}, 2 * stages, size), replicas=2, is_pipeline=True, pipeline_stages=stages)
        for size in (1, 2)
    )
    policy = BatchPolicy(48, 1, 2, max_micro_batch=8)
    return Evaluation(runs=ArmRuns(PlanArm("z0", {}), small, large), asked=asked, policy=policy)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_a_pipeline_takes_the_micro_batch_that_is_fastest_with_its_bubble(stages: int) -> None:
    evaluation = _of_pipeline(stages)
    assert evaluation.sizes == (1, 2, 3, 4, 6, 8)
    speeds = {size: evaluation.step(size).samples_per_s for size in evaluation.sizes}
    fastest, step = evaluation.best
    assert step is not None
    assert step.samples_per_s == speeds[fastest] == max(speeds.values())

    def policy_on(count: int, size: int | None) -> BatchPolicy:
        if count % stages:
            raise InputError("A replica has all stages.", where="--on", remedy="Ask for more devices.")
        return BatchPolicy(48, 1, count // stages, max_micro_batch=8)

    counts = counted([evaluation], policy_on)
    assert next(each.micro_batch for each in counts if each.devices == 2 * stages) == fastest


def test_more_stages_want_smaller_micro_batches() -> None:
    fastest = [_of_pipeline(stages).best[0] for stages in (1, 2, 4, 8)]
    assert fastest == sorted(fastest, reverse=True)
    assert fastest[0] == 8 > fastest[-1]
