"""The report of a study: one self-contained HTML file, with plotly's drawing code."""

import base64
import contextlib
import gzip
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from trial_lib.inputs.known_secrets import KnownSecrets
from trial_lib.messages.files import OWNERS_FOLDER, write_whole
from trial_lib.messages.measurement import STEP_PARTS
from trial_lib.records.folders import StudyPaths
from trial_lib.records.result import SEARCH_METRICS
from trial_lib.records.units import bytes_shown, duration, quantity
from trial_lib.report.figures import Drawn, draw_figures
from trial_lib.report.read_study import read_study
from trial_lib.report.study_view import StudyView, failure_groups, setting_text, trial_columns
from trial_lib.report.tables import planned_rows


def drawings(figures: Sequence[Drawn]) -> dict[str, Any]:
    return {figure.key: json.loads(figure.figure.to_json()) for figure in figures if figure.figure is not None}


@cache
def packed_plotly() -> str:
    """Plotly's code, compressed to two fifths; the page unpacks it."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 6, mtime=0)).decode()


@cache
def page_template(name: str) -> jinja2.Template:
    """A file of `templates`. It escapes its values, and a value that it lacks is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trial_lib.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = environment.filters
    filters |= {"duration": duration, "setting": setting_text}
    filters["number"] = lambda value, unit="": "-" if value is None else quantity(value, unit).rstrip()
    filters["interval"] = lambda ends: f"{ends[0]:.2f} to {ends[1]:.2f}"
    filters["bytes"] = lambda count: "-" if count is None else bytes_shown(count)
    return environment.get_template(name)


def render_report(view: StudyView, figures: Sequence[Drawn]) -> str:
    return page_template("report.html.j2").render(
        view=view,
        figures=figures,
        drawings=drawings(figures),
        plotly=packed_plotly(),
        failures=failure_groups(view.trials),
        compared=_compared(view),
        trials=view.ranked,
        columns=trial_columns("report", view.metric),
        planned=[] if view.planned is None else planned_rows(view.planned),
        parts=[part for part in STEP_PARTS if any(account.shares.get(part) for account in view.why)],
        config=None if view.best_config is None else json.dumps(view.best_config, indent=2),
    )


def render_figures(view: StudyView, figures: Sequence[Drawn]) -> dict[str, str]:
    page = page_template("figure.html.j2")
    return {
        each.key: page.render(view=view, figures=[each], drawings=drawings([each]), plotly=packed_plotly())
        for each in figures
        if each.figure is not None
    }


def _compared(view: StudyView) -> list[tuple[str, str, str]]:
    """The winner's metrics beside the user's: name, own (empty if not measured), winner."""
    shown = {name: SEARCH_METRICS[name].shown for name in dict.fromkeys((view.metric, "throughput"))}
    after: Mapping[str, float] = view.after
    return [(name, show(view.before.get(name)), show(after[name])) for name, show in shown.items() if name in after]


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

    Raises InputError if the study's record or history is damaged, and OSError if the disk is full.
    """
    await_imports()
    view = read_study(paths.root, KnownSecrets.of_study(paths))
    figures = draw_figures(view)
    write_whole(paths.report, render_report(view, figures))
    paths.figures.mkdir(mode=OWNERS_FOLDER, exist_ok=True)
    for key, page in render_figures(view, figures).items():
        write_whole(paths.figures / f"{key}.html", page)
