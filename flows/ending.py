"""The end of a study: its record and its report."""

from trial_lib.records.study_folder import StudyStatus
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
