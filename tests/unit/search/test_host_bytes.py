"""What a rank keeps in the host's memory, checked by hand against DeepSpeed's own sums."""

from typing import Any

import pytest

from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.search.allocations import host_bytes

# A share of 2^28 elements on each of four devices: what is locked is a power of two as it is.
PARAMS, SLOTS = 2**30, 4
SHARE = PARAMS // SLOTS
BF16 = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
UNPINNED = {"device": "cpu", "pin_memory": False}


def profile(params: int = PARAMS, trainable: int | None = None) -> ModelProfile:
    return ModelProfile(
        num_params=params,
        trainable_num_params=params if trainable is None else trainable,
        activation_mem_per_gpu=1,
        gpu_mem=1,
        data_parallel_size=SLOTS,
        flops_per_sample=1.0,
    )


def held(stage: int, accumulates: bool = False, model: ModelProfile | None = None, **zero: Any) -> float:
    config = {**BF16, "zero_optimization": {"stage": stage, **zero}}
    return host_bytes(config, model or profile(), SLOTS, accumulates).held


def test_what_offloads_nothing_takes_nothing() -> None:
    for stage in range(4):
        assert held(stage) == 0
    # DeepSpeed passes over what a stage has not got.
    assert held(0, offload_optimizer={"device": "cpu"}) == 0
    assert held(2, offload_param={"device": "cpu"}) == 0


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_take_18_bytes_for_each_parameter_of_the_share(stage: int) -> None:
    # Master copy, gradients, momentum and variance of four bytes, and the 16-bit parameters on their way back.
    assert held(stage, offload_optimizer=UNPINNED) == 18 * SHARE
    # With accumulation also the 16-bit gradients of the micro-batches before.
    assert held(stage, accumulates=True, offload_optimizer=UNPINNED) == 20 * SHARE


def test_what_is_locked_is_rounded_up_to_a_power_of_two() -> None:
    model = profile(PARAMS + 4 * SLOTS)
    share = SHARE + 4
    # Three locked blocks are nearly twice as large, the optimizer's states are not locked.
    expected = 2 * (4 + 4 + 2) * SHARE + 8 * share
    assert held(2, model=model, offload_optimizer={"device": "cpu"}) == expected
    assert held(2, model=model, offload_optimizer={"device": "cpu", "pin_memory": True}) == expected
    assert held(2, model=model, offload_optimizer=UNPINNED) == 18 * share


def test_in_32_bits_parameters_on_their_way_back_are_as_wide() -> None:
    config = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2, "offload_optimizer": UNPINNED}}
    assert host_bytes(config, profile(), SLOTS, accumulates=False).held == 20 * SHARE


def test_stage_3_has_gradients_twice_and_locks_them_alone() -> None:
    assert held(3, offload_optimizer=UNPINNED) == (4 + 8 + 4 + 2) * SHARE
    model, share = profile(PARAMS + 4 * SLOTS), SHARE + 4
    assert held(3, model=model, offload_optimizer={"device": "cpu"}) == 12 * share + 2 * (4 + 2) * SHARE


def test_16_bit_master_copies_halve_the_copies_and_their_gradients() -> None:
    config = {
        **BF16,
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": UNPINNED},
    }
    assert host_bytes(config, profile(), SLOTS, accumulates=False).held == (2 + 8 + 2 + 2) * SHARE
    sums = {**config, "data_types": {"grad_accum_dtype": "fp32"}}
    assert host_bytes(sums, profile(), SLOTS, accumulates=False).held == (2 + 8 + 2 + 4) * SHARE


def test_micro_batches_add_up_among_the_gradients_of_16_bit_master_copies() -> None:
    zero = {"stage": 2, "offload_optimizer": UNPINNED}
    low = {**BF16, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "zero_optimization": zero}
    once, several = (host_bytes(low, profile(), SLOTS, accumulates=each).held for each in (False, True))
    assert once == several == (2 + 2 + 2 + 8) * SHARE


def test_stage_3_locks_the_gradients_of_each_sub_group_by_itself() -> None:
    model = profile(3 * PARAMS)
    whole = held(3, model=model, offload_optimizer={"device": "cpu"})
    parts = held(3, model=model, offload_optimizer={"device": "cpu"}, sub_group_size=SHARE)
    assert whole - parts == 4 * 4 * SHARE - 3 * 4 * SHARE


def test_a_part_of_the_optimizer_may_stay_on_the_device() -> None:
    half = held(3, offload_optimizer={**UNPINNED, "ratio": 0.5})
    assert half == (4 + 8 + 4) * SHARE / 2 + 2 * SHARE


def test_offloaded_parameters_are_in_one_locked_block_and_were_in_many() -> None:
    alone = held(3, offload_param={"device": "cpu", "pin_memory": False})
    assert alone == 2 * SHARE
    assert 4 * SHARE < held(3, offload_param={"device": "cpu"}) < 6 * SHARE
    frozen = profile(trainable=PARAMS // 2)
    assert held(3, model=frozen, offload_param={"device": "cpu", "pin_memory": False}) == 2 * SHARE


def test_a_disk_takes_the_states_and_the_host_its_buffers() -> None:
    nvme = {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 5, "pin_memory": False}
    found = host_bytes(
        {**BF16, "zero_optimization": {"stage": 3, "offload_optimizer": nvme}}, profile(), SLOTS, accumulates=False
    )
    assert found.optimizer_on_disk == (4 + 8 + 4) * SHARE
    assert found.held == 2 * SHARE + (1 + 5) * 4 * SHARE
    params = {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 3, "buffer_size": 1000, "max_in_cpu": 0}
    found = host_bytes(
        {**BF16, "zero_optimization": {"stage": 3, "offload_param": params}}, profile(), SLOTS, accumulates=False
    )
    assert found.params_on_disk == 2 * SHARE
    # On their way to the disk whole parameters have room, and not a rank's share of them.
    assert found.held == 3 * 1000 * 2 + 2 * PARAMS
    assert found.moved == found.held + found.params_on_disk
    assert held(3, offload_param={**params, "max_in_cpu": PARAMS}) == 3 * 1000 * 2 + 2 * SHARE
    assert held(3, offload_param=params, sub_group_size=1000) == 3 * 1000 * 2 + SLOTS * 1000 * 2


def test_pytorchs_own_adam_takes_temporaries_besides() -> None:
    own = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    config = {**BF16, **own, "zero_optimization": {"stage": 2, "offload_optimizer": UNPINNED}}
    assert host_bytes(config, profile(), SLOTS, accumulates=False).held == (18 + 8) * SHARE
