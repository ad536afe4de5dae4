"""The end of a study: its record and its report."""

import contextlib
import threading

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


def load_report() -> None:
    """Loads what a report needs in a thread, while trials run. The end of the study then need not wait for it."""
    threading.Thread(target=_load_report, daemon=True, name="load-report").start()


def _load_report() -> None:
    # The end of the study reports a failure.
    with contextlib.suppress(Exception):
        from trial_lib.report import write_report  # noqa: F401 - kept by Python
        from trial_lib.report.html_report import FIGURE, REPORT
        from trial_lib.report.page_parts import packed_plotly, page_template
        from trial_lib.report.plot_parts import empty_figure

        packed_plotly()
        for name in (REPORT, FIGURE):
            page_template(name)
        # Plotly reads its own defaults for the first figure.
        empty_figure("", "").to_json()


def _report(study: OpenStudy) -> None:
    """Writes the report. If that fails, the study has still completed."""
    # A flow that has not searched has not called `load_report`.
    from trial_lib.report.write_report import write_report

    try:
        write_report(study.paths)
    except Exception:
        # The folder has all that the report would show.
        study.driver.log.warning("the report was not written", exc_info=True)
    study.tracker.notify()
