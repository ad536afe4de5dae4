"""`zerotune sync`: it sends MLflow the records that it has missed while a study or a training ran."""

import contextlib
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from flows.interrupts import Aside, interrupts
from flows.terminal import say, say_ways, telling_still
from trial_lib.foresee.plan.plan_record import PlanPaths
from trial_lib.full_experiment.driver import write_record
from trial_lib.records.full_experiment_folder import FullExperimentPaths, FullExperimentRecord
from trial_lib.records.study_folder import StudyPaths, work_dir_of
from trial_lib.study.kept.copies import told_apart
from trial_lib.study.kept.folder import hold_lock
from trial_lib.study.kept.record_file import read_record, read_record_file, write_study_record
from trial_lib.tracking.full_experiment_sync import FullExperimentSync
from trial_lib.tracking.plan_sync import PlanSync
from trial_lib.tracking.runs import Answers
from trial_lib.tracking.sync import StudySync
from trial_lib.tracking.tracker import Sync
from trial_lib.tracking.tracking_uri import default_tracking_uri, ways_to, without_password
from trial_lib.wire.errors import InputError

_SILENT_S = 120.0  # without any complete answer; a store may make its tables first


def sync_command(root: Path) -> int:
    """Sends MLflow the records that it lacks: of a study with its full experiment, of a full experiment, or of a plan.

    Args:
        root: the folder of the study, the full experiment or the plan.

    Returns:
        The exit code, which is 1 if MLflow refused the records or did not answer.

    Raises:
        InputError: there is nothing to send, or a record is damaged.
    """
    root = root.absolute()
    tracking_uri = default_tracking_uri(work_dir_of(root))
    shown = without_password(tracking_uri)
    syncs = _syncs(root, tracking_uri)
    interrupts.resume_command = shlex.join(["zerotune", "sync", str(root)])
    for sync in syncs:
        try:
            _run(sync)
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - errors of MLflow and of its libraries
            reason = str(error).replace(tracking_uri, shown)
            say(f"MLflow ({shown}) did not record it: {reason}")
            say(f"Nothing is lost. Try again later with: {interrupts.resume_command}")
            return 1
    say(f"MLflow ({shown}) has all records of {root.name}.")
    say_ways("In MLflow:", ways_to(tracking_uri, syncs[0].page))
    return 0


def _run(sync: Sync) -> None:
    """Sends records.

    Raises:
        TimeoutError: MLflow's server is too slow, as one that sends a byte a second.
        Exception: whatever MLflow raises.
    """
    began = time.monotonic()
    sending = Aside(sync.run)
    with telling_still("sending records to MLflow"):
        while sending.goes_on:
            if time.monotonic() > max(began, Answers.last_at) + _SILENT_S:
                raise TimeoutError(f"no request was answered in full within {_SILENT_S:.0f} s")
            sending.wait()
    sending.result()


def _syncs(root: Path, tracking_uri: str) -> list[Sync]:
    """Returns the senders of a folder's records. A study's run comes first, because its full experiment's needs it."""
    study, own = StudyPaths(root), FullExperimentPaths(root)
    if study.record.is_file():
        full_experiment = FullExperimentPaths(study.full_experiment.root)
        trained = _record_of(full_experiment) if full_experiment.record.is_file() else None
        record, copied = told_apart(read_record(study), study.record, resumes=False)
        if copied:
            with _written_by_us(root, study.lock, "study", copied):
                if trained is not None:
                    write_record(full_experiment, trained.of_study(record.study_id))
                write_study_record(study, record)
        after = [] if trained is None else [FullExperimentSync(full_experiment, tracking_uri)]
        return [StudySync(study, tracking_uri), *after]
    if own.record.is_file():
        own_record, copied = told_apart(_record_of(own), own.record, resumes=False)
        if copied:
            with _written_by_us(root, own.lock, "full experiment", copied):
                write_record(own, own_record)
        return [FullExperimentSync(own, tracking_uri)]
    if PlanPaths(root).record.is_file():
        return [PlanSync(PlanPaths(root), tracking_uri)]
    raise InputError(
        "this is the folder neither of a study, nor of a full experiment, nor of a plan.",
        where=str(root),
        remedy="Name a folder in zerotune-studies, zerotune-experiments or zerotune-plans.",
    )


def _record_of(paths: FullExperimentPaths) -> FullExperimentRecord:
    return read_record_file(paths.record, FullExperimentRecord, "the full experiment's record", "Restore the file.")


@contextlib.contextmanager
def _written_by_us(root: Path, lock: Path, what: str, copied: str) -> Iterator[None]:
    """Locks a copy while its body writes the copy's records, and prints a note."""
    try:
        held = hold_lock(lock, what)
        try:
            yield
        finally:
            held.release()
    except OSError as error:
        raise InputError(
            f"{copied} ZeroTune cannot write that into its record ({error.strerror}).",
            where=str(root),
            remedy="Make the folder writable, or sync the original.",
        ) from None
    say(f"note: {copied}")
