"""The study of a run, as the flow and the command that started it share it."""

from dataclasses import dataclass

from trial_lib.study.opening.open_study import OpenStudy


@dataclass
class RunningStudy:
    """The study that a flow runs.

    A command opens its study before the flow starts, so that the fork server is primed while Prefect starts. It hands
    this object to the flow (`flows.tune.tune_open`), and reads here how the flow left the study.

    Attributes:
        study: the open study. The flow replaces it when it resumes a search that failed.
        is_refused: whether the study has failed because the input is wrong. False if it was interrupted.
        training_failure: why the full experiment failed; None if it did not.
        has_begun: whether the flow has come to the study.
    """

    study: OpenStudy
    is_refused: bool = False
    training_failure: str | None = None
    has_begun: bool = False

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Leaves the study here. Prefect sends the flow to Ray with each task, which needs only its name."""
        return _StudyElsewhere, ()

    def interrupt(self) -> None:
        """Interrupts the study. It may be called from any thread."""
        self.study.interrupt()

    @property
    def is_down(self) -> bool:
        """Whether nothing of the study is left to do."""
        return self.study.is_down


class _StudyElsewhere:
    """Replaces a `RunningStudy` in a process that does not run it."""
