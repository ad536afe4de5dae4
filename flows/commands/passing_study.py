"""A study without servers in a temporary folder, for `estimate` and `record`."""

import contextlib
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flows.interrupts import interrupts
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.opening.open_study import OpenStudy, open_planned, plan_study


@contextlib.contextmanager
def passing_study(arguments: StudyArguments, command: str) -> Iterator[OpenStudy]:
    """Yields an open study. Its folder is removed unless the body fails. Then its logs can be read.

    Args:
        arguments: the study's.
        command: zerotune's command. The folder is named after it.

    Raises:
        InputError: the experiment does not fit this host. Nothing was started.
        KeyboardInterrupt: a signal has arrived.
    """
    with interrupts.opening():
        planned = plan_study(arguments)
        interrupts.check()
        folder = Path(tempfile.mkdtemp(prefix=f"zerotune-{command}-"))
        interrupts.leavings.append(folder)
        study = open_planned(planned, folder)
    interrupts.again_command = shlex.join(["zerotune", *sys.argv[1:]])
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
