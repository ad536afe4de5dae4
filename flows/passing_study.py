"""A study without servers, in a folder that goes when its command has what it wanted: of `estimate` and `record`."""

import contextlib
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flows.interrupts import interrupts
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.open_study import OpenStudy, open_planned, plan_study


@contextlib.contextmanager
def passing_study(arguments: StudyArguments, command: str) -> Iterator[OpenStudy]:
    """Yields an open study; its folder stays only where the body fails, so that the logs can be read.

    Args:
        arguments: the study's.
        command: of zerotune, for the folder's name.

    Raises:
        InputError: the experiment or this host do not fit; nothing was started.
        KeyboardInterrupt: a signal has been heard.
    """
    with interrupts.opening():
        planned = plan_study(arguments)
        interrupts.check()
        folder = Path(tempfile.mkdtemp(prefix=f"zerotune-{command}-"))
        interrupts.leavings.append(folder)
        study = open_planned(planned, folder)
    interrupts.resume_command = shlex.join(["zerotune", *sys.argv[1:]])
    try:
        with interrupts.noting(study.interrupt):
            yield study
            interrupts.check()
    except Exception:
        if not interrupts.heard:
            interrupts.leavings.remove(folder)
        raise
    finally:
        study.close()
        if folder in interrupts.leavings:
            interrupts.leavings.remove(folder)
            shutil.rmtree(folder, ignore_errors=True)
