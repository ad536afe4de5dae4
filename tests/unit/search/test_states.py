import pytest

from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.search.zero_settings import (
    FULL,
    HALF,
    Precision,
    first_guess,
    on_a_device,
    precision_of,
    state_bytes,
)


def profile(**changes):
    values = {
        "num_params": 1000,
        "trainable_num_params": 100,
        "activation_mem_per_gpu": 50,
        "gpu_mem": 10_000,
        "data_parallel_size": 4,
        "flops_per_sample": 1.0,
    }
    return ModelProfile(**{**values, **changes})


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, 4000 + 400 + 800),
        (1, 4000 + 400 + 200),
        (2, 4000 + 100 + 200),
        (3, 1000 + 100 + 200),
    ],
)
def test_each_stage_partitions_one_more_kind_of_state(stage, expected):
    assert state_bytes(stage, 1000, 100, FULL, slots=4) == expected


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, 2000 + 400 + 1200),
        (1, 2000 + 400 + 300),
        (2, 2000 + 100 + 300),
        (3, 500 + 100 + 300),
    ],
)
def test_16_bit_halves_the_parameters_and_adds_master_copies_of_the_trainable_ones(stage, expected):
    assert state_bytes(stage, 1000, 100, HALF, slots=4) == expected


def test_on_one_device_every_stage_takes_the_same():
    assert {state_bytes(stage, 1000, 100, HALF, slots=1) for stage in range(4)} == {3600}


def test_frozen_parameters_have_no_gradients_and_no_optimizer_states():
    assert state_bytes(0, 1000, 0, HALF, slots=1) == 2000


def test_a_share_that_is_no_whole_byte_is_rounded_up():
    assert state_bytes(3, 1, 0, FULL, slots=3) == 2


@pytest.mark.parametrize("name", ["fp16", "bf16", "bfloat16"])
def test_bf16_is_16_bit_as_fp16_is(name):
    assert precision_of({name: {"enabled": True}}, bytes_per_param=None) == HALF


@pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": False}}, {"bf16": {"enabled": "auto"}}, {"fp16": {}}])
def test_a_configuration_that_enables_neither_is_32_bit(config):
    assert precision_of(config, bytes_per_param=None) == FULL


def test_where_no_section_decides_the_code_s_own_precision_counts():
    assert precision_of({}, bytes_per_param=2) == Precision(2, master_copies=False)
    assert precision_of({"bf16": {"enabled": False}}, bytes_per_param=4) == FULL
    assert precision_of({"bf16": {"enabled": True}}, bytes_per_param=4) == HALF


def test_16_bit_master_copies_act_whether_their_section_is_enabled_or_not():
    zero = {"zero_optimization": {"stage": 2}}
    masters = {"fp16": {"fp16_master_weights_and_grads": True}}
    mixed = precision_of({**zero, **masters, "bf16": {"enabled": True}}, bytes_per_param=None)
    assert mixed == Precision(2, True, master_bytes=2, gradient_bytes=2)
    assert precision_of({**zero, **masters}, bytes_per_param=None) == Precision(4, False, master_bytes=2)


@pytest.mark.parametrize("section", ["fp16", "data_types", "zero_optimization"])
def test_a_section_that_is_left_to_the_code_is_none(section):
    config = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, section: "auto"}
    assert precision_of(config, bytes_per_param=None) == HALF


@pytest.mark.parametrize("name", ["fp32", "float32", "torch.float32", "float"])
def test_sums_in_32_bits_have_several_names(name):
    config = {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": name},
    }
    assert precision_of(config, bytes_per_param=None).gradient_bytes == 4
    # dsat's formula counts them as wide as they are.
    low = {**config, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    assert state_bytes(0, 100, 100, precision_of(low, None), 1) == 100 * (2 + 4 + 2 + 4)


@pytest.mark.parametrize("offload", [None, "auto", {}, {"device": "none"}])
def test_sums_in_32_bits_at_stage_1_have_the_gradients_of_the_backward_pass_beside_them(offload):
    zero = {"stage": 1, "offload_optimizer": offload}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert precision_of(config, bytes_per_param=None) == Precision(2, True, sums_apart=True)


def test_offload_at_stage_1_keeps_16_bit_masters_beside_sums_in_32_bits():
    config = {
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    assert precision_of(config, bytes_per_param=None) == Precision(2, True, master_bytes=2, gradient_bytes=4)


def test_the_first_guess_counts_the_activations_once():
    assert first_guess(0, profile(), FULL, slots=4) == (10_000 - 5200) // 50
    assert first_guess(3, profile(), FULL, slots=4) == (10_000 - 1300) // 50


def test_the_first_guess_is_at_least_1():
    assert first_guess(0, profile(gpu_mem=100), FULL, slots=4) == 1


def test_a_profile_without_activations_gives_a_first_guess_of_1():
    assert first_guess(0, profile(activation_mem_per_gpu=0), FULL, slots=4) == 1


def test_a_device_of_a_pipeline_holds_one_stage_which_zero_partitions_over_the_replicas():
    pipeline = profile(pipeline_parallel=True, data_parallel_size=2)
    own, shards = on_a_device(pipeline, slots=8)
    assert (own.num_params, own.trainable_num_params) == (pipeline.num_params / 4, pipeline.trainable_num_params / 4)
    assert shards == 2
    assert on_a_device(profile(), slots=8) == (profile(), 8)
    assert first_guess(1, pipeline, FULL, slots=8) > first_guess(1, profile(), FULL, slots=2)
