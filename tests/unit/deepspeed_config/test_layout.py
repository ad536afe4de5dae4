"""The replicas of the model under each layout of a configuration."""

import pytest

from zerotune.trial_lib.deepspeed_config.layout import (
    AUTOTP,
    LAYOUTS,
    PROGRAM,
    SEQUENCE,
    Layout,
    Replicas,
    group_sizes,
    ranks_of_a_replica,
)

TENSOR_2 = {"tensor_parallel": {"autotp_size": 2}}


def test_groups_of_ranks_hold_one_replica_together() -> None:
    config = {**TENSOR_2, "sequence_parallel_size": 4}
    assert group_sizes(config) == {AUTOTP: 2, SEQUENCE: 4}
    assert ranks_of_a_replica(config) == 8


@pytest.mark.parametrize("size", [0, 1, None, True, "auto"])
def test_no_number_above_one_is_no_group(size: object) -> None:
    assert group_sizes({"tensor_parallel": {"autotp_size": size}, "sequence_parallel_size": 1}) == {}


def test_replicas_follow_the_groups_of_a_candidate() -> None:
    replicas = Replicas(slots=8, own=8, base_config={})
    assert [replicas.of(knobs) for knobs in ({}, TENSOR_2, {"tensor_parallel": {"autotp_size": 8}})] == [8, 4, 1]
    assert replicas.of({AUTOTP: 4}) == 2


def test_a_candidate_leaves_the_users_groups_or_replaces_them() -> None:
    replicas = Replicas(slots=8, own=4, base_config=TENSOR_2)
    assert replicas.of({}) == replicas.of({"zero_optimization": {"stage": 1}}) == replicas.of(TENSOR_2) == 4
    assert replicas.of({"tensor_parallel": {"autotp_size": 1}}) == 8
    assert replicas.of({"tensor_parallel": {"autotp_size": 4}}) == 2


def test_the_stages_of_a_pipeline_stay_beside_the_groups() -> None:
    assert Replicas(slots=8, own=2, base_config={}).of({}) == 2
    assert Replicas(slots=8, own=2, base_config={}).of(TENSOR_2) == 1
    assert Replicas(slots=8, own=2, base_config=TENSOR_2).of({AUTOTP: 1}) == 4


def test_devices_that_the_groups_do_not_divide_hold_whole_replicas_only() -> None:
    assert Replicas(slots=6, own=6, base_config={}).of({AUTOTP: 4}) == 1


STAGES = {PROGRAM: {"--stages": 2}, LAYOUTS: {"--stages": "pipeline"}}


def test_a_switch_of_the_program_is_a_layout_if_the_user_says_so() -> None:
    assert Layout.of(STAGES) == Layout(pipeline=2)
    assert Layout.of({PROGRAM: {"--stages": "4"}, LAYOUTS: {"--stages": "sequence"}}) == Layout(sequence=4)
    assert Layout.of({PROGRAM: {"--stages": 2}}) == Layout()
    assert ranks_of_a_replica({**STAGES, **TENSOR_2}) == 4


@pytest.mark.parametrize("kind", ["tensor", "sequence", "pipeline"])
def test_replicas_follow_a_switch(kind: str) -> None:
    replicas = Replicas(8, 4, {**STAGES, LAYOUTS: {"--stages": kind}})
    assert [replicas.of({PROGRAM: {"--stages": size}}) for size in (1, 2, 4, 8)] == [8, 4, 2, 1]
    assert replicas.of({f"{PROGRAM}.--stages": 4}) == 2
    assert replicas.of({}) == replicas.of(STAGES) == 4


def test_ranks_that_share_experts_have_batches_of_their_own() -> None:
    replicas = Replicas(8, 8, {PROGRAM: {"--ep": 1}, LAYOUTS: {"--ep": "expert"}})
    assert replicas.of({PROGRAM: {"--ep": 4}}) == 8


def test_two_layouts_divide_the_ranks_together() -> None:
    assert Replicas(8, 4, STAGES).of({**TENSOR_2, PROGRAM: {"--stages": 2}}) == 2


def test_the_users_own_layout_has_the_replicas_that_the_profile_has_counted() -> None:
    """The switch makes no stages, whatever the user says."""
    assert [Replicas(8, 8, STAGES).of(knobs) for knobs in ({}, STAGES, {PROGRAM: {"--stages": 1}})] == [8, 8, 8]
    both = {PROGRAM: {"--stages": 2, "--ep": 1}, LAYOUTS: {"--stages": "pipeline", "--ep": "expert"}}
    assert Replicas(8, 8, both).of({PROGRAM: {"--ep": 4}}) == 8
