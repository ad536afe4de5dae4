"""A study of real trials, its command killed again and again at random moments: every trial runs to its end once."""

import random
import time
from pathlib import Path

import pytest
from study_fixtures import Study, Zerotune
from worker_fixtures import alive, pids_of

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome

pytestmark = pytest.mark.alone

KILLS = 5
LONGEST_LIFE_S = 8.0


@pytest.mark.long
def test_a_study_that_is_killed_again_and_again_ends_with_every_trial_run_once(
    tmp_path: Path, home: Path, server: PrefectServer
) -> None:
    zerotune = Zerotune(tmp_path, home, program="--largest_micro_batch 300 --step_seconds 0.02")
    moments = random.Random(3)
    words: tuple[str | Path, ...] = ("binary", "-mt", "7", "-z", "1", "-mct", "1", "--start", "warm")
    finished: dict[int, int] = {}
    for _ in range(KILLS):
        command = zerotune.start(*words, PREFECT_API_URL=server.api_url)
        command.wait_until(lambda: "study:" in command.said, "the study")  # noqa: B023 - called before the next
        deadline = time.monotonic() + moments.uniform(0, LONGEST_LIFE_S)
        while time.monotonic() < deadline:
            command.look()
            time.sleep(0.05)
        command.process.kill()
        command.process.wait()
        assert command.left_over(2) == []
        study = zerotune.study
        assert not alive(pids_of(study))
        assert_kept(study, finished)
        finished = study.result_times()
        words = ("resume", study.paths.root)
    ended = zerotune.run("resume", study.paths.root, PREFECT_API_URL=server.api_url)
    assert ended.returncode == 0, ended.stderr
    assert_kept(study, finished)
    asked = [event.number for event in study.asked]
    assert asked == sorted(set(asked))
    assert sorted(event.number for event in study.told) == asked
    outcomes = {result.outcome for result in study.results.values()}
    assert outcomes <= {Outcome.COMPLETED, Outcome.OUT_OF_MEMORY}
    assert sum(event.purpose is Purpose.SEARCH for event in study.asked) == 6
    assert study.record["status"] == "completed"


def assert_kept(study: Study, finished: dict[int, int]) -> None:
    """Checks that no trial that had ended has run again."""
    times = study.result_times()
    assert {number: times[number] for number in finished} == finished
