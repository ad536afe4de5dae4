"""The end of a study: its record and its report."""

from collections.abc import Callable

from trial_lib.records.full_experiment_folder import FullExperimentRecord
from trial_lib.records.study_folder import StudyRecord, StudyStatus
from trial_lib.study.opening.open_study import OpenStudy


def finish(study: OpenStudy, status: StudyStatus, reason: str = "") -> None:
    """Writes how a study ended, and its report.

    Args:
        study: no trial of it is running.
        status: how it ended.
        reason: why it ended. Empty if it completed.
    """
    study.finish(status, reason)
    # A cancelled run has seconds to end in, and its study may be resumed. `zerotune show` reads it meanwhile.
    if status is not StudyStatus.CANCELLED:
        _report(study)


def missing_files(study: OpenStudy) -> list[str]:
    """Returns the names of the files that a completed study should have, and does not."""
    paths = study.paths
    answer = [paths.best_ds_config, paths.best_command, paths.best_ds_metrics, paths.report]
    return [path.name for path in answer if study.record.status is StudyStatus.COMPLETED and not path.is_file()]


def told_if_ended(what: str, record: Callable[[], StudyRecord | FullExperimentRecord], see: str) -> Callable[[], str]:
    """Returns a function for `Interrupts.ended`. What has ended before this call counts as not ended: it is resumed.

    Args:
        what: what the record is of.
        record: called for the newest record.
        see: how to see the end.
    """
    before = record().ended_at

    def sentence() -> str:
        now = record()
        has_ended = now.status in (StudyStatus.COMPLETED, StudyStatus.FAILED) and now.ended_at != before
        return f"Interrupted after {what} had {now.status.value}. See {see}" if has_ended else ""

    return sentence


def _report(study: OpenStudy) -> None:
    """Writes the report. If that fails, the study has still completed, and the command says so (`missing_files`)."""
    # If the study has searched, it is loaded already (`load_ahead.py`).
    from trial_lib.report.write_report import write_report

    try:
        write_report(study.paths)
    except Exception:
        # The folder has all that the report would show.
        study.driver.log.warning("the report was not written", exc_info=True)
    study.tracker.notify()
