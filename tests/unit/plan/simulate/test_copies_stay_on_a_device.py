"""Which copies go between a device and its host."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zerotune.trial_lib.messages.foreseen_run import OPERATIONS
from zerotune.trial_lib.plan.simulate.logs import OperationLog, cost_of
from zerotune.trial_lib.plan.simulate.pretended_device import NAME


def tensor_in(place: str, dtype: torch.dtype = torch.float32) -> Any:
    """Stands for a tensor, because a test process has no such device."""
    content = torch.empty(4, 8, device="meta", dtype=dtype)
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


@pytest.mark.parametrize(("kind", "rows"), [("to_host", ["to_host", "copy"]), ("to_device", ["copy", "to_device"])])
def test_a_copy_that_changes_the_format_is_made_on_the_host(kind: str, rows: list[str]) -> None:
    """What goes to the host is as large as on the device, and what comes from it has its format already."""
    places = (NAME, "cpu") if kind == "to_host" else ("cpu", NAME)
    source, target = tensor_in(places[0]), tensor_in(places[1], torch.bfloat16)
    log = OperationLog()
    log.note(cost_of(torch.ops.aten.copy_.default, (), {}, [target, source], [], target, log.dtypes))
    assert [OPERATIONS[row[0]] for row in log.rows] == rows
    (sent,), (changed,) = ([row for row in log.rows if row[-1] == on_host] for on_host in (0, 1))
    assert sent[3] == 32 * (4 if kind == "to_host" else 2)
    # The mark by which it goes through pages that are not locked.
    assert sent[2] == changed[3] == 32 * (4 + 2)


def test_a_copy_of_the_same_format_is_one_transfer() -> None:
    log = OperationLog()
    log.note(cost_of(torch.ops.aten.copy_.default, (), {}, [tensor_in("cpu"), tensor_in(NAME)], [], None, log.dtypes))
    assert [(OPERATIONS[row[0]], row[2]) for row in log.rows] == [("to_host", 0.0)]
