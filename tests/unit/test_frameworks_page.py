"""docs/frameworks.md says what studies of real packages have left in benchmarks/results."""

import copy
import re

from benchmarks.programs.frameworks import CASES, PAGE, page, results


def test_the_page_has_the_recorded_results_and_nothing_else() -> None:
    text, rows = PAGE.read_text(), results()
    # `python -m benchmarks.programs.frameworks` writes it anew.
    assert page(text, rows) == text
    other = copy.deepcopy(rows)
    next(iter(other.values()))["versions"]["torch"] = "1.0"
    assert page(text, other) != text
    # A section without a result has none.
    empty = page(text, {})
    assert not any(row["answer"] in empty for row in rows.values())


def test_each_result_is_of_a_framework_that_the_page_has_a_place_for() -> None:
    assert results().keys() <= CASES.keys()
    assert {"table", "end", *CASES} == set(re.findall(r"<!-- (\w+) -->", PAGE.read_text()))


def test_a_gain_was_also_had_without_zerotune() -> None:
    for name, row in results().items():
        # Some studies have no plain runs to compare with, and the page says so.
        if "gain_plainly" in row:
            typed, best = (row["samples_per_s"][which] for which in ("typed", "best"))
            assert len(typed) == len(best) >= 2, name
            assert row["within"] == (row["gain"]["low"] <= row["gain_plainly"]["value"] <= row["gain"]["high"])
