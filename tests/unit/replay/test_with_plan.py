import pytest

from benchmarks.replay.with_plan import BUDGETS, compared


def figures(regret, failed):
    return {**dict.fromkeys(map(str, BUDGETS), regret), "failed": failed}


def test_pairs_of_searches_are_compared_by_the_mean_difference():
    pairs = [
        {"without": figures(0.10, 0.2), "with": figures(0.06, 0.0)},
        {"without": figures(0.04, 0.1), "with": figures(0.02, 0.1)},
    ]
    found = compared(pairs)
    assert found["5"] == {"without": 0.07, "with": 0.04, "more": -0.03, "error": pytest.approx(0.01)}
    assert found["failed"]["more"] == pytest.approx(-0.1)
