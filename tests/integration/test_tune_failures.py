"""Studies that find nothing, and searches that fail."""

import json
import sys
from pathlib import Path

import pytest
from study_fixtures import Running, Zerotune, query

from zerotune.trial_lib.records.result import Outcome

pytestmark = pytest.mark.alone

# The command, but the first two times that the flow waits for the result of trial 2 it fails.
FAILS_TWICE = """
from zerotune.flows.cli import main
from zerotune.trial_lib.study.driver import StudyDriver

failures, wait = [], StudyDriver.next_ended

def next_ended(driver, **options):
    if driver.state.submitted is not None and len(failures) < 2:
        failures.append(1)
        raise RuntimeError("the search has a bug")
    return wait(driver, **options)

StudyDriver.next_ended = next_ended
main()
"""


@pytest.mark.long
def test_a_configuration_that_cannot_run_is_told_in_the_program_s_own_words(tmp_path: Path, home: Path) -> None:
    zerotune = Zerotune(tmp_path, home, program="--fail_above 0")
    ended = zerotune.run("asha", "-mt", "5")
    assert ended.returncode == 1
    assert "The program fails as it was typed. The program raised ValueError: a bug in the user's code" in ended.stderr
    assert 'raise ValueError(f"a bug' in ended.stderr
    assert str(zerotune.study.paths.trial(0).as_typed.log(0)) in ended.stderr
    assert zerotune.study.record["status"] == "failed"
    assert {asked.number for asked in zerotune.study.asked} == {0}
    name = zerotune.study.paths.root.name
    state = query(zerotune.prefect_database, "select state_type, run_count from flow_run where name = ?", name)
    assert state == [("FAILED", 1)]


@pytest.mark.long
def test_a_study_whose_trials_all_fail_says_so(tmp_path: Path, home: Path) -> None:
    zerotune = Zerotune(tmp_path, home, program="--fail_above 1")
    ended = zerotune.run("random", "-mt", "4", "--json")
    assert ended.returncode == 1, ended.stderr
    document = json.loads(ended.stdout)
    assert document["status"] == "failed"
    assert document["best"] is None
    assert document["headline"] == "Neither your configuration nor any of the 3 others could be measured."
    assert "All ended like this one: The program raised ValueError: a bug in the user's code" in document["reason"]
    results = zerotune.study.results
    assert [result.outcome for result in results.values()] == [Outcome.COMPLETED, *[Outcome.CRASHED] * 4]


@pytest.mark.long
def test_a_search_that_fails_is_resumed(tmp_path: Path, home: Path) -> None:
    zerotune = Zerotune(tmp_path, home)
    words = [sys.executable, "-c", FAILS_TWICE, "asha", str(zerotune.config), str(zerotune.model), "-mt", "3"]
    ended = Running([*words, "--max-search-runner-restarts", "2"], tmp_path, zerotune.environment).end()
    assert ended.returncode == 0, ended.stderr
    assert zerotune.study.searched == [0, 1, 2, 3]
    # The search's two may run at once.
    assert sorted(told.number for told in zerotune.study.told[:4]) == [0, 1, 2, 3]
    assert zerotune.study.record["status"] == "completed"
    name = zerotune.study.paths.root.name
    assert query(zerotune.prefect_database, "select state_type from flow_run where name = ?", name) == [("COMPLETED",)]
