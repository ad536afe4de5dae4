"""The constants that public rows give, and what a source without its own rows would get."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.foresee.public_gpus import fit_speed
from benchmarks.foresee.public_gpus.fit_speed import (
    ATTAINED,
    PRIOR,
    RESULTS,
    Fit,
    each_left_out,
    refitted,
    some_of_each,
)
from benchmarks.foresee.public_gpus.model_of_row import read_rows
from benchmarks.foresee.public_gpus.speed import CONSTANTS, groups, left_out, wide_key
from zerotune.trial_lib.plan.devices import Efficiencies, known_devices

FITTED = [*CONSTANTS, ATTAINED]
MATMUL = FITTED.index("matmul")


def fit_of(errors: list[float], on_volta: int = 0) -> Fit:
    """Steps that products of matrices alone decide, one of each source, the last of them on V100."""
    slopes = np.zeros((len(errors), len(FITTED)))
    slopes[:, MATMUL] = -1.0
    slopes[len(errors) - on_volta :, FITTED.index(ATTAINED)] = -1.0
    rows = [{"source": f"owner{index}/repository"} for index in range(len(errors))]
    return Fit(rows, PRIOR, np.zeros(len(FITTED)), np.array(errors), slopes, np.full(len(errors), 1e-3))


def test_a_source_without_its_rows_is_foreseen_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others are foreseen 20 % too fast, and this one right: by their constant it is too slow by as much."""
    known = fit_of([0.2, 0.2, 0.2, 0.0])

    def line_of(rows: Sequence[Mapping[str, Any]], _: Any, shifts: np.ndarray) -> Fit:
        own = [known.rows.index(row) for row in rows]
        errors = known.errors[own] - known.slopes[own] @ shifts
        return replace(known, rows=rows, shifts=shifts, errors=errors, slopes=known.slopes[own], noise=known.noise[own])

    monkeypatch.setattr(fit_speed, "line_of", line_of)
    errors = refitted(known, known.rows, {})
    assert errors.tolist() == pytest.approx([0.067, 0.067, 0.067, -0.2], abs=2e-3)
    found = each_left_out(known, errors)
    assert [each["median_of_logarithm"] for each in found["by_source"].values()] == pytest.approx(errors, abs=1e-3)
    assert found["constants"]["matmul"]["uncertainty"] == pytest.approx(0.05, abs=2e-3)


def test_rows_of_v100_decide_their_own_constant() -> None:
    fit = fit_of([0.1] * 8 + [0.5] * 8, on_volta=8)
    change = dict(zip(FITTED, fit.change(np.full(16, True)), strict=True))
    assert change["matmul"] == pytest.approx(-0.1, abs=2e-3)
    assert change[ATTAINED] == pytest.approx(-0.4, abs=2e-3)


def test_three_rows_of_a_group_count() -> None:
    rows = [row for row in read_rows() if not left_out(row)]
    some = groups(some_of_each(rows), wide_key)
    assert set(some) == set(groups(rows, wide_key))
    assert max(map(len, some.values())) == 3


def test_plans_have_the_width_of_speed_that_left_out_sources_give() -> None:
    results = json.loads(RESULTS.read_text())
    # By a hundredth: the product's is that of one file left out at a time.
    assert 0 <= Efficiencies().whole.spread - results["whole_spread"] <= 0.011
    assert 0.85 <= results["within_90"] <= 0.95


def test_plans_have_the_constants_that_the_rows_give() -> None:
    found = {name: each["value"] for name, each in json.loads(RESULTS.read_text())["constants"].items()}
    for name in ("matmul", "attention", "memory", "link", "network", "host_update"):
        assert getattr(Efficiencies(), name).value == pytest.approx(found[name], abs=6e-3), name
    assert known_devices()["v100-32gb"].attained == pytest.approx(found[ATTAINED], abs=6e-3)
