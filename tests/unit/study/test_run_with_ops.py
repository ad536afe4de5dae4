"""The first run of a program, which shows the ops that have to be built: they are built, and it runs again."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
from conftest import Trials

from zerotune.trial_lib.launch.trial import TrialPlan, unstarted
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.profile import run_with_ops


class Host:
    """Stands in for a place whose ranks need ops, and for the program's runs there."""

    starter_here = object()

    def __init__(self, needed: Sequence[str], cannot: Sequence[str] = ()) -> None:
        self._needed, self._cannot = needed, cannot
        self.built: list[str] = []
        self.runs: list[bool] = []

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        self.built += builders
        return dict.fromkeys(self._cannot, "no compiler")

    def run(self, plan: TrialPlan) -> TrialResult:
        self.runs.append(plan.ends_at_unbuilt_ops)
        plan.paths.failure(0).unlink(missing_ok=True)
        missing = [op for op in self._needed if op not in self.built or op in self._cannot]
        if missing and plan.ends_at_unbuilt_ops:
            plan.paths.root.mkdir(parents=True, exist_ok=True)
            plan.paths.failure(0).write_text(json.dumps({"type": "OpNotBuiltError", "message": missing[0]}))
        return unstarted(plan, Outcome.CRASHED if missing else Outcome.COMPLETED, "")


def ran(trials: Trials, host: Any) -> Outcome:
    plan = dataclasses.replace(trials.plan("plain.py"), as_typed=True)
    return run_with_ops(plan, host, host.run).outcome


def test_each_op_that_it_needs_is_built_and_it_runs_again(trials: Trials) -> None:
    host = Host(["ShareMemCommBuilder", "FusedAdamBuilder"])
    assert ran(trials, host) is Outcome.COMPLETED
    assert host.built == ["ShareMemCommBuilder", "FusedAdamBuilder"]
    assert host.runs == [True] * 3


def test_where_everything_is_built_it_runs_once(trials: Trials) -> None:
    host = Host([])
    assert ran(trials, host) is Outcome.COMPLETED
    assert (host.built, host.runs) == ([], [True])


def test_a_rank_says_itself_why_it_cannot_build_an_op(trials: Trials) -> None:
    host = Host(["FusedAdamBuilder"], cannot=["FusedAdamBuilder"])
    assert ran(trials, host) is Outcome.CRASHED
    assert host.runs == [True, False]


def test_on_several_hosts_the_ops_are_built_before(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host([])
    monkeypatch.setattr(host, "starter_here", None)
    assert ran(trials, host) is Outcome.COMPLETED
    assert host.runs == [False]
