"""A probe is installed once for a process, and a later one takes its place."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch

from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH
from zerotune.trial_lib.messages.orders import SizeOrder, StepWindow
from zerotune.trial_lib.rank import probe as of_ranks
from zerotune.trial_lib.rank.batch_source import BatchSource
from zerotune.trial_lib.rank.patching import installed
from zerotune.trial_lib.rank.probe import Probe
from zerotune.trial_lib.rank.program_facts import ProgramFacts

EMPTY: list[str] = []


class NotedProbe(Probe):
    def __init__(self, overrides: dict[str, Any], facts: ProgramFacts) -> None:
        order = SizeOrder(
            window=StepWindow(),
            memory_limit=None,
            arguments=[],
            overrides=overrides,
            with_profile=False,
            **dict.fromkeys(("logs", "measurements", "failures", "states", "engine_built"), EMPTY),
        )
        session: Any = SimpleNamespace(phases={})
        super().__init__(order, BatchSource((), {}, Path()), facts, session)
        self.events: list[str] = []

    def initialize_called(self) -> None:
        self.events.append("called")

    def engine_built(self, engine: Any) -> None:
        self.events.append("built")

    def frozen_engine_built(self) -> None:
        self.events.append("frozen")

    def group_destroyed(self) -> None:
        self.events.append("destroyed")


def initialize(model: Any, optimizer: Any = None, config: Any = None) -> Any:
    return SimpleNamespace(module=model, config=dict(config)), optimizer, None, None


def test_an_installed_probe_hears_of_engines_that_follow_the_candidate_until_another_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deepspeed, "initialize", initialize)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group=None: None)
    monkeypatch.setattr(of_ranks, "current", None)
    facts, overrides = ProgramFacts(), {MICRO_BATCH: 3}
    first, second = NotedProbe(overrides, facts), NotedProbe(overrides, facts)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with installed(()):
        first.install()
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={MICRO_BATCH: 1})
        frozen, *_ = deepspeed.initialize(model=model, config={MICRO_BATCH: 1})
        assert (engine.config[MICRO_BATCH], frozen.config[MICRO_BATCH]) == (3, 1)
        overrides[MICRO_BATCH] = 5
        second.install()
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={MICRO_BATCH: 1})
        assert engine.config[MICRO_BATCH] == 5
        torch.distributed.destroy_process_group()
        for each in (first, second):
            each._plain_steps.end()
    assert first.events == ["called", "built", "called", "frozen"]
    assert second.events == ["called", "built", "destroyed"]
    assert facts.found.ds_config == {MICRO_BATCH: 1}
    assert deepspeed.initialize is initialize
