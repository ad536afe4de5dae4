"""`zerotune show`, `list`, `compare`, `export`, `rm` and `sync`: what studies have left, shown, sent and removed."""

import contextlib
import json
import os
import shlex
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from rich.markup import escape

from zerotune.flows.interrupts import Aside, interrupts
from zerotune.flows.planning import plan_document, show_plan
from zerotune.flows.terminal import print_document, say, say_ways, telling_still
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.plan_record import PlanPaths, PlanRecord
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.folders import (
    PLANS,
    STUDIES,
    FullExperimentPaths,
    FullExperimentRecord,
    StudyPaths,
    StudyRecord,
    StudyStatus,
    work_dir_of,
)
from zerotune.trial_lib.records.result import SEARCH_METRICS
from zerotune.trial_lib.records.units import gain_shown, name_of, percent
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
    console = Console() if sys.stdout.isatty() else Console(width=200)
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


# `zerotune list`, `compare`, `export` and `rm`: the studies of a folder.


def list_command(as_json: bool) -> int:
    """Raises InputError: there is no study in this folder."""
    records = sorted(_records(Path.cwd()), key=lambda record: record.started_at)
    if as_json:
        shown = ("study_id", "name", "status", "method", "metric", "started_at", "ended_at", "gain", "gain_interval")
        print_document({"studies": [record.model_dump(mode="json", include=set(shown)) for record in records]})
        return 0
    rows = [
        (record.study_id, record.status.value, gain_shown(record.gain, record.gain_interval), _winner(record))
        for record in records
    ]
    _print_table(["study", "status", "gain", "answer"], rows)
    return 0


def _winner(record: StudyRecord) -> str:
    # The winner's name is shorter than the answer's sentence, which repeats the gain.
    with contextlib.suppress(OSError, ValueError):
        paths = StudyPaths(Path.cwd() / STUDIES / record.study_id)
        if record.gain is not None and record.gain != 1.0 and record.best_number is not None:
            candidate = paths.trial(record.best_number).candidate.read_text()
            return name_of(Candidate.model_validate_json(candidate))
    return record.finding or record.reason or "-"


def _records(work_dir: Path) -> list[StudyRecord]:
    folders = sorted((work_dir / STUDIES).glob("*/study.json"))
    if not folders:
        raise InputError(
            "there is no study.", where=str(work_dir / STUDIES), remedy="Run zerotune where its folder is."
        )
    found = []
    for path in folders:
        try:
            found.append(read_record(StudyPaths(path.parent)))
        except InputError as error:
            say(f"note: left out: {error}")
    return found


def compare_command(first: str, second: str, as_json: bool) -> int:
    """What two studies found, and what differs between them. Raises InputError: a study is missing or damaged."""
    from zerotune.trial_lib.report.read_study import read_study
    from zerotune.trial_lib.report.tables import NOT_IN_TURN, summary

    views = [read_study(find_study(named, Path.cwd())) for named in (first, second)]
    found = [summary(view) for view in views]
    # Arguments, versions, devices and settings: those that are alike say nothing.
    names = dict.fromkeys(name for each in found for name in (*each["answer"], *each["circumstances"]))
    rows = [(name, *({**each["answer"], **each["circumstances"]}.get(name, "-") for each in found)) for name in names]
    rows = [row for row in rows if row[0] in found[0]["answer"] or row[1] != row[2]]
    if as_json:
        answers = [{row[0]: row[place] for row in rows} for place in (1, 2)]
        print_document({"answers": [{"study": v.study_id, **each} for v, each in zip(views, answers, strict=True)]})
        return 0
    _print_table(["", "first", "second"], [("study", *(view.study_id for view in views)), *rows])
    if views[0].metric == views[1].metric and all(view.after.get(view.metric) for view in views):
        metric = SEARCH_METRICS[views[0].metric]
        before, after = (view.after[metric.name] for view in views)
        ratio = before / after if metric.smaller_is_better else after / before
        times = f"The second winner's {metric.name} is {ratio:.2f} times as good as the first's."
        say(f"{times} {NOT_IN_TURN}", to_people=False)
    return 0


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*headings, box=None, pad_edge=False)
    # The first column tells the rows apart, so it is never broken. The end of an id does so too.
    table.columns[0].no_wrap = True
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*map(escape, row))
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def export_command(study: str, archive: Path | None) -> int:
    """Writes a study's answer and report as a ZIP file, without its secrets, logs and code.
    Raises InputError: there is no such study, or the file exists or cannot be written.
    """
    from zerotune.trial_lib.inputs.known_secrets import KnownSecrets
    from zerotune.trial_lib.report.read_study import read_study
    from zerotune.trial_lib.tracking.run_content import study_artifacts
    from zerotune.trial_lib.tracking.runs import scratch_folder, shown_copy

    paths = StudyPaths(find_study(study, Path.cwd()).absolute())
    _write_missing_report(paths)
    secrets = KnownSecrets.of_study(paths)
    document = read_study(paths.root, secrets).document()
    archive = Path(f"{document['study']}.zip") if archive is None else archive
    try:
        with scratch_folder() as folder, zipfile.ZipFile(archive, "x", zipfile.ZIP_DEFLATED) as written:
            written.writestr("study.json", json.dumps(document, indent=2) + "\n")
            for file in study_artifacts(paths):
                if file.is_file() and not file.is_symlink():
                    written.write(shown_copy(file, folder, secrets), file.relative_to(paths.root))
    except OSError as error:
        what = f"the archive cannot be written ({error.strerror})."
        raise InputError(what, where=str(archive), remedy="Name another file.") from None
    say(f"{archive}: the answer and the report, without logs, code and secrets.")
    return 0


def share_command(study: str) -> int:
    """Prints the answer of a study as a row of the table of published trainings.
    Raises InputError: there is no such study, or the table cannot have its answer.
    """
    from zerotune.trial_lib.study.published import TABLE, shared_training

    own = shared_training(StudyPaths(find_study(study, Path.cwd())))
    shown = f"{own.devices} {own.device}, MFU {percent(round(own.mfu, 2))}"
    say(f"{shown}. A pull request would add this line to trial_lib/study/{TABLE.name}:")
    click.echo(own.row())
    return 0


def remove_command(studies: Sequence[str], is_sure: bool) -> int:
    """Removes studies' folders. What MLflow and Prefect have of them stays there.
    Raises InputError: there is no such study, a process drives it, or nobody can be asked.
    """
    roots = [find_study(study, Path.cwd()).absolute() for study in studies]
    for root in roots:
        read_record(StudyPaths(root))
    if not is_sure:
        if not sys.stdin.isatty():
            raise InputError("nobody can be asked whether to remove it.", where="zerotune rm", remedy="Add --yes.")
        if not click.confirm("\n".join([*map(str, roots), "Remove for ever? MLflow keeps its runs."])):
            return 0
    for root in roots:
        lock = hold_lock(StudyPaths(root).lock, "study")
        try:
            shutil.rmtree(root)
        except OSError as error:
            what, where = f"it cannot be removed ({error.strerror}).", str(error.filename or root)
            raise InputError(what, where=where, remedy="Mend its permissions, or remove the folder yourself.") from None
        finally:
            lock.release()
        say(f"removed {root}")
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
