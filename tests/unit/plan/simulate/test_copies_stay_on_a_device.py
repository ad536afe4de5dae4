"""Which copies go between a device and its host."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerotune.trial_lib.messages.foreseen_run import OPERATIONS
from zerotune.trial_lib.plan.simulate.logs import cost_of
from zerotune.trial_lib.plan.simulate.pretended_device import NAME


def tensor_in(place: str) -> Any:
    """Stands for a tensor, because a test process has no such device."""
    content = torch.empty(4, 8, device="meta")
    return SimpleNamespace(
        device=SimpleNamespace(type=place),
        shape=content.shape,
        stride=content.stride,
        element_size=content.element_size,
        numel=content.numel,
        dtype=content.dtype,
    )


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    [(NAME, "meta", "copy"), (NAME, NAME, "copy"), (NAME, "cpu", "to_host"), ("cpu", NAME, "to_device")],
)
def test_only_a_copy_to_another_place_is_a_transfer(source: str, target: str, kind: str) -> None:
    made = [tensor_in(target)]
    found = cost_of(torch.ops.aten._to_copy.default, (), {}, [tensor_in(source)], made, made[0], [])
    assert found is not None
    assert OPERATIONS[found[0]] == kind
