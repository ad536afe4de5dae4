"""The answer of a study, written to its folder and shown in Prefect."""

import json

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from tasks.mlflow_links import in_words, link_to_mlflow
from tasks.telling import told_if_possible
from trial_lib.command.switches import deepspeed_part
from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.secrets.sent_command import sent_command
from trial_lib.study.answer import write_answer
from trial_lib.study.confirm.of_study import Answer, NoAnswer, cut_short
from trial_lib.study.driver import StudyDriver
from trial_lib.tracking.tracker import Tracker


@task(name="report", cache_policy=NO_CACHE, persist_result=False)
def report(driver: StudyDriver, answer: Answer, tracker: Tracker) -> None:
    """Writes the best configuration, its metrics and its command, and shows them in Prefect."""
    best, finding = answer.best, answer.finding
    candidate = driver.state.candidates[best.number]
    metric = driver.metric
    write_answer(driver.setup, driver.known, candidate, answer.document(driver))
    value = SEARCH_METRICS[metric].shown(best.metrics[metric])
    measured = f"Trial {best.number:04d} ({driver.state.label(best.number)}): {metric} {value}"
    headline = answer.sentence or measured
    # `tell_finding` has logged a confirmed answer.
    for line in dict.fromkeys([*([headline] if finding is None else []), measured]):
        driver.log.info("%s", line)
        get_run_logger().info(line)
    config = json.dumps(deepspeed_part(candidate.complete(driver.known.base_config)), indent=2)
    with told_if_possible(driver.log):
        create_markdown_artifact(
            "\n".join(
                [
                    f"## {headline}",
                    *([] if headline == measured else [measured]),
                    *([] if finding is None else ["", *(f"- {line}" for line in finding.lines), ""]),
                    *(f"- {line}" for line in filter(None, [cut_short(driver)])),
                    *(f"- {account.sentences}" for account in answer.why),
                    "```json",
                    config,
                    "```",
                    "```sh",
                    sent_command(driver.setup.paths.best_command.read_text(), driver.setup.experiment.model_dir),
                    "```",
                    f"- the whole command: `sh {driver.setup.paths.best_command}`",
                    f"- report, once the study has ended: `{driver.setup.paths.report}`",
                    f"- trials in MLflow: {in_words(tracker.ways)}",
                    f"- answer in MLflow: {in_words(tracker.run_ways)}",
                ]
            ),
            key="best-configuration",
            description="The winning DeepSpeed configuration.",
        )
        link_to_mlflow(tracker.ways, "mlflow", "The trials in MLflow")


@task(name="report", cache_policy=NO_CACHE, persist_result=False)
def report_none(driver: StudyDriver, none: NoAnswer) -> None:
    """Shows in Prefect that a study has no answer. Otherwise the artifact of an earlier study would stand there."""
    driver.log.warning("%s", none.sentence)
    get_run_logger().warning(none.sentence)
    with told_if_possible(driver.log):
        create_markdown_artifact(
            f"## {none.headline}\n{none.reason}\n- report, once the study has ended: `{driver.setup.paths.report}`",
            key="best-configuration",
            description=none.headline,
        )
