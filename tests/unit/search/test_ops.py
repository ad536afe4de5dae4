"""Which of DeepSpeed's ops a configuration needs."""

from typing import Any

import pytest

from zerotune.trial_lib.study.limits import ops_of


def with_optimizer(name: str, device: str | None = None, **zero: Any) -> dict[str, Any]:
    """Returns a configuration with an optimizer, offloaded to a device."""
    offload = {} if device is None else {"offload_optimizer": {"device": device}}
    return {"optimizer": {"type": name}, "zero_optimization": {"stage": 3, **offload, **zero}}


@pytest.mark.parametrize(
    ("config", "ops"),
    [
        ({}, ()),
        (with_optimizer("AdamW"), ("FusedAdamBuilder",)),
        (with_optimizer("Adam", "none"), ("FusedAdamBuilder",)),
        (with_optimizer("Adam", "cpu"), ("CPUAdamBuilder",)),
        (with_optimizer("Adam", cpu_offload=True), ("CPUAdamBuilder",)),
        (with_optimizer("Adam", "nvme"), ("CPUAdamBuilder", "AsyncIOBuilder")),
        (with_optimizer("Lion"), ("FusedLionBuilder",)),
        (with_optimizer("Lion", "cpu"), ("CPULionBuilder",)),
        (with_optimizer("Adagrad"), ()),
        (with_optimizer("Adagrad", "cpu"), ("CPUAdagradBuilder",)),
        (with_optimizer("Lamb"), ("FusedLambBuilder",)),
        (with_optimizer("SGD", "cpu"), ()),
        ({"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}, ()),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, ("AsyncIOBuilder",)),
        ({"zero_optimization": {"zero_quantized_weights": True}}, ("QuantizerBuilder",)),
        ({"zero_optimization": {"zero_quantized_gradients": False}}, ()),
        # What nobody can say before the code has run.
        ({"optimizer": "auto", "zero_optimization": "auto"}, ()),
    ],
)
def test_ops_follow_from_optimizer_offload_and_quantisation(config: dict[str, Any], ops: tuple[str, ...]) -> None:
    assert ops_of(config) == ops


def test_an_optimizer_of_the_code_needs_none_and_one_that_is_supposed_does() -> None:
    config = with_optimizer("Adam", "cpu", zero_quantized_weights=True)
    assert ops_of(config, code_has_optimizer=True) == ("QuantizerBuilder",)
    assert ops_of({}, unless_named="adam") == ("FusedAdamBuilder",)
    assert ops_of(with_optimizer("Lion"), unless_named="adam") == ("FusedLionBuilder",)
