from dataclasses import replace

import pytest

from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.search.allocations import allocations
from zerotune.trial_lib.search.zero_settings import ZeroSettings

PROFILE = ModelProfile(
    num_params=1000,
    trainable_num_params=800,
    activation_mem_per_gpu=50,
    gpu_mem=10**6,
    data_parallel_size=4,
    flops_per_sample=1.0,
)
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
BF16 = {"bf16": {"enabled": True}}
IN_PLACE = {"optimizer": {"type": "Adam"}}
TORCH_ADAM = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}


def allocate(stage, device="cuda", size=1, slots=4, profile=PROFILE, base=None, by_code=None, **zero):
    zero = {"reduce_bucket_size": 100, "stage3_prefetch_bucket_size": 0, "overlap_comm": False, **zero}
    settings = ZeroSettings.of({**IN_PLACE, **(base or {}), "zero_optimization": {"stage": stage, **zero}}, by_code)
    return allocations(settings, ZeroSettings.of({}, by_code), profile, slots, device, size)


def test_without_zero_gradients_and_states_come_with_the_first_steps():
    needed = allocate(0)
    assert needed.initialize == 4 * 1000
    assert needed.states == (4 + 8) * 800
    assert needed.buffers == 4 * 800  # the flat copy that is reduced


def test_a_model_that_the_code_makes_16_bit_wide_has_no_other_copy_until_zero_makes_one():
    plain = allocate(0, by_code=2)
    assert plain.initialize == 2 * 1000
    assert plain.states == (2 + 4) * 800
    assert allocate(1, by_code=2).initialize == 2 * 1000 + 4 * 800 / 4
    # DeepSpeed takes the model for one of 32 bits, and adds gradients up so.
    assert allocate(1, by_code=2).late_states == 4 * 800
    assert allocate(2, by_code=2).late_states == 4 * 200
    assert allocate(3, by_code=2).all_states == 2 * 250 + 4 * 200 + (4 + 8) * 200
    assert allocate(2, by_code=2, overlap_comm=True).buffers - allocate(2, by_code=2).buffers == 2 * 100
    assert allocate(1, by_code=2, overlap_comm=True).buffers - allocate(1, by_code=2).buffers == 4 * 100
    assert {allocate(stage, by_code=2).activations for stage in range(4)} == {50}
    assert allocate(0, by_code=2, base=BF16).activations == 50
    assert allocate(0, by_code=4) == allocate(0)


def test_one_device_reduces_nothing():
    assert allocate(0, slots=1).buffers == 0


def test_a_higher_stage_keeps_less():
    kept = [allocate(stage, contiguous_gradients=False) for stage in range(4)]
    totals = [needed.initialize + needed.states for needed in kept]
    assert totals == sorted(totals, reverse=True)


def test_stage_1_keeps_every_gradient_and_stage_2_those_of_its_share():
    assert allocate(1).states - allocate(2).states == 4 * (800 - 200)


def test_offloaded_states_leave_the_device_but_not_a_cpu():
    for stage in (1, 2, 3):
        on_cuda, offloaded = allocate(stage), allocate(stage, **OFFLOAD)
        assert offloaded.initialize + offloaded.states < on_cuda.initialize + on_cuda.states
        on_cpu, still_there = allocate(stage, device="cpu"), allocate(stage, device="cpu", **OFFLOAD)
        assert still_there.initialize + still_there.states >= on_cpu.initialize + on_cpu.states


def test_offloaded_parameters_leave_the_device():
    plain = allocate(3, **OFFLOAD)
    assert plain.initialize - allocate(3, offload_param={"device": "cpu"}, **OFFLOAD).initialize == 4 * 1000 / 4


@pytest.mark.parametrize("stage", [1, 2])
def test_overlapping_communication_takes_a_second_bucket(stage):
    assert allocate(stage, overlap_comm=True).buffers - allocate(stage).buffers == 4 * 100


def test_a_cuda_bucket_is_taken_whole_and_a_cpu_bucket_as_far_as_it_is_filled():
    def bucket(device, **zero):
        with_bucket = allocate(2, device, reduce_bucket_size=5000, **zero)
        return with_bucket.buffers - allocate(2, device, reduce_bucket_size=5000, contiguous_gradients=False).buffers

    assert bucket("cuda") == 4 * 5000
    assert bucket("cpu") == 4 * 800
    # Two that take turns have each gradient once between them.
    assert bucket("cpu", overlap_comm=True) == 4 * 800
    assert bucket("cuda", overlap_comm=True) == 2 * 4 * 5000
    # The limit counts what is not resident as well.
    assert allocate(2, "cpu", reduce_bucket_size=5000).limit_correction == 4 * (5000 - 800)


def test_offload_has_a_bucket_whatever_the_configuration_says():
    assert allocate(2, contiguous_gradients=False, **OFFLOAD) == allocate(2, **OFFLOAD)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_reduced_in_a_flat_copy_of_what_fills_a_bucket(stage):
    def late(device, bucket):
        return allocate(stage, device, reduce_bucket_size=bucket, contiguous_gradients=False).late_buffers

    def more(device, small, large):
        return late(device, large) - late(device, small)

    assert more("cuda", 100, 300) == 4 * 200
    assert more("cuda", 800, 5000) == 0
    # A CPU's collective takes half as much again.
    assert more("cpu", 100, 300) == 1.5 * 4 * 200


def test_stage_3_has_its_bucket_from_the_beginning():
    small, large = allocate(3), allocate(3, reduce_bucket_size=500)
    assert large.initialize - small.initialize == 4 * 400
    assert large.buffers - small.buffers == 4 * 400  # the flat copy
    assert large.all_states == small.all_states == 4 * 250 + (4 + 4 + 8) * 200


def test_on_a_cpu_stage_3_fills_in_its_steps_what_the_limit_has_counted_before():
    needed = allocate(3, device="cpu")
    assert needed.limit_correction == -4 * (100 + 200)
    flat = 4 * 100
    assert needed.buffers == allocate(3).buffers - flat + 1.5 * flat + 4 * (100 + 200)


def test_stage_3_gathers_no_more_than_it_may_keep():
    assert allocate(3).passing_buffers == 4 * 1000
    assert allocate(3, stage3_max_live_parameters=300).passing_buffers == 4 * 300
    assert allocate(3, stage3_max_reuse_distance=300).passing_buffers == 4 * 300
    # What is gathered ahead is among the parameters that may be whole.
    assert allocate(3, stage3_prefetch_bucket_size=200, stage3_max_live_parameters=300).passing_buffers == 4 * 300


def test_pytorchs_adam_takes_as_much_again_as_it_updates_at_once():
    def update(stage, device="cuda", base=TORCH_ADAM, **zero):
        return allocate(stage, device, base=base, **zero).buffers - allocate(stage, device, **zero).buffers

    # The root of all second moments on CUDA, and what it is divided by as well on a CPU.
    assert [update(stage) for stage in range(4)] == [4 * 800, 4 * 200, 4 * 200, 4 * 200]
    assert [update(stage, "cpu") for stage in (1, 2, 3)] == [8 * 200] * 3
    # Tensor by tensor, and how large those are nobody knows.
    assert update(0, "cpu") == 0
    assert update(3, sub_group_size=50) == 4 * 50


def test_offloaded_states_are_updated_elsewhere():
    for stage in (1, 2, 3):
        needed, in_place = (allocate(stage, base=base, **OFFLOAD) for base in (TORCH_ADAM, IN_PLACE))
        assert needed == in_place


def test_an_optimizer_that_the_code_makes_is_taken_for_pytorchs_adam():
    settings = ZeroSettings.of({"zero_optimization": {"stage": 2}})
    assert settings.torch_adam
    assert not ZeroSettings.of({"optimizer": {"type": "SGD", "params": {"torch_adam": True}}}).torch_adam


def test_16_bit_training_has_32_bit_copies_of_what_it_trains():
    assert allocate(0, base=BF16).initialize == 2 * 1000 + 4 * 800
    assert allocate(3, base=BF16, contiguous_gradients=False).initialize == 2 * 250 + (4 + 2) * 200


def test_activations_grow_with_the_micro_batch():
    assert [allocate(1, size=size).activations for size in (1, 2, 8)] == [50, 100, 400]


def test_activations_of_the_other_precision_are_half_as_large():
    assert allocate(1, base=BF16, size=4).activations == 100


def test_a_device_has_one_stage_of_a_pipeline_and_partitions_that_over_the_replicas():
    pipeline = replace(PROFILE, pipeline_parallel=True, data_parallel_size=2)
    stage = replace(PROFILE, num_params=500, trainable_num_params=400, data_parallel_size=2)
    for zero_stage in (0, 1):
        assert allocate(zero_stage, profile=pipeline) == allocate(zero_stage, profile=stage, slots=2)
    assert allocate(1, profile=pipeline).states == 4 * 400 + 8 * 200


def test_a_pipeline_of_one_replica_reduces_nothing():
    alone = replace(PROFILE, pipeline_parallel=True, data_parallel_size=1)
    assert allocate(0, profile=alone).buffers == 0


def test_low_precision_halves_master_copies_and_states_but_never_beside_sums_in_32_bits_of_stage_1():
    low = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    sums = {"data_types": {"grad_accum_dtype": "fp32"}}
    for stage, whole in ((1, 2 * 1000 + 2 * 800), (2, 2 * 1000 + 2 * 200), (3, 2 * 250 + 2 * 200)):
        assert allocate(stage, base=low).all_states == whole + (2 + 4) * 200
    assert allocate(2, base={**low, **sums}).all_states == 2 * 1000 + (4 + 2 + 4) * 200
    # That engine is DeepSpeed's `BF16_Optimizer`, which also keeps the gradients of the backward pass.
    apart = allocate(1, base={**low, **sums})
    assert apart.all_states == 2 * 1000 + (4 + 2) * 800 + (4 + 8) * 200
    assert apart.initialize == 2 * 1000 + 4 * 200 + 4 * 800
    assert apart.buffers == apart.late_buffers == 4 * 800  # the flat copy; it has no bucket
    assert allocate(0, base=low) == allocate(0, base=BF16)


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_add_up_in_32_bits_are_reduced_in_16(stage):
    sums = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
    small, large = (allocate(stage, base=sums, reduce_bucket_size=size) for size in (100, 300))
    buckets = large.initialize - small.initialize + large.buffers - small.buffers
    assert buckets == (2 + 2) * 200  # the bucket and the flat copy


def test_16_bit_master_copies_alone_leave_the_states_in_32_bits():
    masters = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
    assert allocate(2, base=masters).all_states == 2 * 1000 + (2 + 2 + 8) * 200
