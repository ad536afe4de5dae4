"""`zerotune show`: tables of a study or a plan, or all of it as JSON. It reads nothing but the folder, and writes
a report that is missing there.
"""

import contextlib
import os
from pathlib import Path

import click

from flows.terminal import print_document, say
from trial_lib.records.study_folder import PLANS, StudyPaths, StudyStatus
from trial_lib.wire.errors import InputError

PLAN_RECORD = "plan.json"


def show_command(study: str | None, as_json: bool) -> int:
    """Prints a study, which may be running, completed or interrupted, or a plan.

    Args:
        study: its folder, its id, or the name of its experiment; or the folder or the id of a plan. None for the newest
            study in this folder.
        as_json: whether to print one JSON document.

    Returns:
        The exit code.

    Raises:
        InputError: there is no such study, or a file in its folder is damaged.
    """
    from trial_lib.report.read_study import read_study
    from trial_lib.study.kept.find_study import find_study

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

    from trial_lib.report.tables import print_study

    # A terminal breaks long lines. A file must not.
    console = Console() if click.get_text_stream("stdout").isatty() else Console(width=200)
    print_study(view, console)
    return 0


def _write_missing_report(paths: StudyPaths) -> None:
    """Writes the report of a study that has ended without one, if the folder is this user's."""
    if paths.report.exists() or not paths.record.is_file() or paths.root.stat().st_uid != os.geteuid():
        return
    # A folder that somebody has sent may lead to any other.
    if paths.figures.is_symlink():
        return
    from trial_lib.study.kept.record_file import read_record

    with contextlib.suppress(InputError):
        if read_record(paths).status not in (StudyStatus.COMPLETED, StudyStatus.FAILED):
            return
        from trial_lib.report.write_report import write_report

        try:
            write_report(paths)
        except Exception as error:  # noqa: BLE001 - the tables need no report
            say(f"The report could not be written: {type(error).__name__}: {error}")


def _plan_root(named: str) -> Path | None:
    """Returns the folder of a plan; None if there is none, or if a study has this name."""
    from trial_lib.study.kept.find_study import find_study

    roots = (root for root in (Path(named), Path.cwd() / PLANS / named) if (root / PLAN_RECORD).is_file())
    root = next(roots, None)
    if root is None or "/" in named:
        return root
    # A folder of this name may hold a file plan.json of another program's.
    with contextlib.suppress(InputError):
        find_study(named, Path.cwd())
        return None
    return root


def _show_plan(root: Path, as_json: bool) -> int:
    from flows.commands.plan import plan_document, show_plan
    from trial_lib.foresee.plan.plan_record import PlanPaths, PlanRecord
    from trial_lib.study.kept.record_file import read_record_file

    paths = PlanPaths(root)
    record = read_record_file(paths.record, PlanRecord, "the plan", "Make the plan again.")
    if as_json:
        print_document(plan_document(record, paths))
    else:
        show_plan(record, paths, click.echo)
    return 0
