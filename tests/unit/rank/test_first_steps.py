import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.rank import first_steps
from zerotune.trial_lib.rank.first_steps import FirstSteps, Weights, modules_of

ENGINE: Any = SimpleNamespace()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_steps, "total", lambda values, engine: values)  # of a single rank
    monkeypatch.setattr(first_steps, "shards", lambda engine: {})  # without DeepSpeed's import


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_before_one_that_is_not_finite_can_be_compared(bad: float) -> None:
    steps = FirstSteps()
    for loss in (3.0, 2.0, bad, 1.0):
        steps.add(torch.tensor(loss), ENGINE)
    assert steps.over_ranks(ENGINE)["losses"] == [3.0, 2.0]


def test_steps_that_were_skipped_are_noted_with_their_losses() -> None:
    steps = FirstSteps()
    for loss, applied in ((3.0, False), (2.9, False), (2.8, True), (2.7, False), (2.6, True)):
        steps.add(torch.tensor(loss), ENGINE, applied)
    assert steps.skipped == [1, 2, 4]
    steps.keep(3)
    assert steps.skipped == [1, 2]


def engine_of(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return SimpleNamespace(module=model, optimizer=optimizer, device=torch.device("cpu"), dp_world_size=1)


def test_sums_of_parts_are_those_of_the_whole() -> None:
    """However a parameter is partitioned, ranks sum the same projection of it."""
    values = torch.randn(200_003)
    whole = first_steps._summed(values, 0, 5)
    parts = sum(
        first_steps._summed(values[start:end], start, 5) for start, end in ((0, 77), (77, 131_071), (131_071, 200_003))
    )
    assert torch.allclose(torch.as_tensor(parts), whole, rtol=1e-9)
    assert not torch.allclose(first_steps._summed(values, 0, 6), whole, rtol=0.1)


def test_sums_have_the_size_of_what_is_summed() -> None:
    changes = [torch.randn(10_000) for _ in range(200)]
    sizes = [float(first_steps._summed(change, 0, place).square().sum()) for place, change in enumerate(changes)]
    assert sum(sizes) / len(sizes) == pytest.approx(10_000, rel=0.1)


def test_other_rounding_moves_each_weight_by_a_unit_and_keeps_its_size() -> None:
    model = nn.Linear(64, 64)
    before = model.weight.detach().clone()
    Weights(engine_of(model)).round(2.0**-8)
    moved = (model.weight.detach() / before - 1.0).abs()
    assert torch.allclose(moved, torch.full_like(moved, 2.0**-8), rtol=1e-3)


def test_modules_are_as_deep_as_their_number_allows() -> None:
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(6) for part in ("qkv", "mlp")]
    modules, places = modules_of(["model.embed.weight", *names])
    assert modules[:3] == ["model.embed", "model.layers.0.qkv", "model.layers.0.mlp"]
    assert places == list(range(13))
    many = [f"model.layers.{layer}.{part}.weight" for layer in range(96) for part in ("qkv", "mlp")]
    modules, places = modules_of(many)
    assert 16 <= len(modules) <= 64
    assert places == sorted(places)
    assert modules_of(["a._orig_mod.b.weight"]) == modules_of(["a.b.weight"])


def test_what_needs_no_gradient_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    sums = Weights(engine_of(model)).sums()
    assert sums is not None
    assert sums[0, 0].abs().sum() == 0.0 < sums[0, 1].abs().sum()


@pytest.mark.parametrize(("value", "is_known"), [(1.0, True), (math.nan, False)])
def test_a_change_that_is_not_finite_is_not_recorded(value: float, is_known: bool) -> None:
    engine = engine_of(nn.Linear(4, 4))
    engine.get_global_grad_norm = lambda: value
    steps = FirstSteps(weighs=True)
    steps.training_begins(engine, None)
    with torch.no_grad():
        engine.module.weight.add_(value)
    for _ in range(first_steps.UPDATES):
        steps.add(torch.tensor(1.0), engine)
    found = steps.over_ranks(engine)
    assert (found["weight_change"] is not None) is is_known
    assert found["gradient_norms"] == [value if is_known else 0.0] * first_steps.UPDATES


def test_a_step_that_counts_pays_for_no_norm() -> None:
    """In 32 bits without ZeRO DeepSpeed notes no norm. A trial counts from the third step on."""
    engine = engine_of(nn.Linear(4, 4))
    engine.get_global_grad_norm = lambda: None
    steps = FirstSteps(weighs=True)
    steps.training_begins(engine, None)
    for _ in range(first_steps.UPDATES):
        engine.module(torch.ones(2, 4)).sum().backward()
        steps.step_begins(engine)
        steps.add(torch.tensor(1.0), engine)
    assert StepWindow().start_step == first_steps.UPDATES
    assert [norm > 0.0 for norm in steps.over_ranks(engine)["gradient_norms"]] == [True, True, False]


@pytest.mark.parametrize("betas", [(0.98, 0.92, 0.99), None, (1.0, 0.9)])
def test_an_optimizer_with_other_betas_than_adam_s_has_no_corrections(betas: Any) -> None:
    optimizer: Any = SimpleNamespace(state={"weight": {"step": 3}}, param_groups=[{"betas": betas}])
    assert first_steps._corrections(optimizer) == []
