"""`zerotune record`: it measures a whole grid of configurations into one file.

It starts no Prefect server and writes no MLflow run, because they would take processor time from the trials.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from flows.commands.passing_study import passing_study
from flows.interrupts import interrupts
from flows.terminal import say, say_error
from trial_lib.records.candidate import Candidate
from trial_lib.records.result import TrialResult
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.report.leaderboard import flat_knobs
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.driver import StudyDriver
from trial_lib.study.earlier.known_trials import ProfileFailedError, run_profile
from trial_lib.study.opening.needed_ops import study_space
from trial_lib.study.recording import grid, record_table
from trial_lib.wire.errors import InputError

MOST_CANDIDATES = 20_000


def record_command(arguments: StudyArguments, sizes: Sequence[int], repeats: int, output: Path) -> int:
    """Records a table of every lineage of the experiment's search space at each micro-batch size.

    Args:
        arguments: the study's. `search_space` in its YAML defines the lineages.
        sizes: micro-batch sizes, in samples.
        repeats: how often each candidate is measured.
        output: the table's file. Measurements that it already contains are not repeated.

    Returns:
        The exit code, which is 1 if the profile trial fails.

    Raises:
        InputError: the input is wrong. Nothing was measured.
    """
    if not output.absolute().parent.is_dir():
        raise InputError("its folder does not exist.", where=str(output), remedy="Name a file in a folder that exists.")
    try:
        with passing_study(arguments, "record") as study:
            # What the table has already is not measured again.
            interrupts.resume_command = interrupts.again_command
            run_profile(study)
            driver = study.driver
            driver.next_ended(timeout_s=0.0)
            candidates = _candidates(driver, sizes)
            say(f"Measuring {len(candidates)} candidates, {repeats} times each, into {output}.")
            record_table(driver, candidates, repeats, output, tell=_Teller())
    except ProfileFailedError as error:
        say_error(error)
        return 1
    return 0


def _candidates(driver: StudyDriver, sizes: Sequence[int]) -> list[Candidate]:
    profile = driver.state.profile
    assert profile is not None
    space = study_space(driver.setup, driver.known.base_config, profile)
    count = sum(arm.size for arm in space.arms) * len(sizes)
    if count > MOST_CANDIDATES:
        raise InputError(
            f"the search space has {count:,} candidates, and a table has at most {MOST_CANDIDATES:,}.",
            where="search_space",
            remedy="Fix some knobs there, or give them fewer values.",
        )
    return grid(driver, space, sizes)


class _Teller:
    """Prints a line for each trial, with the remaining time."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._measured = 0

    def __call__(self, done: int, total: int, candidate: Candidate, result: TrialResult) -> None:
        interrupts.check()
        self._measured += 1
        per_trial = (time.monotonic() - self._started) / self._measured
        left = timedelta(seconds=round(per_trial * (total - done)))
        throughput = result.metrics.get("throughput")
        said = result.outcome.value if throughput is None else SEARCH_METRICS["throughput"].shown(throughput)
        say(f"{done}/{total}, {left} left: {candidate.label} {flat_knobs(candidate.knobs)}: {said}")
