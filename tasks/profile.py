"""The result of the profile trial, for the study, its log and Prefect."""

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from tasks.telling import told_if_possible
from trial_lib.launch.trial_files import uncovered_after_all
from trial_lib.records.units import bytes_shown
from trial_lib.study.driver import StudyDriver
from trial_lib.study.opening.size_limit import size_limit
from trial_lib.study.profile.profile_report import model_notes, program_notes, report_profile
from trial_lib.wire.whole_files import write_whole


@task(name="profile", cache_policy=NO_CACHE, persist_result=False)
def tell_profile(driver: StudyDriver) -> None:
    """Writes the profile, and the memory that each ZeRO stage needs, to the study, its log and Prefect."""
    assert driver.state.profile is not None
    assert driver.state.profile.profile is not None
    profile, program = driver.state.profile.profile, driver.state.profile.program
    limit = size_limit(driver.setup.arguments, driver.known.base_config, profile, program)
    report = report_profile(profile, driver.known.base_config, driver.setup.slots, limit)
    write_whole(driver.setup.paths.profile, report.model_dump_json(indent=2))
    for line in report.lines():
        driver.log.info("%s", line)
        get_run_logger().info(line)
    profiled = driver.state.profile
    experiment = driver.setup.experiment
    # The study has tried a layer over a folder of its own. The program's may have a reason for none.
    is_uncovered = profiled.files == "intercepted"
    uncovered = uncovered_after_all(experiment.model_dir, experiment.notes) if is_uncovered else ""
    mapped = experiment.config.arg_mappings
    notes = (profiled.note, uncovered, *program_notes(program, mapped), *model_notes(profile))
    for note in filter(None, notes):
        driver.log.warning("%s", note)
    rows = "\n".join(
        f"| {stage.stage} | {bytes_shown(stage.states)} | {stage.largest_micro_batch} |" for stage in report.stages
    )
    what = "largest micro-batch, first guess" if limit else "micro-batch that memory would hold, first guess"
    with told_if_possible(driver.log):
        create_markdown_artifact(
            "\n".join(
                [
                    "## Profile",
                    *(f"- {line}" for line in report.lines()[:2]),
                    "",
                    f"| ZeRO stage | states on a device | {what} |",
                    "|---|---|---|",
                    rows,
                ]
            ),
            key="profile",
            description="The memory that the model needs.",
        )
