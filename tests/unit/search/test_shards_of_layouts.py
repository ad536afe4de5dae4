"""Memory under tensor parallelism: its ranks share the linear layers, and ZeRO partitions over fewer replicas."""

from dataclasses import replace

import pytest

from zerotune.trial_lib.deepspeed_config.layout import LAYOUTS, PROGRAM, Layout
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.memory_model import MemoryModel
from zerotune.trial_lib.search.zero_settings import activation_share, arm_key, on_a_device

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
    own, shards = on_a_device(PROFILE, 8, Layout(tensor=4))
    assert (own.num_params, own.trainable_num_params, shards) == (4 * 10**8, 4 * 10**8, 2)
    assert on_a_device(PROFILE, 8) == (PROFILE, 8)


def test_ranks_of_ulysses_have_all_parameters_and_zero_partitions_over_all_of_them() -> None:
    assert on_a_device(PROFILE, 8, Layout(sequence=4)) == (PROFILE, 8)


def test_stages_divide_the_layers_and_zero_partitions_over_the_replicas() -> None:
    own, shards = on_a_device(PROFILE, 8, Layout(pipeline=4))
    assert (own.num_params, shards) == (10**9 // 4, 2)
    # The profile trial ran with two stages, and a switch changes them.
    piped = replace(PROFILE, pipeline_parallel=True, data_parallel_size=4)
    own, shards = on_a_device(piped, 8, Layout(pipeline=4), Layout(pipeline=2))
    assert (own.num_params, shards) == (10**9 // 4, 2)


def test_a_group_divides_the_experts_and_zero_partitions_as_much_as_without_groups() -> None:
    mixture = replace(PROFILE, expert_params=8 * 10**8)
    own, shards = on_a_device(mixture, 8, Layout(expert=4))
    assert own.num_params == 4 * 10**8
    # The experts of a rank are on two of eight ranks, so a rank keeps half of their states, and an eighth of the rest.
    assert own.num_params / shards == pytest.approx(2 * 10**8 / 8 + 2 * 10**8 / 2)
    # Without a switch, a program has the groups of its profile trial.
    as_typed = replace(mixture, expert_ranks=4)
    assert on_a_device(as_typed, 8)[0].num_params == 4 * 10**8


@pytest.mark.parametrize(
    ("typed", "tried", "accumulation", "expected"),
    [
        ({"sequence": 1}, {"sequence": 4}, 1, 1 / 4),
        ({"sequence": 4}, {"sequence": 1}, 1, 4),
        # The first of four stages keeps a quarter of the layers' activations, of four micro-batches at a time.
        ({"pipeline": 1}, {"pipeline": 4}, 8, 1),
        ({"pipeline": 1}, {"pipeline": 4}, 2, 1 / 2),
        ({"pipeline": 2}, {"pipeline": 1}, 8, 2),
        ({"expert": 1}, {"expert": 4}, 8, 1),
    ],
)
def test_activations_follow_a_switch_that_is_a_layout(
    typed: dict[str, int], tried: dict[str, int], accumulation: int, expected: float
) -> None:
    (kind,) = typed
    piped = typed.get("pipeline", 1)
    update = {"pipeline_parallel": piped > 1, "data_parallel_size": 8 // (piped * typed.get("sequence", 1))}
    base = {**BASE, PROGRAM: {"--size": typed[kind]}, LAYOUTS: {"--size": kind}}
    model = MemoryModel(MemoryBasis(replace(PROFILE, **update), base, 8, "cuda"))
    candidate = Candidate(
        knobs={PROGRAM: {"--size": tried[kind]}}, micro_batch_size=1, gradient_accumulation_steps=accumulation
    )
    assert model.allocations(candidate).activations == pytest.approx(expected * GIB)


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
