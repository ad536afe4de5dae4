"""Adam of the code in the form that the candidate asks for."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zerotune.trial_lib.rank import torch_functions

KINDS = [torch.optim.Adam, torch.optim.AdamW]


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Returns the settings that the optimizers follow."""
    for kind in KINDS:
        monkeypatch.setattr(kind, "__init__", kind.__init__)
    settings: dict[str, Any] = {}
    torch_functions.install_fused_adam(lambda: settings)
    return settings


def trained(kind: Any, **options: Any) -> tuple[Any, torch.Tensor]:
    """Returns an optimizer and a weight after three of its steps."""
    weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 32))
    optimizer = kind([weight], lr=0.01, **options)
    for _ in range(3):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()
    return optimizer, weight.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_the_form_changes_and_the_result_does_not(kind: Any, wanted: dict[str, Any]) -> None:
    own, expected = trained(kind)
    wanted["fused"] = True
    fused, result = trained(kind)
    assert not own.defaults["fused"]
    assert fused.defaults["fused"] is True
    torch.testing.assert_close(result, expected)


def test_without_the_fused_form_torch_chooses_another_by_itself(wanted: dict[str, Any]) -> None:
    wanted["fused"] = False
    for own in ({}, {"fused": True}):
        optimizer, _ = trained(torch.optim.AdamW, **own)
        # Torch reads an explicit False as the wish for the slowest form.
        assert (optimizer.defaults["fused"], optimizer.defaults["foreach"]) == (None, None)
    assert trained(torch.optim.Adam, foreach=True)[0].defaults["foreach"] is True


def test_the_other_form_of_the_code_gives_way(wanted: dict[str, Any]) -> None:
    wanted["fused"] = True
    optimizer, _ = trained(torch.optim.AdamW, foreach=True)
    assert optimizer.defaults["fused"]
    assert not optimizer.defaults["foreach"]


def test_without_a_wish_the_code_decides(wanted: dict[str, Any]) -> None:
    assert trained(torch.optim.Adam, foreach=True)[0].defaults["foreach"] is True


def test_an_optimizer_to_differentiate_stays(wanted: dict[str, Any]) -> None:
    wanted["fused"] = True
    weight = torch.nn.Parameter(torch.ones(2))
    assert not torch.optim.Adam([weight], differentiable=True).defaults["fused"]


def test_an_optimizer_that_the_trainer_makes_is_known(wanted: dict[str, Any]) -> None:
    make = "def create(parameters):\n    return kind(parameters)\n"
    made = {}
    for module in ("transformers.trainer", "__main__"):
        names: dict[str, Any] = {"__name__": module, "kind": torch.optim.AdamW}
        exec(make, names)
        made[module] = names["create"]([torch.nn.Parameter(torch.zeros(2))])
    assert made["transformers.trainer"] in torch_functions.of_the_trainer
    assert made["__main__"] not in torch_functions.of_the_trainer
