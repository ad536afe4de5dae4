"""No study of a configuration that the user's own DeepSpeed refuses."""

from collections.abc import Callable

from trial_lib.records.study_folder import StudyStatus
from trial_lib.study.opening.open_study import OpenStudy
from trial_lib.wire.errors import InputError

Wait = Callable[[Callable[[], InputError | None]], InputError | None]
"""Calls what waits, and returns what that returns."""


def require_accepted_config(study: OpenStudy, wait: Wait = lambda work: work()) -> None:
    """Waits until DeepSpeed has been asked about the configuration.

    Args:
        study: that is open, and of which nothing runs yet.
        wait: how to wait.

    Raises:
        InputError: it refuses it; the study is closed, and a new one is gone without a trace.
    """
    refusal = wait(study.config_check.refusal)
    if refusal is None:
        return
    if study.is_new:
        study.remove()
    else:
        study.finish(StudyStatus.FAILED, str(refusal))
        study.close()
    raise refusal
