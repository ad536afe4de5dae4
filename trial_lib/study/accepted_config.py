"""No study starts with a configuration that the user's own DeepSpeed refuses."""

from collections.abc import Callable

from trial_lib.messages.errors import InputError
from trial_lib.records.folders import StudyStatus
from trial_lib.study.open_study import OpenStudy

Wait = Callable[[Callable[[], InputError | None]], InputError | None]
"""Calls a function that waits, and returns its result."""


def require_accepted_config(study: OpenStudy, wait: Wait = lambda work: work()) -> None:
    """Waits for DeepSpeed's answer about the configuration.

    Args:
        study: an open study of which nothing runs yet.
        wait: how to wait.

    Raises:
        InputError: DeepSpeed refuses it. The study is closed, and the folder of a new one is removed.
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
