"""The result of the confirming trials, for the log and for Prefect."""

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from tasks.telling import told_if_possible
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.study.confirm.finding import Confirmed
from trial_lib.study.confirm.of_study import answer_of, search_found
from trial_lib.study.driver import StudyDriver


def tell_leader(driver: StudyDriver) -> None:
    """Writes what the search expects most of. Who is in a hurry need not wait for its confirmation."""
    found = search_found(driver)
    if found:
        driver.log.info("%s", found)
        get_run_logger().info(found)


@task(name="confirm", cache_policy=NO_CACHE, persist_result=False)
def tell_finding(driver: StudyDriver) -> None:
    """Writes the result of the confirmation to the study's log and to Prefect."""
    answer = answer_of(driver)
    if answer is None or answer.finding is None:
        return
    finding = answer.finding
    for line in (finding.sentence, *finding.lines):
        driver.log.info("%s", line)
        get_run_logger().info(line)
    rows = [_row(one, finding.metric) for one in (finding.own, *finding.candidates) if one is not None]
    with told_if_possible(driver.log):
        create_table_artifact(rows, key="confirmation", description=finding.sentence)


def _row(confirmed: Confirmed, metric: str) -> dict[str, str]:
    value = confirmed.metrics.get(metric)
    return {
        "configuration": "your configuration" if confirmed.verdict == "own" else confirmed.name,
        metric: SEARCH_METRICS[metric].shown(value),
        "gain": "" if confirmed.gain is None else confirmed.gain.times,
        "verdict": confirmed.verdict,
        "trials": " ".join(f"{number:04d}" for number in confirmed.trials),
        "note": confirmed.reason or confirmed.losses,
    }
