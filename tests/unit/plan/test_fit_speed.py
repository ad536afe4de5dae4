"""The constants that public rows give, and what a source without its own rows would get."""

import json

import numpy as np
import pytest

from benchmarks.foresee.public_gpus.fit_speed import PRIOR, RESULTS, Fit, each_left_out, some_of_each
from benchmarks.foresee.public_gpus.model_of_row import read_rows
from benchmarks.foresee.public_gpus.speed import CONSTANTS, groups, left_out, wide_key
from zerotune.trial_lib.plan.devices import Efficiencies

MATMUL = CONSTANTS.index("matmul")


def fit_of(errors: list[float]) -> Fit:
    """Steps that products of matrices alone decide, one of each source."""
    slopes = np.zeros((len(errors), len(CONSTANTS)))
    slopes[:, MATMUL] = -1.0
    rows = [{"source": f"source {index}"} for index in range(len(errors))]
    return Fit(rows, PRIOR, np.zeros(len(CONSTANTS)), np.array(errors), slopes, np.full(len(errors), 1e-3))


def test_a_source_without_its_rows_is_foreseen_by_the_others() -> None:
    """All others are foreseen 20 % too fast, and this one right: by their constant it is too slow by as much."""
    found = each_left_out(fit_of([0.2, 0.2, 0.2, 0.0]))
    errors = [each["median_of_logarithm"] for each in found["by_source"].values()]
    assert errors == pytest.approx([0.067, 0.067, 0.067, -0.2], abs=2e-3)
    assert found["constants"]["matmul"]["uncertainty"] == pytest.approx(0.05, abs=2e-3)


def test_three_rows_of_a_group_count() -> None:
    rows = [row for row in read_rows() if not left_out(row)]
    some = groups(some_of_each(rows), wide_key)
    assert set(some) == set(groups(rows, wide_key))
    assert max(map(len, some.values())) == 3


def test_plans_have_the_width_of_speed_that_left_out_sources_give() -> None:
    results = json.loads(RESULTS.read_text())
    assert results["whole_spread"] == Efficiencies().whole.spread
    assert 0.85 <= results["within_90"] <= 0.95
