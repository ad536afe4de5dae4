"""A plan from its arguments to its folder and to MLflow, for the command and for the flow of deployments."""

import contextlib
import fcntl
import importlib
import logging
import os
import shlex
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flows.interrupts import interrupts
from flows.terminal import telling_still
from trial_lib.plan.plan_record import PlanArguments, PlanPaths, PlanRecord
from trial_lib.report.plan_page import write_plan_page
from trial_lib.study.folder import remove_folder
from trial_lib.study.open_plan import ReadPlan, open_plan, read_plan
from trial_lib.study.plan_run import Foreseer, run_plan
from trial_lib.tracking.sync import PlanSync
from trial_lib.tracking.tracker import Tracker
from trial_lib.tracking.tracking_uri import default_tracking_uri, is_database

_SCRATCH = "zerotune-plan-"
_TRACKING_CLOSE_S = 30.0


@dataclass(frozen=True)
class PlanEnd:
    """A plan that has ended."""

    record: PlanRecord  # of the plan
    paths: PlanPaths  # its files
    tracker: Tracker  # has sent it to MLflow, or has failed


def plan_to_end(
    arguments: PlanArguments, work_dir: Path, tell: Callable[[str], None], check: Callable[[], None] = interrupts.check
) -> PlanEnd:
    """Runs a plan. Its folder is removed unless its answer and its page are complete.

    Args:
        arguments: the plan's.
        work_dir: the folder of the plans and of the tracking store.
        tell: called with a sentence every few seconds.
        check: called often. Its error ends the plan.

    Raises:
        InputError: the input is wrong. Nothing was written.
        ProgramNotForeseenError: the program cannot be foreseen.
        KeyboardInterrupt: a signal has arrived.
    """
    with interrupts.opening():
        read = read_plan(arguments, tell, check)
        check()
        tracking_uri = default_tracking_uri(work_dir)
        remove_left_scratch(Path(tempfile.gettempdir()))
        scratch, held = _new_scratch()
        interrupts.leavings.append(scratch)
    for note in read.notes:
        tell(f"note: {note}")
    try:
        return _planned(read, work_dir, scratch, tracking_uri, tell, check)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(held)
        with contextlib.suppress(ValueError):
            interrupts.leavings.remove(scratch)


def remove_left_scratch(parent: Path) -> None:
    """Removes the scratch folders of plans of this user that were killed. A plan that runs holds its folder."""
    for folder in parent.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):
            held = _hold(folder) if folder.lstat().st_uid == os.geteuid() else None
            if held is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(held)


def _new_scratch() -> tuple[Path, int]:
    # Makes a scratch folder, and holds it. Another plan may have removed one that was not held yet.
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        with contextlib.suppress(FileNotFoundError):
            held = _hold(folder)
            if held is not None:
                if folder.exists():
                    return folder, held
                os.close(held)


def _hold(folder: Path) -> int | None:
    # Locks a folder until its descriptor is closed, at last by the end of this process; None if another holds it.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def write_page(paths: PlanPaths, tell: Callable[[str], None]) -> None:
    """Writes the page of a plan. If that fails, the plan is complete without it."""
    try:
        write_plan_page(paths)
    except Exception as error:  # noqa: BLE001 - whatever cannot be drawn, the figures are in the record
        tell(f"note: the page was not written ({type(error).__name__}: {error}). {paths.record} has all figures.")


def _import_ahead(tracking_uri: str) -> None:
    # Imports MLflow's client and its store, which takes seconds, while the first run has only one core to use.
    with contextlib.suppress(Exception):
        # An error is the tracker's to tell.
        importlib.import_module("mlflow.tracking")
        if is_database(tracking_uri):
            importlib.import_module("mlflow.store.tracking.sqlalchemy_store")


def _planned(
    read: ReadPlan,
    work_dir: Path,
    scratch: Path,
    tracking_uri: str,
    tell: Callable[[str], None],
    check: Callable[[], None],
) -> PlanEnd:
    opened = open_plan(read, work_dir, scratch)
    root, is_complete = opened.paths.root, False
    interrupts.leavings.append(root)
    processes = read.arguments.max_processes or len(os.sched_getaffinity(0))
    try:
        threading.Thread(target=_import_ahead, args=(tracking_uri,), name="import", daemon=True).start()
        with Foreseer(opened, tell) as foresee:
            tell(f"foreseeing {read.experiment.name} on {', '.join(str(each.cluster) for each in read.asked)}")
            record = run_plan(opened, foresee, processes, tell, check)
        check()
        tell(f"writing {opened.paths.report}")
        with telling_still("writing the page", tell):
            write_page(opened.paths, tell)
        check()
        # MLflow has a part of it from now on, so an interrupt leaves the plan there.
        interrupts.leavings.remove(root)
        is_complete = True
        after = f"Interrupted after the plan was complete. It is in {root}."
        interrupts.ended = lambda: f"{after} Send it to MLflow with: zerotune sync {shlex.quote(str(root))}"
        tracker = Tracker(lambda: PlanSync(opened.paths, tracking_uri), tracking_uri)
        tell(f"tracking: {tracker.tracking_uri}")
        tracker.start()
        with telling_still("sending the plan to MLflow", tell):
            tracker.close(_TRACKING_CLOSE_S)
        check()
        interrupts.ended = lambda: after
    except BaseException:
        if not is_complete:
            remove_folder(root, logging.getLogger(__name__))
        raise
    finally:
        with contextlib.suppress(ValueError):
            interrupts.leavings.remove(root)
    return PlanEnd(record, opened.paths, tracker)
