"""What a study takes from a plan: the devices that are nearest, the arms' order and memory, and what it says."""

from dataclasses import asdict, replace

import pytest

from tests.plan_fixtures import GIB, arm_by_hand, devices_by_hand, plan_by_hand, plan_folder, span
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.foreseen_run import OPERATIONS, Operation
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.plan.devices import known_devices
from zerotune.trial_lib.plan.plan_record import PlanPaths, read_run, write_run
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.search.zero_settings import arm_key
from zerotune.trial_lib.study.study_plan import devices_for, plan_for, study_plan

KNOWN = known_devices()
H100 = Host(
    "cuda",
    [str(slot) for slot in range(8)],
    int(79.1 * GIB),
    models={f"GPU-{slot}": "NVIDIA H100 80GB HBM3" for slot in range(8)},
)
CPU = Host("cpu", [str(slot) for slot in range(8)], 4 * GIB)
CONFIG = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "train_micro_batch_size_per_gpu": 1}
MODEL = ModelProfile(
    num_params=8_030_261_248,
    trainable_num_params=8_030_261_248,
    activation_mem_per_gpu=GIB,
    gpu_mem=78 * GIB,
    data_parallel_size=8,
    flops_per_sample=1e12,
)


def arm(label, micro_batch, stage, **more):
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    if "offload" in label:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    return arm_by_hand(label, micro_batch, 20.0, 20.0, ds_config=config, **more)


def devices(name, memory, nodes=1, per_node=8, **more):
    arms = (
        arm("z3", 4, 3, runs=("z3-mbs1-of8", "z3-mbs2-of8"), speeds={1: 10.0, 4: 20.0}),
        arm("z2", 2, 2),
        arm("z3-offload-optimizer", 4, 3, runs=("z3-offload-optimizer-mbs4-of8",)),
        arm("z0", 0, 0, peak=span(128 * GIB, 0.05)),
        arm("z1", 0, 1, peak=span(80 * GIB, 0.1), fits=0.2),
    )
    found = devices_by_hand(name, memory, nodes, arms=arms, **more)
    return found.model_copy(update={"per_node": per_node, "figures": asdict(KNOWN[name])})


def record(*asked):
    return plan_by_hand(devices=asked, best=0, ds_config={**CONFIG, "zero_optimization": {"stage": 2}})


def with_work(run):
    """Returns a run by hand with a product of matrices in each moment, which grows with the micro-batch."""
    product = Operation(OPERATIONS.index("matmul"), 0, 4e13 * run.micro_batch, 1e9 * run.micro_batch)
    moments = tuple(moment._replace(operation=place) for place, moment in enumerate(run.moments))
    return replace(run, moments=moments, operations=(product,) * len(moments))


@pytest.fixture
def opened(tmp_path):
    """The plan of a study on a host, from a folder with the runs."""

    def open_it(plan, host, slots=8):
        paths = plan_folder(tmp_path, plan_for(plan, host, slots))
        for each in plan.devices[0].arms:
            for name in each.runs:
                run = read_run(paths.run(name))
                config = {**each.ds_config, "train_micro_batch_size_per_gpu": run.micro_batch}
                write_run(paths.run(name), with_work(replace(run, ds_config=config)))
        return study_plan(tmp_path, host, slots)

    return open_it


def test_the_kind_of_device_decides_then_the_number_then_the_answer():
    a100, h100, small = devices("a100-40gb", 39.4), devices("h100-80gb", 79.1, nodes=2), devices("h100-80gb", 79.1)
    assert devices_for(record(a100, h100, small), H100, 8) == (small, True)
    assert devices_for(record(a100, h100), H100, 8) == (h100, True)
    assert devices_for(record(a100), H100, 8) == (a100, False)
    assert devices_for(record(h100, a100), CPU, 8) == (a100, False)
    assert devices_for(record(h100, small), CPU, 2) == (small, False)


def test_a_device_of_the_users_own_file_is_known_by_its_figures():
    own = devices("h100-80gb", 79.1).model_copy(
        update={"device": "our-cluster", "figures": {**asdict(KNOWN["h100-80gb"]), "name": "our-cluster"}}
    )
    assert devices_for(record(devices("a100-40gb", 39.4), own), H100, 8) == (own, True)


def test_the_arms_come_in_the_plans_order_and_those_without_room_say_why(opened):
    plan = opened(record(devices("a100-40gb", 39.4), devices("h100-80gb", 79.1)), H100)
    assert [each.label for each in plan.expected if each.is_first] == ["z3"]
    assert [each.label for each in plan.expected if each.no_room] == ["z0"]
    assert next(each for each in plan.expected if each.label == "z0").no_room == (
        "it needs 128.0 GiB of 79.1 GiB on h100-80gb."
    )
    assert plan.expected[0].key == arm_key({**CONFIG, "zero_optimization": {"stage": 3}})
    # Of a plan's sizes that were timed, a search knows how fast each is.
    assert plan.expected[0].speeds == {1: 10.0, 4: 20.0}
    assert plan.expected[0].costs.sizes == [1, 4]
    (said,) = plan.told()
    assert "for these devices. It tries z3 first, with a micro-batch of 4" in said


def test_a_plan_that_refused_itself_does_not_say_that_nothing_fits(opened):
    refused = devices("h100-80gb", 79.1).model_copy(update={"best": "", "contradiction": "The row z3 is faster."})
    (said,) = opened(record(refused), H100).told()
    assert said.endswith("for these devices. Its speeds contradict themselves.")


def test_a_plan_for_other_devices_rules_nothing_out(opened):
    plan = opened(record(devices("h100-80gb", 79.1)), CPU)
    assert not any(each.no_room for each in plan.expected)
    assert plan.cluster is None
    assert any("no speeds" in sentence for sentence in plan.told())
    # More devices of the same kind may have room.
    assert not any(each.no_room for each in opened(record(devices("h100-80gb", 79.1, per_node=4)), H100).expected)


def test_the_memory_of_the_arms_is_that_of_the_number_of_slots(opened):
    plan = record(devices("h100-80gb", 79.1))
    whole, half = opened(plan, H100), opened(plan, H100, 4)
    offloads = [dict(arm_key(each.ds_config))["offload_optimizer"] for each in whole.foreseen]
    assert offloads == ["none", "cpu"]
    of_whole, of_half = (one.foreseen[offloads.index("none")] for one in (whole, half))
    assert of_half.initialize.constant > 1.5 * of_whole.initialize.constant


def test_the_replicas_of_a_pipeline_in_the_code_are_those_of_its_runs(opened, tmp_path):
    plan = opened(record(devices("h100-80gb", 79.1)), H100)
    assert plan.replicas == 8
    for file in PlanPaths(tmp_path).runs.iterdir():
        write_run(file, replace(read_run(file), world=8, replicas=4))
    assert [study_plan(tmp_path, H100, slots).replicas for slots in (8, 4)] == [4, 2]


def test_a_plan_without_its_runs_gives_an_order_alone(opened, tmp_path):
    plan = record(devices("h100-80gb", 79.1))
    opened(plan, H100)
    for file in (tmp_path / "runs").iterdir():
        file.unlink()
    found = study_plan(tmp_path, H100, 8)
    assert found.foreseen == ()
    assert found.expected[0].is_first
    assert any("without its folder `runs`" in sentence for sentence in found.told())


def test_a_damaged_run_is_told(opened, tmp_path):
    opened(record(devices("h100-80gb", 79.1)), H100)
    (tmp_path / "runs" / "z3-mbs1-of8.json.gz").write_bytes(b"no")
    with pytest.raises(InputError, match="foreseen run is damaged"):
        study_plan(tmp_path, H100, 8)


def test_a_study_without_a_plan_has_none(tmp_path):
    assert study_plan(tmp_path, H100, 8) is None


def test_the_plan_of_another_program_says_how_it_differs(opened):
    plan = opened(record(devices("h100-80gb", 79.1)), H100)
    base = {**CONFIG, "zero_optimization": {"stage": 1}}
    assert plan.unlike(MODEL, base) == ""
    small = replace(MODEL, num_params=1_000)
    assert plan.unlike(small, base) == "is for a model with 8,030,261,248 parameters, and this one has 1,000"
    # Of a pipeline, a plan knows the first stage alone.
    assert plan.unlike(replace(small, pipeline_parallel=True), base) == ""
    other = "is for parameters of 16 bits, and this configuration has 32 bits"
    assert plan.unlike(MODEL, {"optimizer": {"type": "AdamW"}}) == other
    said = plan.left_out(other)
    assert said.startswith(f"The study goes on without the plan {plan.record.plan_id}, because the plan {other}.")
    assert "It was made for: deepspeed --num_gpus 8 train.py" in said


def test_samples_of_other_shapes_are_found_by_their_work(opened):
    own = devices("h100-80gb", 79.1)
    own = own.model_copy(update={"arms": tuple(each.model_copy(update={"is_own": True}) for each in own.arms[:1])})
    plan = opened(record(own), H100)
    # The run by hand has one product of 4e13 FLOPs a sample in each forward and each backward pass, on eight ranks.
    work = replace(MODEL, flops_per_sample=8e13)
    assert plan.unlike(work, CONFIG) == ""
    # Recomputed activations make a plan's samples look heavier.
    assert plan.unlike(replace(MODEL, flops_per_sample=6e13), CONFIG) == ""
    for flops in (2e13, 3.2e14):
        said = plan.unlike(replace(MODEL, flops_per_sample=flops), CONFIG)
        assert said == f"is for samples of 8e+13 FLOPs, and these take {flops:.2g}, so they have other shapes"


def test_the_step_of_a_trial_is_foreseen_at_its_own_size(opened):
    plan = opened(record(devices("h100-80gb", 79.1)), H100)
    base = {**CONFIG, "zero_optimization": {"stage": 2}}

    def of(stage, **more):
        knobs = {"zero_optimization": {"stage": stage, "overlap_comm": True}}
        return plan.run_of(Candidate(knobs=knobs, micro_batch_size=8, slots=8, data_parallel_size=8, **more), base)

    label, run = of(3, gradient_accumulation_steps=2)
    assert (label, run.micro_batch, run.accumulation, run.replicas) == ("z3", 8, 2, 8)
    assert run.ds_config["zero_optimization"]["overlap_comm"] is True
    assert of(1) is None
