"""The rules themselves; that DeepSpeed behaves so is shown by the integration tests."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerotune.trial_lib.deepspeed_config import rules
from zerotune.trial_lib.deepspeed_config.layout import LAYOUTS, PROGRAM, ModelShape
from zerotune.trial_lib.deepspeed_config.rules import RULES, ZERO_KEYS, broken_rules

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.floats()
    | st.sampled_from(["auto", "cpu", "nvme", "SGD", "{}"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["enabled", "device", "type", "ratio", "stage", "grad_accum_dtype"]), inner)
    ),
    max_leaves=6,
)
ZERO = st.dictionaries(st.sampled_from([*sorted(ZERO_KEYS), "stagee", "{0}"]), VALUES, max_size=6)
TOP_KEYS = st.sampled_from(
    [
        *("fp16", "bf16", "optimizer", "data_types", "autotuning", "prescale_gradients", "gradient_predivide_factor"),
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    ]
)
CONFIGS = st.builds(
    lambda top, zero: {**top, "zero_optimization": zero}, st.dictionaries(TOP_KEYS, VALUES), ZERO | VALUES
)


def names(config: dict[str, Any], device: Any, pipeline: bool | None = None, replicas: int | None = None) -> list[str]:
    return [rule.name for rule in broken_rules(config, device, pipeline, replicas)]


@given(
    config=CONFIGS,
    device=st.sampled_from(["cpu", "cuda"]),
    pipeline=st.sampled_from([None, True, False]),
    replicas=st.sampled_from([None, 1, 2]),
)
def test_any_configuration_is_judged(config: dict[str, Any], device: Any, pipeline: Any, replicas: Any) -> None:
    for rule in broken_rules(config, device, pipeline, replicas):
        assert rule.reason.endswith(".")


def test_names_are_unique() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_a_reason_says_what_was_found() -> None:
    (rule,) = broken_rules({"zero_optimization": {"stage": 3}}, "cuda", True, None)
    assert rule.reason == "Pipeline parallelism works with ZeRO stages 0 and 1, not with stage 3."


def test_a_pipeline_is_not_guessed() -> None:
    config = {"zero_optimization": {"stage": 3, "overlap_comm": True}}
    assert names(config, "cuda", None) == []
    assert names(config, "cuda", False) == []


@pytest.mark.parametrize(
    "config",
    [
        {"fp16": {"enabled": True}},
        {"optimizer": {"type": "Lamb"}},
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
    ],
)
def test_what_a_cpu_cannot_do_a_gpu_can(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "processor_computes_fp16", lambda: False)
    assert len(names(config, "cpu")) == 1
    assert names(config, "cuda") == []


def test_a_key_of_a_newer_deepspeed_is_left_alone() -> None:
    assert names({"zero_optimization": {"stage": 2, "quite_another_thing": 1}}, "cuda") == []
    (rule,) = broken_rules({"zero_optimization": {"stage": 2, "reduce_bucket_sise": 1}}, "cuda", None, None)
    assert rule.reason == "zero_optimization has no key reduce_bucket_sise; reduce_bucket_size may be meant."


def test_the_batch_is_checked_as_far_as_it_is_known() -> None:
    config = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert names(config, "cuda") == []
    assert names(config, "cuda", None, 4) == []
    (rule,) = broken_rules(config, "cuda", None, 3)
    assert rule.reason == (
        "The batch does not add up: train_batch_size(32) != micro(4) * accumulation(2) * replicas(3)."
    )
    assert names({**config, "gradient_accumulation_steps": 3}, "cuda") == ["contradicting_batch"]


def test_deepspeeds_old_way_to_write_stage_1_is_stage_1() -> None:
    assert names({"zero_optimization": True, "optimizer": {"type": "SGD"}}, "cuda") == ["untested_optimizer_under_zero"]


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16"])
def test_a_type_may_go_by_any_of_deepspeeds_names(dtype: str) -> None:
    config = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": dtype}}
    assert names(config, "cuda") == []
    assert names({**config, "bf16": {"enabled": False}}, "cuda") == ["accumulation_dtype_at_stage_0"]


def test_an_offload_to_no_device_is_none() -> None:
    assert names({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "none"}}}, "cuda") == []


def of(**sizes: int | str) -> dict[str, Any]:
    """Returns the settings of a program whose switches are layouts, each of a kind and a size."""
    return {
        PROGRAM: {f"--{kind}": size for kind, size in sizes.items()},
        LAYOUTS: {f"--{kind}": kind for kind in sizes},
    }


@pytest.mark.parametrize(
    ("config", "slots", "shape", "broken"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, 4, ModelShape((8, 4)), []),
        ({"tensor_parallel": {"autotp_size": 3}}, 4, ModelShape(), ["undivided_devices"]),
        ({"tensor_parallel": {"autotp_size": 3}}, None, ModelShape(), []),
        ({"tensor_parallel": {"autotp_size": 4}}, 8, ModelShape((8, 2)), ["undivided_heads"]),
        ({"sequence_parallel_size": 4}, 6, ModelShape(), ["undivided_devices"]),
        (of(sequence=4), 8, ModelShape((8, 2)), []),
        (of(sequence=4), 8, ModelShape((8, 6)), ["unshared_heads"]),
        (of(sequence=4), 8, ModelShape((6, 6)), ["unshared_heads"]),
        (of(sequence=4), 8, ModelShape(sequence_length=1024), []),
        (of(sequence=4), 8, ModelShape(sequence_length=1022), ["unshared_tokens"]),
        (of(pipeline=4), 8, ModelShape(layer_count=6), []),
        (of(pipeline=4), 8, ModelShape(layer_count=3), ["empty_stages"]),
        (of(pipeline=3), 8, ModelShape(), ["undivided_devices"]),
        (of(pipeline=4, tensor=4), 8, ModelShape(), ["undivided_devices"]),
        (of(pipeline=2, tensor=4), 8, ModelShape(), []),
        (of(expert=4), 8, ModelShape(expert_counts=(8, 12)), []),
        (of(expert=4), 8, ModelShape(expert_counts=(8, 6)), ["undivided_experts"]),
        (of(expert=4, pipeline=4), 8, ModelShape(expert_counts=(8,)), ["undivided_devices"]),
        (of(tensor="2"), 8, ModelShape((3,)), ["undivided_heads"]),
    ],
)
def test_groups_of_ranks_divide_devices_and_heads(
    config: dict[str, Any], slots: int | None, shape: ModelShape, broken: list[str]
) -> None:
    found = broken_rules(config, "cuda", False, None, slots=slots, shape=shape)
    assert [rule.name for rule in found] == broken


def test_the_reason_says_what_is_not_divided() -> None:
    shape = ModelShape((8, 2))
    (rule,) = broken_rules({"tensor_parallel": {"autotp_size": 4}}, "cuda", False, None, slots=8, shape=shape)
    assert rule.reason.startswith("Tensor parallelism divides 2 heads over 4 ranks unevenly")
    (rule,) = broken_rules({"tensor_parallel": {"autotp_size": 3}}, "cuda", False, None, slots=4)
    assert rule.reason == "DeepSpeed cannot divide 4 devices into tensor-parallel groups of 3."
    (rule,) = broken_rules(of(pipeline=4, tensor=4), "cuda", False, None, slots=8)
    assert rule.reason == "DeepSpeed cannot divide 8 devices into 4 pipeline stages with tensor-parallel groups of 4."


def test_stages_by_a_switch_are_a_pipeline() -> None:
    config = {"zero_optimization": {"stage": 2}}
    for stages, broken in ((1, []), (2, ["pipeline_with_zero_2_or_3"])):
        found = broken_rules({**config, **of(pipeline=stages)}, "cuda", False, None)
        assert [rule.name for rule in found] == broken
