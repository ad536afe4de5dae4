"""`zerotune show` and `sync`: what studies have left, shown and sent."""

import contextlib
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import click

from zerotune.flows.interrupts import Aside, interrupts
from zerotune.flows.planning import plan_document, show_plan
from zerotune.flows.terminal import print_document, say, say_ways, telling_still
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.plan_record import PlanPaths, PlanRecord
from zerotune.trial_lib.records.folders import (
    PLANS,
    FullExperimentPaths,
    FullExperimentRecord,
    StudyPaths,
    StudyStatus,
    work_dir_of,
)
from zerotune.trial_lib.study.folder import (
    find_study,
    hold_lock,
    read_record,
    read_record_file,
    read_run_record,
    with_own_id,
    write_record,
)
from zerotune.trial_lib.tracking.runs import Answers
from zerotune.trial_lib.tracking.sync import FullExperimentSync, PlanSync, StudySync, Sync
from zerotune.trial_lib.tracking.tracking_uri import default_tracking_uri, ways_to, without_password

# `zerotune show`: tables of a study or a plan, or all of it as JSON. It reads nothing but the folder, and writes a
# report that is missing there.


def show_command(study: str | None, as_json: bool) -> int:
    """`study` is a folder, an id, or the name of an experiment. None is the newest study in this folder.
    Raises InputError: there is no such study, or a file in its folder is damaged.
    """
    from zerotune.trial_lib.report.read_study import read_study

    plan = None if study is None else _plan_root(study)
    if plan is not None:
        return _show_plan(plan.absolute(), as_json)
    root = find_study(study, Path.cwd())
    _write_missing_report(StudyPaths(root))
    view = read_study(root)
    if as_json:
        print_document(view.document())
        return 0
    from rich.console import Console

    from zerotune.trial_lib.report.tables import print_study

    # A terminal breaks long lines. A file must not.
    console = Console() if click.get_text_stream("stdout").isatty() else Console(width=200)
    print_study(view, console)
    return 0


def _write_missing_report(paths: StudyPaths) -> None:
    # Writes the report of a study that has ended without one, if the folder is this user's.
    if paths.report.exists() or not paths.record.is_file() or paths.root.stat().st_uid != os.geteuid():
        return
    # A folder that somebody has sent may lead to any other.
    if paths.figures.is_symlink():
        return
    with contextlib.suppress(InputError):
        if read_record(paths).status not in (StudyStatus.COMPLETED, StudyStatus.FAILED):
            return
        from zerotune.trial_lib.report.html_report import write_report

        try:
            write_report(paths)
        except Exception as error:  # noqa: BLE001 - the tables need no report
            say(f"The report could not be written: {type(error).__name__}: {error}")


def _plan_root(named: str) -> Path | None:
    # The folder of a plan; None if there is none, or if a study has this name.
    roots = (root for root in (Path(named), Path.cwd() / PLANS / named) if (root / "plan.json").is_file())
    root = next(roots, None)
    if root is None or "/" in named:
        return root
    # A folder of this name may hold a file plan.json of another program's.
    with contextlib.suppress(InputError):
        find_study(named, Path.cwd())
        return None
    return root


def _show_plan(root: Path, as_json: bool) -> int:
    paths = PlanPaths(root)
    record = read_record_file(paths.record, PlanRecord, "the plan", "Make the plan again.")
    if as_json:
        print_document(plan_document(record, paths))
    else:
        show_plan(record, paths, click.echo)
    return 0


# `zerotune sync`: it sends MLflow the records that it has missed while a study or a training ran.

_SILENT_S = 120.0  # without any complete answer; a store may make its tables first


def sync_command(root: Path) -> int:
    """Sends MLflow the records that it lacks. Returns 1 if MLflow refused them or did not answer.
    Raises InputError: there is nothing to send, or a record is damaged.
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
    """Raises TimeoutError: MLflow's server is too slow, as one that sends a byte a second."""
    began = time.monotonic()
    sending = Aside(sync.run)
    with telling_still("sending records to MLflow"):
        while sending.goes_on:
            if time.monotonic() > max(began, Answers.last_at) + _SILENT_S:
                raise TimeoutError(f"no request was answered in full within {_SILENT_S:.0f} s")
            sending.wait()
    sending.result()


def _syncs(root: Path, tracking_uri: str) -> list[Sync]:
    # The senders of a folder's records. A study's run comes first, because its full experiment's needs it.
    study, own = StudyPaths(root), FullExperimentPaths(root)
    if study.record.is_file():
        full_experiment = FullExperimentPaths(study.full_experiment.root)
        trained = read_run_record(full_experiment, FullExperimentRecord) if full_experiment.record.is_file() else None
        record, copied = with_own_id(read_record(study), study.record, resumes=False)
        if copied:
            with _written_by_us(root, study.lock, "study", copied):
                if trained is not None:
                    write_record(full_experiment, trained.of_study(record.study_id))
                write_record(study, record)
        after = [] if trained is None else [FullExperimentSync(full_experiment, tracking_uri)]
        return [StudySync(study, tracking_uri), *after]
    if own.record.is_file():
        own_record, copied = with_own_id(read_run_record(own, FullExperimentRecord), own.record, resumes=False)
        if copied:
            with _written_by_us(root, own.lock, "full experiment", copied):
                write_record(own, own_record)
        return [FullExperimentSync(own, tracking_uri)]
    if PlanPaths(root).record.is_file():
        return [PlanSync(PlanPaths(root), tracking_uri)]
    what = "this is the folder neither of a study, nor of a full experiment, nor of a plan."
    remedy = "Name a folder in zerotune-studies, zerotune-experiments or zerotune-plans."
    raise InputError(what, where=str(root), remedy=remedy)


@contextlib.contextmanager
def _written_by_us(root: Path, lock: Path, what: str, copied: str) -> Iterator[None]:
    # Locks a copy while its body writes the copy's records, and prints a note.
    try:
        held = hold_lock(lock, what)
        try:
            yield
        finally:
            held.release()
    except OSError as error:
        what = f"{copied} ZeroTune cannot write that into its record ({error.strerror})."
        raise InputError(what, where=str(root), remedy="Make the folder writable, or sync the original.") from None
    say(f"note: {copied}")
