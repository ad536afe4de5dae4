"""A command's flow runs the study that the command has opened, and looks in Prefect like a deployment's."""

import inspect
from typing import Any

import pytest
from prefect.states import Completed, State

from zerotune.flows import tune as tune_flow


@pytest.mark.parametrize(
    ("module", "own", "opened", "runs"),
    [
        (tune_flow, tune_flow.tune, tune_flow.tune_open, "run_with_restarts"),
        (tune_flow, tune_flow.experiment, tune_flow.experiment_open, "run_experiment"),
    ],
)
def test_a_flow_runs_what_is_open_already(
    module: Any, own: Any, opened: Any, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = object()
    ran: list[object] = []

    def run(what: object) -> State[Any]:
        ran.append(what)
        return Completed()

    monkeypatch.setattr(module, runs, run)
    flow = opened(given)
    assert flow.fn().is_completed()
    assert ran == [given]
    assert flow.name == own.name
    assert inspect.signature(flow.fn) == inspect.signature(own.fn)
