"""Which changes of the weights are one training's, in other rounding, and which difference would have been seen."""

import math
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zerotune.trial_lib.messages.measurement import WeightChange
from zerotune.trial_lib.rank import first_steps
from zerotune.trial_lib.rank.first_steps import UPDATES, FirstSteps
from zerotune.trial_lib.study.weight_changes import FirstUpdates, WeightVerdict, far_apart, judge, roundoff


@pytest.fixture(autouse=True)
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_steps, "shards", lambda engine: {})


UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
ROUNDS = 3


@cache
def trained(
    data: int,
    dtype: torch.dtype = torch.float32,
    adam: bool = True,
    rounds_otherwise: bool = False,
    fault: str = "",
    micro: int = 8,
    rate: float = 1.0,
    weighs: bool = False,
) -> FirstUpdates:
    """Trains a small network for some steps of 16 samples, in a precision, as a rank does at stage 0."""
    torch.manual_seed(1)
    layers = [nn.Linear(24, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)]
    model = nn.Sequential(*layers)
    rate *= {"stands": 0.0, "half": 0.5}.get(fault, 1.0) * (1e-3 if adam else 0.1)
    kind: Any = torch.optim.AdamW if adam else torch.optim.SGD
    rule = kind(model.parameters(), rate, maximize=fault == "ascends")
    engine: Any = SimpleNamespace(module=model, optimizer=rule, device=torch.device("cpu"), dp_world_size=1)
    engine.get_global_grad_norm = lambda: None
    steps = FirstSteps(weighs=True)
    steps.begin(engine)
    steps.training_begins(engine, UNITS[dtype] if rounds_otherwise else None)
    if fault == "frozen":
        model[3].requires_grad_(False)
    for step in range(UPDATES):
        torch.manual_seed(100 * data + step)
        samples = torch.randn(16, 24)
        labels = samples[:, :8].argmax(-1)
        pieces = list(zip(samples.split(micro), labels.split(micro), strict=True))
        for place, (inputs, wanted) in enumerate(pieces):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                loss = nn.functional.cross_entropy(model(inputs).float(), wanted) * len(wanted) / 16
                if weighs:
                    # A mean over the tokens of a micro-batch, of which samples have different numbers.
                    losses = nn.functional.cross_entropy(model(inputs).float(), wanted, reduction="none")
                    tokens = 1.0 + 0.25 * (inputs[:, 23] > 0)
                    loss = (losses * tokens).sum() / tokens.sum() * len(wanted) / 16
            if fault != "dropped" or place < len(pieces) - 1:
                (loss * (4.0 if fault == "scaled" else 1.0)).backward()
        steps.step_begins(engine)
        rule.step()
        rule.zero_grad()
        steps.add(loss.detach(), engine)
        if fault == "narrow":
            for parameter in model.parameters():
                parameter.data.copy_(parameter.data.bfloat16())
    found = steps.over_ranks(engine)
    return FirstUpdates(found["gradient_norms"], found["weight_change"])


def verdict(dtype: torch.dtype, adam: bool, **other: Any) -> WeightVerdict:
    mine = [trained(data, dtype, adam) for data in range(ROUNDS)]
    its = [trained(data, dtype, adam, **other) for data in range(ROUNDS)]
    again = mine[1], trained(1, dtype, adam, rounds_otherwise=True)
    return judge(mine, its, again, UNITS[dtype])


# Both precisions and both rules, but not each with each: that is for the long tests.
CASES = pytest.mark.parametrize(
    ("dtype", "adam"),
    [
        (torch.float32, True),
        (torch.bfloat16, False),
        pytest.param(torch.float32, False, marks=pytest.mark.long),
        pytest.param(torch.bfloat16, True, marks=pytest.mark.long),
    ],
)


@CASES
@pytest.mark.parametrize("micro", [4, 16])
def test_another_cut_of_the_batch_changes_the_weights_alike(dtype: torch.dtype, adam: bool, micro: int) -> None:
    found = verdict(dtype, adam, micro=micro)
    assert (found.fault, found.updates) == ("", UPDATES)


@CASES
@pytest.mark.parametrize("fault", ["stands", "half", "ascends", "frozen", "dropped", "scaled", "narrow"])
def test_a_fault_is_found(dtype: torch.dtype, adam: bool, fault: str) -> None:
    assert verdict(dtype, adam, fault=fault).fault


@pytest.mark.parametrize("adam", [pytest.param(True, marks=pytest.mark.long), False], ids=["adam", "sgd"])
def test_a_mean_over_tokens_may_differ_as_much_as_your_own_does_with_that_micro_batch(adam: bool) -> None:
    mine = [trained(data, torch.float32, adam, micro=2, weighs=True) for data in range(ROUNDS)]
    rounded = trained(1, torch.float32, adam, rounds_otherwise=True, micro=2, weighs=True)
    cut = trained(1, torch.float32, adam, rounds_otherwise=True, micro=16, weighs=True)

    def found(cut_factor: float | None, **other: Any) -> WeightVerdict:
        its = [trained(data, torch.float32, adam, micro=16, weighs=True, **other) for data in range(ROUNDS)]
        return judge(
            mine, its, (mine[1], rounded if cut_factor is None else cut), UNITS[torch.float32], 1.0, cut_factor
        )

    # In another rounding alone it does not differ so much.
    assert found(None).fault
    agreed = found(1.0)
    assert not agreed.fault
    # The answer says how much less is seen then. What is larger is found.
    assert 0.02 < agreed.seen[0] < 1.0
    assert found(1.0, rate=1.0 + 1.2 * agreed.seen[0]).fault
    for fault in ("stands", "ascends", "frozen"):
        assert found(1.0, fault=fault).fault


@CASES
def test_a_difference_that_is_said_to_be_seen_is_seen(dtype: torch.dtype, adam: bool) -> None:
    whole, module = verdict(dtype, adam).seen
    assert 0.0 < whole <= module
    # A higher learning rate changes the weights by as much more.
    assert verdict(dtype, adam, rate=1.0 + 1.2 * whole).fault
    assert not verdict(dtype, adam, rate=1.0 + 0.1 * whole).fault


def test_the_sentence_of_a_fault_names_the_module_and_what_is_within_rounding() -> None:
    fault = verdict(torch.bfloat16, adam=True, fault="narrow").fault
    assert fault.startswith("the changes of the weights of 2 are ") or fault.startswith(
        "the changes of the weights are "
    )
    assert fault.endswith(" is within rounding)")


def test_without_a_trial_in_other_rounding_nothing_is_judged() -> None:
    mine = [trained(0)]
    assert judge(mine, mine, None, 2.0**-24).why == "your configuration was not measured in other rounding"
    assert judge(mine, [FirstUpdates()], (mine[0], mine[0]), 2.0**-24).why == "it could not be read"


def test_weights_that_do_not_move_yet_show_nothing() -> None:
    still = trained(0, fault="stands")
    assert judge([still], [still], (still, still), 2.0**-24).why.startswith("no weight has changed so far")


def test_modules_of_other_names_are_compared_as_one() -> None:
    mine, again = trained(1), trained(1, rounds_otherwise=True)
    assert mine.change is not None
    renamed = replace(mine, change=replace(mine.change, modules=[f"wrapped.{name}" for name in mine.change.modules]))
    found = judge([mine], [renamed], (mine, again), 2.0**-24)
    assert (found.fault, found.updates) == ("", UPDATES)
    half = trained(1, fault="half").change
    assert half is not None
    its = replace(mine, change=replace(half, modules=renamed.change.modules if renamed.change else []))
    assert judge([mine], [its], (mine, again), 2.0**-24).fault


def test_an_update_that_adam_has_counted_before_the_first_is_allowed_for() -> None:
    """DeepSpeed's optimizers of 16 bits without ZeRO begin with an update of nothing."""
    mine, again = trained(1), trained(1, rounds_otherwise=True)
    assert mine.change is not None
    assert len(mine.change.corrections) == UPDATES

    def later(share: float, counted: int) -> FirstUpdates:
        assert mine.change is not None
        steps = range(1 + counted, 1 + counted + UPDATES)
        corrections = [math.sqrt(1 - 0.999**step) / (1 - 0.9**step) for step in steps]
        sums = [[share * value for value in row] for row in mine.change.sums]
        return replace(mine, change=replace(mine.change, sums=sums, corrections=corrections))

    assert not judge([mine], [later(0.85, counted=1)], (mine, again), 2.0**-24).fault
    assert judge([mine], [later(0.85, counted=0)], (mine, again), 2.0**-24).fault
    assert judge([mine], [later(0.5, counted=1)], (mine, again), 2.0**-24).fault


def test_the_program_s_own_factor_is_in_its_gradients() -> None:
    mine, again, its = trained(1), trained(1, rounds_otherwise=True), trained(1, fault="scaled")
    assert judge([mine], [its], (mine, again), 2.0**-24).fault
    # Adam passes over the factor.
    assert not judge([mine], [its], (mine, again), 2.0**-24, factor=4.0).fault


def test_from_other_weights_a_change_may_be_twice_as_large() -> None:
    def change(size: float) -> FirstUpdates:
        return FirstUpdates(change=WeightChange(updates=4, modules=[""], sums=[[size, -size]]))

    assert far_apart([change(1.0)], [change(1.9), change(1.9)]) == ""
    assert far_apart([change(1.0)], [change(0.1)]) == "the change of the weights is 0.1 times as large as yours"
    assert far_apart([change(1.0)], [FirstUpdates()]) == ""


@pytest.mark.parametrize(
    ("config", "formats", "unit"),
    [
        ({}, (), 2.0**-24),
        ({"bf16": {"enabled": True}}, (), 2.0**-8),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, (), 2.0**-11),
        ({}, ("float32", "bfloat16"), 2.0**-8),
        ({}, ("float8_e4m3fn",), 2.0**-4),
    ],
)
def test_the_coarsest_format_rounds(config: dict[str, Any], formats: tuple[str, ...], unit: float) -> None:
    assert roundoff(config, formats) == unit
