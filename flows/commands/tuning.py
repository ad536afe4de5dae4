"""A tuning command after its arguments are read: start the servers, run the flow, print the answer, stop everything."""

import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.ending import finish, missing_files, told_if_ended
from flows.flow_run import run_flow
from flows.interrupts import interrupts
from flows.live import LiveView
from flows.result_text import result_document, tell_failed_training, tell_result
from flows.running_study import RunningStudy
from flows.servers.prefect_server import prefect_server, require_home, require_server_for_all
from flows.servers.service import ServerError
from flows.terminal import print_document, say
from trial_lib.records.full_experiment_folder import full_experiment_id
from trial_lib.records.study_folder import StudyStatus
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.kept.folder import INTERRUPTED
from trial_lib.study.opening.accepted_config import require_accepted_config
from trial_lib.study.opening.open_study import OpenStudy, open_planned, plan_study, resume_study
from trial_lib.wire.errors import InputError
from trial_lib.wire.plain_text import plain

if TYPE_CHECKING:
    from prefect import Flow

WRONG_INPUT, FULL_EXPERIMENT_FAILED, REGRESSED, FILE_MISSING = 2, 3, 4, 5
_BEGUN_END_S = 5.0  # for the end of a profile trial that ran while a server did not start
_STATUS_EXIT = {StudyStatus.COMPLETED: 0, StudyStatus.FAILED: 1, StudyStatus.CANCELLED: 130, StudyStatus.RUNNING: 1}


def tune_command(arguments: StudyArguments, as_json: bool) -> int:
    """Tunes, and prints the answer.

    Returns:
        The exit code.

    Raises:
        InputError: the input is wrong. Nothing was started.
    """
    require_home()
    require_server_for_all(arguments.ray_address)
    with interrupts.opening():
        planned = plan_study(arguments, tell=say, check=interrupts.check)
        interrupts.check()
        study = open_planned(planned, Path.cwd())
    return _run(study, as_json)


def resume_command(root: Path, as_json: bool) -> int:
    """Resumes a study that was interrupted, or whose full experiment failed, and prints the answer.

    Returns:
        The exit code.

    Raises:
        InputError: there is nothing to resume.
    """
    require_home()
    with interrupts.opening():
        study = resume_study(root)
    try:
        require_server_for_all(study.driver.setup.arguments.ray_address)
    except InputError:
        study.close()
        raise
    return _run(study, as_json)


def _run(study: OpenStudy, as_json: bool) -> int:
    study.config_check.ask()
    arguments = study.driver.setup.arguments
    interrupts.resume_command = shlex.join(["zerotune", "resume", str(study.paths.root)])
    for note in study.driver.setup.experiment.notes:
        say(f"note: {note}")
    study.driver.log.debug("the study is open, and its servers are starting")
    say(f"study: {study.paths.root}")
    say(f"tracking: {study.tracker.tracking_uri}")
    running = RunningStudy(study)
    show = shlex.join(["zerotune", "show", str(study.paths.root)])
    interrupts.ended = told_if_ended("the study", lambda: running.study.record, f"it with: {show}")
    noting = interrupts.noting(running.interrupt)
    try:
        with noting, LiveView(study.paths, arguments) as view, prefect_server() as server:
            study.driver.log.addHandler(NoteHandler(view.note))
            # The words of a command may be secrets. Only the study's folder keeps them.
            shown = {**dict(arguments), "command": (), "study_dir": study.paths.root}
            runs = _flow_runs(study)

            def check() -> None:
                require_accepted_config(study, interrupts.aside)

            def load() -> "Flow[..., Any]":
                from flows.tune import tune_open

                return tune_open(running)

            def is_down() -> bool:
                return running.is_down

            def has_begun() -> bool:
                return running.has_begun

            log, begin = study.driver.log, study.driver.begin_profile
            run_flow(server, load, runs, log, is_down, check, begin, has_begun=has_begun, **shown)
        study = running.study
        if study.record.status is StudyStatus.RUNNING:
            raise ServerError("The Prefect server ended before the study had begun.")
        interrupts.check()
    except (KeyboardInterrupt, Exception) as error:
        if not interrupts.heard:
            # No trial may run when the end of the study is written.
            study.driver.cancel()
            study.driver.await_begun(_BEGUN_END_S)
            if isinstance(error, InputError):
                interrupts.resume_command = None
                if study.is_new and not any(study.paths.trials.glob("*")):
                    # Wrong input that shows only now leaves nothing, as any other does.
                    study.remove()
                    raise
            if study.record.status is StudyStatus.RUNNING:
                finish(study, StudyStatus.FAILED, str(error) or type(error).__name__)
            raise
        study = running.study
        # The signal came before the flow began, or the flow has cleaned up and raised it again.
        if study.record.status is StudyStatus.RUNNING:
            finish(study, StudyStatus.CANCELLED, INTERRUPTED)
    finally:
        study.close()
        study.driver.log.debug("everything is down")
    if interrupts.heard and not as_json:
        return _STATUS_EXIT[StudyStatus.CANCELLED]
    document = result_document(study)
    if as_json:
        print_document(document)
    else:
        tell_result(study, document)
    missing = missing_files(study)
    if missing:
        say(f"Not written: {', '.join(missing)}. The reason: {study.paths.log}. `zerotune show` writes the report.")
    if running.training_failure is not None:
        tell_failed_training(study, running.training_failure)
        return FULL_EXPERIMENT_FAILED
    if running.is_refused:
        return WRONG_INPUT
    if study.record.regression:
        return REGRESSED
    if missing:
        return FILE_MISSING
    return _STATUS_EXIT[study.record.status]


def _flow_runs(study: OpenStudy) -> list[str]:
    """Returns the names of the study's flow run and of its full experiment's flow run."""
    full_experiment = (
        [full_experiment_id(study.record.study_id)] if study.driver.setup.arguments.run_full_experiment else []
    )
    return [study.record.study_id, *full_experiment]


class NoteHandler(logging.Handler):
    """Shows the messages of a log without tracebacks. The log's file has those."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        """Shows one message."""
        self._show(plain(record.getMessage()))
