"""The arms of a plan, and the batch that each keeps."""

from typing import Any

import pytest

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.arms import batch_policy, check_count, own_label, planned_arms, requests_without_arms
from zerotune.trial_lib.search.arms import RequestedKnob

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 2},
}


def _typed(**fields: Any) -> ForeseenRun:
    return ForeseenRun(
        **{
            "world": 8,
            "replicas": 8,
            "micro_batch": 4,
            "accumulation": 2,
            "parameters": 10**9,
            "trainable": 10**9,
            **fields,
        }
    )


@pytest.mark.parametrize(("version", "is_offered"), [("0.19.8", True), ("0.17.1", False), ("", True)])
def test_the_version_of_deepspeed_that_the_program_has_decides_its_arms(version: str, is_offered: bool) -> None:
    request = RequestedKnob("torch_autocast.enabled", (False, True))
    typed = _typed(versions={"deepspeed": version} if version else {})
    arms = planned_arms(typed, BASE, (2, 3), [request])
    assert any(arm.label == "z3-torch-autocast" for arm in arms) == is_offered


def test_the_users_arm_comes_first_and_changes_nothing() -> None:
    own, *others = planned_arms(_typed(), BASE, (0, 1, 2, 3))
    assert (own.label, own.knobs, own.is_own) == ("z2", {}, True)
    assert [arm.label for arm in others] == [
        "z0",
        "z1",
        "z1-offload-optimizer",
        "z2-offload-optimizer",
        "z3",
        "z3-offload-param",
        "z3-offload-optimizer",
        "z3-offload-optimizer-offload-param",
    ]


def test_arms_vary_stage_and_offload_alone_unless_the_user_asks_for_more() -> None:
    reading = _typed(program={"reads_activation_checkpointing": True})
    plain = {arm.label for arm in planned_arms(reading, BASE, (2, 3))}
    assert not any("checkpointing" in label for label in plain)
    asked = [RequestedKnob("activation_checkpointing.cpu_checkpointing", (True, False))]
    assert any("checkpointing" in arm.label for arm in planned_arms(reading, BASE, (2, 3), asked))


@pytest.mark.parametrize(
    ("path", "labels"),
    [
        (
            "bf16.bf16_master_weights_and_grads",
            ["z1-bf16-master-weights-and-grads", "z3-offload-optimizer-bf16-master-weights-and-grads"],
        ),
        ("data_types.grad_accum_dtype", ["z2-grad-accum-dtype=fp32"]),
        ("communication_data_type", ["z2-communication-data-type=fp32", "z3-communication-data-type=fp32"]),
        ("zero_optimization.offload_optimizer.super_offload", ["z3-offload-optimizer-super-offload"]),
        ("zero_optimization.zenflow.update_interval", ["z1-offload-optimizer-update-interval=4"]),
        ("zero_optimization.zero_quantized_weights", ["z3-zero-quantized-weights"]),
        ("optimizer.params.torch_adam", ["z2-torch-adam", "z3-torch-adam"]),
        ("compile.deepcompile", ["z2-deepcompile", "z3-deepcompile"]),
    ],
)
def test_a_coarse_knob_that_the_user_asks_for_makes_arms_where_it_acts(path: str, labels: list[str]) -> None:
    values = {"data_types.grad_accum_dtype": ("bf16", "fp32"), "communication_data_type": ("bf16", "fp32")}
    request = RequestedKnob(path, values.get(path, (4,) if "zenflow" in path else (False, True)))
    compiling = _typed(program={"compiles_engine": True})
    arms = [arm.label for arm in planned_arms(compiling, BASE, (0, 1, 2, 3), [request])]
    plain = [arm.label for arm in planned_arms(compiling, BASE, (0, 1, 2, 3))]
    assert set(labels) <= set(arms)
    assert not set(labels) & set(plain)
    assert len(arms) == len(set(arms))


def test_it_says_which_requests_make_no_arms_and_why() -> None:
    asked = [
        RequestedKnob("compile.deepcompile", (False, True)),
        RequestedKnob("program.model:compile", (False, True), coarse=True),
        RequestedKnob("zero_optimization.nonsense", (1, 2)),
        # A plan says on its own that the layout stays.
        RequestedKnob("tensor_parallel.autotp_size", (1, 2)),
        RequestedKnob("bf16.bf16_master_weights_and_grads", (False, True)),
    ]
    typed = _typed(program={"not_turnable": {"model:compile": "your code compiles its model by itself"}})
    said = requests_without_arms(typed, BASE, (1, 2), asked)
    assert said == (
        "search_space: compile.deepcompile has no effect: DeepCompile acts in code that calls engine.compile(), and "
        "yours does not.",
        "search_space: model:compile has no effect: your code compiles its model by itself.",
        "search_space: zero_optimization.nonsense is not known to have an effect: it is tried because you ask for it.",
    )


def test_a_pipeline_has_stages_0_and_1_alone() -> None:
    base = {**BASE, "zero_optimization": {"stage": 1}}
    labels = [arm.label for arm in planned_arms(_typed(is_pipeline=True), base, (0, 1, 2, 3))]
    assert labels == ["z1", "z0", "z1-offload-optimizer"]


def test_on_processors_nothing_is_offloaded() -> None:
    assert [arm.label for arm in planned_arms(_typed(), BASE, (0, 2), device="cpu")] == ["z2", "z0"]


def test_the_own_label_names_offload_as_other_arms_do() -> None:
    offloads = {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    assert own_label({"zero_optimization": offloads}) == "z3-offload-optimizer"
    assert own_label({}) == "z0"


def test_a_candidate_keeps_the_batch_of_so_many_devices() -> None:
    policy = batch_policy(_typed(), BASE, 16)
    assert policy.train_batch_size == 4 * 2 * 16
    own, *_ = planned_arms(_typed(), BASE, (2,))
    config = own.candidate(policy, 2, 16).complete(BASE)
    assert config["gradient_accumulation_steps"] == 4
    assert config["train_batch_size"] == 128


def test_a_stated_global_batch_is_kept_on_any_number() -> None:
    stated = {**BASE, "train_batch_size": 64}
    assert batch_policy(_typed(), stated, 16).sizes() == (1, 2, 4)
    assert batch_policy(_typed(), stated, 16, train_batch_size=32).sizes() == (1, 2)
    assert batch_policy(_typed(), stated, 16, free_batch=True).train_batch_size is None
    assert batch_policy(_typed(), {"train_micro_batch_size_per_gpu": "auto"}, 2).train_batch_size == 16


@pytest.mark.parametrize(
    ("config", "count", "said"),
    [
        ({"train_batch_size": 64}, 3, "a global batch of 64 samples cannot be divided over 3 replicas"),
        ({"tensor_parallel": {"autotp_size": 4}}, 6, "tensor-parallel groups of 4"),
        ({"sequence_parallel_size": 4}, 6, "sequence groups of 4"),
    ],
)
def test_a_count_that_cannot_be_divided_is_refused(config: dict[str, Any], count: int, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_count(config, count, "--on h100-80gb:3")


def test_a_count_is_divided_by_the_ranks_of_a_replica_first() -> None:
    check_count({"train_batch_size": 6, "tensor_parallel": {"autotp_size": 4}}, 12, "--on")


def test_switches_that_a_foreseen_run_can_have_make_arms_and_the_users_own_has_the_programs_value() -> None:
    place = "model:activation_checkpointing"
    asked = [
        RequestedKnob(f"program.{place}", ("none", "full"), coarse=True),
        RequestedKnob("program.optimizer:fused", (False, True), coarse=False),
        RequestedKnob("program.--gc", (True, False), coarse=False),
        RequestedKnob("program.OMP_NUM_THREADS", (1, 2), coarse=True),
    ]
    typed = _typed(program={"turnable": {place: ["none", "full", "every_second"], "optimizer:fused": [False, True]}})
    own, *others = planned_arms(typed, BASE, (2, 3), asked)
    assert own.knobs == {"program": {place: "none"}}
    found = {(arm.label, arm.knobs["program"][place]) for arm in others if "offload" not in arm.label}
    assert found == {
        ("z2-activation-checkpointing=full", "full"),
        ("z3", "none"),
        ("z3-activation-checkpointing=full", "full"),
    }
    assert all(arm.knobs["program"].keys() == {place} for arm in others)


def test_a_compiled_model_has_arms_of_its_own() -> None:
    asked = [RequestedKnob("program.model:compile", (False, True), coarse=True)]
    own, *others = planned_arms(_typed(program={"turnable": {"model:compile": [False, True]}}), BASE, (2,), asked)
    assert own.knobs == {"program": {"model:compile": False}}
    assert ("z2-compile", {"model:compile": True}) in [(arm.label, arm.knobs["program"]) for arm in others]


def test_coarse_switches_of_the_program_make_arms_with_each_value() -> None:
    asked = [
        RequestedKnob("program.--gc", (True, False), coarse=True),
        RequestedKnob("program.--kernel", ("gelu",), {"program.--gc": (True,)}, coarse=True),
    ]
    base = {**BASE, "program": {"--gc": False, "--kernel": "relu", "--other": 3}}
    own, *others = planned_arms(_typed(), base, (2,), asked)
    assert own.knobs == {"program": {"--gc": False, "--kernel": "relu"}}
    found = {arm.label: arm.knobs["program"] for arm in others if "offload" not in arm.label}
    assert found == {"z2-gc-kernel=gelu": {"--gc": True, "--kernel": "gelu"}}


def test_a_plan_keeps_the_layout_of_the_command_whatever_is_asked_for() -> None:
    stages = RequestedKnob("program.--stages", (1, 2), coarse=True, layout="pipeline")
    asked = [RequestedKnob("tensor_parallel.autotp_size", (1, 2)), stages]
    base = {**BASE, "program": {"--stages": 1}}
    assert [arm.label for arm in planned_arms(_typed(), base, (1, 2), asked)] == [
        arm.label for arm in planned_arms(_typed(), BASE, (1, 2))
    ]


def test_a_plan_has_the_users_groups_of_ranks_in_all_arms_and_no_smaller_ones() -> None:
    grouped = {**BASE, "tensor_parallel": {"autotp_size": 2}}
    typed = _typed(replicas=4)
    arms = planned_arms(typed, grouped, (1, 2))
    assert [arm.label for arm in arms] == ["z2", "z1", "z1-offload-optimizer", "z2-offload-optimizer"]
    assert not any("tensor_parallel" in arm.knobs for arm in arms)


@pytest.mark.parametrize(("typed", "labels"), [(1, ["z2", "z1-gc", "z1", "z2-gc"]), (2, ["z2", "z1"])])
def test_a_condition_on_a_switch_that_stays_as_typed_holds_or_does_not(typed: int, labels: list[str]) -> None:
    stages = RequestedKnob("program.--stages", (1, 2), coarse=True, layout="pipeline")
    checkpointing = RequestedKnob("program.--gc", (True, False), {"program.--stages": (1,)}, coarse=True)
    base = {**BASE, "program": {"--stages": typed, "--gc": False}}
    arms = planned_arms(_typed(), base, (1, 2), [stages, checkpointing])
    assert [arm.label for arm in arms if "offload" not in arm.label] == labels


def test_no_plan_has_a_micro_batch_beyond_all_of_the_data() -> None:
    typed = _typed(program={"samples_per_epoch": 20})
    whole = 20 * typed.replicas
    assert batch_policy(typed, BASE, 2, free_batch=True).sizes()[-1] == whole
    assert batch_policy(typed, BASE, 2, free_batch=True, max_micro_batch=3).sizes() == (1, 2, 3)
