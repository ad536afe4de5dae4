"""Which arms an optimizer that the code makes leaves, or the model's own kind."""

import pytest
from arms_of_space import ALL, ZERO, adaptive, arm, fine, here, labels

from zerotune.trial_lib.search.arms import RequestedKnob, stages_not_tried
from zerotune.trial_lib.search.catalogue import OFFLOAD_OPTIMIZER
from zerotune.trial_lib.search.effects import Surroundings
from zerotune.trial_lib.search.knobs import STAGE, Knob


def test_an_optimizer_of_the_codes_own_may_be_offloaded() -> None:
    space = adaptive(at=here(base={}), stages=(1,))
    assert arm(space, "z1-offload-optimizer").knobs["zero_force_ds_cpu_optimizer"] is False
    assert "zero_force_ds_cpu_optimizer" not in arm(space, "z1").knobs
    # What the code's optimizer is offloaded with already, it need not be told.
    own = adaptive(at=here(base={ZERO: {"stage": 1, "offload_optimizer": {"device": "cpu"}}}), stages=(1, 2))
    assert "zero_force_ds_cpu_optimizer" not in arm(own, "z2-offload-optimizer").knobs
    assert "zero_force_ds_cpu_optimizer" not in arm(adaptive(), "z1-offload-optimizer").knobs


SGD, CPU_ADAM = "torch.optim.sgd.SGD", "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"
FUSED_ADAM, ADAMW = "deepspeed.ops.adam.fused_adam.FusedAdam", "torch.optim.adamw.AdamW"


@pytest.mark.parametrize(
    "at",
    [here(base={}, optimizer=SGD), here(base={"optimizer": {"type": "SGD"}}), here(base={}, optimizer=ADAMW)],
)
def test_zero_is_permitted_for_an_optimizer_that_does_the_same_to_a_tensors_pieces(at: Surroundings) -> None:
    space = adaptive(at=at)
    assert {arm.stage for arm in space.arms} == {0, 1, 2, 3}
    needs = at.program.optimizer != ADAMW
    told = {arm.label: arm.knobs.get("zero_allow_untested_optimizer", False) for arm in space.arms}
    assert told == {label: needs and label != "z0" for label in told}


def test_zero_is_left_out_for_an_optimizer_that_it_would_change_and_the_user_is_told() -> None:
    lamb = here(base={}, optimizer="train.Lamb")
    assert labels(adaptive(at=lamb)) == ["z0"]
    assert stages_not_tried(ALL, lamb, []) == [
        "ZeRO stage 1 and 2 and 3 is not tried: ZeRO takes the optimizer train.Lamb only with "
        '"zero_allow_untested_optimizer": true.'
    ]
    permitted = here(base={"zero_allow_untested_optimizer": True}, optimizer="train.Lamb")
    assert labels(adaptive(at=permitted)) == labels(adaptive())
    # Accelerate permits any.
    prepared = here(base={}, optimizer="train.Lamb", by_accelerate=True)
    assert labels(adaptive(at=prepared)) == labels(adaptive())
    assert stages_not_tried(ALL, prepared, []) == []


def test_deepspeeds_optimizer_for_offload_is_tried_with_offload_alone() -> None:
    base = {ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    at = here(base=base, optimizer=CPU_ADAM)
    assert labels(adaptive(at=at)) == [
        *("z1-offload-optimizer", "z2-offload-optimizer", "z3-offload-optimizer"),
        "z3-offload-optimizer-offload-param",
    ]
    assert stages_not_tried(ALL, at, []) == [f"ZeRO stage 0 is not tried: {CPU_ADAM} cannot step without offload."]
    on_cpu = here(base=base, optimizer=CPU_ADAM, device="cpu")
    assert "z1" in labels(adaptive(at=on_cpu))


def test_an_optimizer_with_kernels_of_cudas_is_not_offloaded() -> None:
    at = here(base={}, optimizer=FUSED_ADAM)
    assert labels(adaptive(at=at)) == ["z0", "z1", "z2", "z3", "z3-offload-param"]


def test_a_mixture_of_experts_is_not_tried_at_stage_3() -> None:
    at = here(has_experts=True)
    assert labels(adaptive(at=at)) == ["z0", "z1", "z1-offload-optimizer", "z2", "z2-offload-optimizer"]
    assert stages_not_tried(ALL, at, []) == [
        "ZeRO stage 3 is not tried: DeepSpeed's mixture of experts does not go with stage 3."
    ]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_mixture_of_experts_keeps_the_contiguous_gradients_that_it_needs_at_stage_2(device: str) -> None:
    with_experts, without = (adaptive(at=here(device=device, has_experts=has)) for has in (True, False))
    assert set(fine(without, "z2")["contiguous_gradients"]) == {True, False}
    assert fine(with_experts, "z2")["contiguous_gradients"] == (True,)
    assert set(fine(with_experts, "z1")["contiguous_gradients"]) == {True, False}


def test_of_an_optimizer_in_the_code_and_one_in_the_configuration_the_first_decides() -> None:
    # deepspeed/runtime/engine.py _configure_optimizer
    sgd = adaptive(at=here(base={"optimizer": {"type": "Adam"}}, optimizer=SGD), stages=(2,))
    assert arm(sgd, "z2").knobs["zero_allow_untested_optimizer"] is True
    assert arm(sgd, "z2-offload-optimizer").knobs["zero_force_ds_cpu_optimizer"] is False
    adam = adaptive(at=here(base={"optimizer": {"type": "Lamb"}}, optimizer=ADAMW), stages=(2,))
    assert "zero_allow_untested_optimizer" not in arm(adam, "z2").knobs


def test_what_the_user_asks_for_may_be_what_deepspeed_wants() -> None:
    permission = RequestedKnob("zero_allow_untested_optimizer", (True,))
    asked = adaptive(permission, at=here(base={}, optimizer="train.Lamb"))
    assert labels(asked) == labels(adaptive())
    assert arm(asked, "z2").fine[-1] == Knob("zero_allow_untested_optimizer", (True,))


def test_a_request_keeps_no_arm_that_is_refused_without_it_as_well() -> None:
    offload = RequestedKnob(OFFLOAD_OPTIMIZER, ("none", "cpu"))
    assert labels(adaptive(offload, at=here(has_experts=True), stages=(2, 3))) == ["z2", "z2-offload-optimizer"]


def test_of_stages_that_nobody_asked_for_nothing_is_told() -> None:
    at = here(has_experts=True)
    assert stages_not_tried(ALL, at, [RequestedKnob(STAGE, (1, 2))]) == []
    assert len(stages_not_tried(ALL, at, [RequestedKnob(STAGE, (1, 3))])) == 1


@pytest.mark.parametrize(
    ("zero", "expected", "left_out"),
    [
        ({"stage": 0}, ["z0", "z3"], "1 and 2"),
        ({"stage": 3}, ["z0", "z3"], "1 and 2"),
        ({"stage": 1}, ["z1", "z2"], "0 and 3"),
    ],
)
def test_of_gradients_that_the_code_adds_up_itself_as_many_are_lost_as_at_the_stage_that_was_typed(
    zero: dict[str, int], expected: list[str], left_out: str
) -> None:
    base = {"optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    at = here(base=base, repeats_backward=True)
    stages = dict.fromkeys(label.split("-")[0] for label in labels(adaptive(at=at)))
    assert list(stages) == expected
    assert not any("offload-optimizer" in label for label in labels(adaptive(at=at)) if label[1] in "12")
    (told,) = stages_not_tried(ALL, at, [])
    assert told.startswith(f"ZeRO stage {left_out} is not tried: The program calls backward more than once")


def test_zenflow_keeps_its_offload() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {"topk_ratio": 0.1}}
    at = here(base={"optimizer": {"type": "AdamW"}, "zero_optimization": zero})
    found = labels(adaptive(at=at))
    assert found
    assert all("offload-optimizer" in label for label in found)
    assert stages_not_tried(ALL, at, [])[0].startswith("ZeRO stage 0 is not tried: ZenFlow works with an optimizer")
