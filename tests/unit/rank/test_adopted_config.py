"""A full experiment's configuration in a program that has its own in its code: which engines follow it, and in what."""

from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
from deepspeed.runtime.activation_checkpointing import checkpointing

from zerotune.trial_lib.rank import interception

ADAM = {"type": "Adam", "params": {"lr": 1e-3}}
OWN = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 1}}
WINNER = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "optimizer": ADAM,
}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Returns the configurations that reach DeepSpeed, of a program that adopts the winner's."""
    found: list[dict[str, Any]] = []

    def initialize(args: Any = None, model: Any = None, optimizer: Any = None, config: Any = None) -> Any:
        found.append({**config})
        return SimpleNamespace(train_batch_size=lambda: 0), None, None, None

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    monkeypatch.setattr(checkpointing, "configure", checkpointing.configure)
    interception.adopt(WINNER)
    return found


def test_the_engine_that_trains_follows_and_a_teacher_keeps_its_own(given: list[dict[str, Any]]) -> None:
    teacher = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    deepspeed.initialize(config={**teacher})
    deepspeed.initialize(config={**OWN, "optimizer": ADAM})
    assert given == [teacher, WINNER]


def test_another_engine_that_trains_follows_in_what_the_winner_changed(given: list[dict[str, Any]]) -> None:
    deepspeed.initialize(config={**OWN, "optimizer": ADAM})
    deepspeed.initialize(config={**OWN, "optimizer": {**ADAM, "type": "SGD"}, "gradient_clipping": 1.0})
    assert given[1] == {**WINNER, "optimizer": {**ADAM, "type": "SGD"}, "gradient_clipping": 1.0}


def test_a_critic_with_another_batch_keeps_that(given: list[dict[str, Any]]) -> None:
    critic = {"train_micro_batch_size_per_gpu": 16, "zero_optimization": {"stage": 1}, "optimizer": ADAM}
    deepspeed.initialize(config={**OWN, "optimizer": ADAM})
    deepspeed.initialize(config={**critic})
    assert given[1] == {**critic, "zero_optimization": WINNER["zero_optimization"]}


def test_an_optimizer_that_the_code_hands_over_makes_an_engine_train(given: list[dict[str, Any]]) -> None:
    deepspeed.initialize(optimizer=object(), config={**OWN, "optimizer": ADAM})
    assert given == [WINNER]


def test_one_dictionary_of_two_engines_is_followed_twice(given: list[dict[str, Any]]) -> None:
    shared = {**OWN, "optimizer": ADAM}
    deepspeed.initialize(config=shared)
    deepspeed.initialize(config=shared)
    assert given == [WINNER, WINNER]
