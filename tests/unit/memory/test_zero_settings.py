import pytest

from trial_lib.memory.zero_settings import ZeroSettings, arm_key, arm_label


def config(**zero):
    return {"zero_optimization": zero}


def test_what_a_configuration_leaves_out_has_deepspeeds_default():
    settings = ZeroSettings.of({})
    assert settings.stage == 0
    assert settings.reduce_bucket_size == 500_000_000
    assert settings.contiguous_gradients
    assert settings.max_live_parameters == 1_000_000_000


def test_auto_counts_as_left_out():
    assert ZeroSettings.of(config(stage=2, reduce_bucket_size="auto")) == ZeroSettings.of(config(stage=2))


@pytest.mark.parametrize(("stage", "overlaps"), [(1, False), (2, False), (3, True)])
def test_communication_overlaps_by_default_at_stage_3_alone(stage, overlaps):
    assert ZeroSettings.of(config(stage=stage)).overlap_comm is overlaps


def test_offload_counts_where_deepspeed_does_it():
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme"}}
    seen = [ZeroSettings.of(config(stage=stage, **offload)) for stage in range(4)]
    assert [settings.offload_optimizer for settings in seen] == ["none", "cpu", "cpu", "cpu"]
    assert [settings.offload_param for settings in seen] == ["none", "none", "none", "nvme"]


def test_stage_3s_settings_may_go_by_their_names_without_the_stage():
    long = {"stage": 3, "stage3_max_live_parameters": 7, "stage3_max_reuse_distance": 9}
    short = {"stage": 3, "max_live_parameters": 7, "max_reuse_distance": 9}
    assert ZeroSettings.of(config(**long)) == ZeroSettings.of(config(**short))
    assert ZeroSettings.of(config(**short)).max_live_parameters == 7


def test_an_offload_that_is_withdrawn_is_none():
    assert ZeroSettings.of(config(stage=2, offload_optimizer=None)).offload_optimizer == "none"


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"type": "AdamW"}, 8),
        ({"type": "SGD"}, 0),
        ({"type": "SGD", "params": {"momentum": 0.9}}, 4),
        ({"type": "Lion"}, 4),
        ({}, 8),
    ],
)
def test_the_states_of_a_parameter_follow_from_the_optimizer(optimizer, expected):
    assert ZeroSettings.of({"optimizer": optimizer}).optimizer_bytes == expected


def test_fine_knobs_do_not_part_an_arm():
    plain = config(stage=2)
    fine = config(stage=2, reduce_bucket_size=1000, overlap_comm=True, allgather_bucket_size=10)
    assert arm_key(plain) == arm_key(fine)


@pytest.mark.parametrize(
    "other",
    [
        config(stage=2),
        config(stage=3, offload_optimizer={"device": "cpu"}),
        config(stage=3, zero_hpz_partition_size=2),
        {**config(stage=3), "bf16": {"enabled": True}},
        {**config(stage=3), "torch_autocast": {"enabled": True}},
        {**config(stage=3), "activation_checkpointing": {"partition_activations": True}},
    ],
)
def test_what_decides_memory_parts_arms(other):
    assert arm_key(config(stage=3)) != arm_key(other)


def test_an_arm_is_called_by_its_stage_and_what_it_offloads():
    cpu = {"device": "cpu"}
    assert arm_label(config(stage=1)) == "z1"
    assert arm_label(config(stage=3, offload_optimizer=cpu, offload_param=cpu)) == "z3-offload-optimizer-offload-param"
