"""Writes a study's report and its figures into its folder."""

import contextlib
from importlib import import_module

from trial_lib.records.study_folder import StudyPaths
from trial_lib.report.figures import draw_figures
from trial_lib.report.html_report import render_figures, render_report
from trial_lib.report.read_study import read_study
from trial_lib.secrets.by_value import KnownSecrets
from trial_lib.wire.whole_files import OWNERS_FOLDER, write_whole

# MLflow imports them, in a thread of its own. Plotly looks for them among the modules that are there, and fails if one
# is only half there.
_OF_OTHERS = ("numpy", "pandas", "pyarrow")


def await_imports() -> None:
    """Imports what plotly would use if it were there, or waits for the thread that does. Call it before any drawing."""
    for module in _OF_OTHERS:
        with contextlib.suppress(Exception):
            import_module(module)


def write_report(paths: StudyPaths) -> None:
    """Writes the report of a study in any state.

    Raises:
        InputError: the study's record or history is damaged.
        OSError: the disk is full.
    """
    await_imports()
    view = read_study(paths.root, KnownSecrets.of_study(paths))
    figures = draw_figures(view)
    write_whole(paths.report, render_report(view, figures))
    paths.figures.mkdir(mode=OWNERS_FOLDER, exist_ok=True)
    for key, page in render_figures(view, figures).items():
        write_whole(paths.figures / f"{key}.html", page)
