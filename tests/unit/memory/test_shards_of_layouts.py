"""Memory under tensor parallelism: its ranks share the linear layers, and ZeRO partitions over fewer replicas."""

import pytest

from trial_lib.memory.memory_basis import MemoryBasis
from trial_lib.memory.memory_model import MemoryModel
from trial_lib.memory.states import activation_share, on_a_device
from trial_lib.memory.zero_settings import arm_key
from trial_lib.records.candidate import Candidate
from trial_lib.records.result import ModelProfile

GIB = 2**30
PROFILE = ModelProfile(
    num_params=10**9,
    trainable_num_params=10**9,
    linear_params=8 * 10**8,
    activation_mem_per_gpu=GIB,
    gpu_mem=80 * GIB,
    data_parallel_size=8,
    flops_per_sample=1e12,
)
BASE = {"optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}


def test_a_group_divides_the_linear_layers_and_each_rank_has_the_rest() -> None:
    own, shards = on_a_device(PROFILE, 8, tensor_parallel=4)
    assert (own.num_params, own.trainable_num_params, shards) == (4 * 10**8, 4 * 10**8, 2)
    assert on_a_device(PROFILE, 8) == (PROFILE, 8)


def test_the_share_of_activations_is_that_of_the_source() -> None:
    assert activation_share(1) == 1.0
    assert activation_share(8) == pytest.approx(13 / 34)


def test_a_candidate_takes_its_shards() -> None:
    model = MemoryModel(MemoryBasis(PROFILE, BASE, 8, "cuda"))
    whole, divided = (
        model.allocations(
            Candidate(
                knobs={"tensor_parallel": {"autotp_size": size}}, micro_batch_size=4, data_parallel_size=8 // size
            )
        )
        for size in (1, 4)
    )
    # bf16 parameters, and the 32-bit copy of a rank's partition.
    assert whole.initialize == pytest.approx(2 * 10**9 + 4 * 10**9 / 8)
    assert divided.initialize == pytest.approx(2 * 4 * 10**8 + 4 * 4 * 10**8 / 2)
    assert divided.activations == pytest.approx(whole.activations * activation_share(4))


def test_a_profile_under_tensor_parallelism_counts_as_such() -> None:
    model = MemoryModel(MemoryBasis(PROFILE, {**BASE, "tensor_parallel": {"autotp_size": 4}}, 8, "cuda"))
    own, whole = (
        model.allocations(Candidate(knobs=knobs, micro_batch_size=1))
        for knobs in ({}, {"tensor_parallel": {"autotp_size": 1}})
    )
    assert own.activations == pytest.approx(GIB)
    assert whole.activations == pytest.approx(GIB / activation_share(4))


def test_another_layout_is_another_arm() -> None:
    assert arm_key(BASE) != arm_key({**BASE, "tensor_parallel": {"autotp_size": 2}})
    assert arm_key(BASE) == arm_key({**BASE, "tensor_parallel": {"autotp_size": 1}})
