"""The report of a study: one self-contained HTML file, with plotly's drawing code."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.records.units import bytes_shown, quantity
from trial_lib.report.failures import failure_groups
from trial_lib.report.figures import Drawn
from trial_lib.report.study_view import StudyView, TrialView, duration, setting_text


def render_report(view: StudyView, figures: Sequence[Drawn]) -> str:
    """Returns the report as HTML, with the study's figures."""
    return _template("report.html.j2").render(
        view=view,
        figures=figures,
        drawings=_drawings(figures),
        plotly=_packed_plotly(),
        failures=failure_groups(view.trials),
        compared=_compared(view),
        trials=view.ranked,
        config=None if view.best_config is None else json.dumps(view.best_config, indent=2),
    )


def render_figures(view: StudyView, figures: Sequence[Drawn]) -> dict[str, str]:
    """Returns an HTML page for each figure with a drawing, by its key."""
    drawn = [figure for figure in figures if figure.figure is not None]
    return {
        figure.key: _template("figure.html.j2").render(
            view=view, figures=[figure], drawings=_drawings([figure]), plotly=_packed_plotly()
        )
        for figure in drawn
    }


def _drawings(figures: Sequence[Drawn]) -> dict[str, Any]:
    """Returns plotly's data, by the figures' keys."""
    return {figure.key: json.loads(figure.figure.to_json()) for figure in figures if figure.figure is not None}


@cache
def _packed_plotly() -> str:
    """Returns plotly's code, compressed to two fifths; the page unpacks it."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 6, mtime=0)).decode()


@cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trial_lib.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "number": _number, "interval": _interval, "bytes": _bytes}
    environment.filters["setting"] = setting_text
    environment.tests["best"] = _is_best
    return environment.get_template(name)


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else quantity(value, unit).rstrip()


def _interval(ends: Sequence[float]) -> str:
    return f"{ends[0]:.2f} to {ends[1]:.2f}"


def _bytes(count: float | None) -> str:
    return "-" if count is None else bytes_shown(count)


def _is_best(trial: TrialView, view: StudyView) -> bool:
    return trial.number == view.best_number


def _compared(view: StudyView) -> list[tuple[str, str, str]]:
    """Returns the metrics of the winner beside those of the user's configuration: name, own, winner.

    Its own is empty if it was not measured.
    """
    shown = {name: SEARCH_METRICS[name].shown for name in dict.fromkeys((view.metric, "throughput"))}
    after: Mapping[str, float] = view.after
    return [(name, show(view.before.get(name)), show(after[name])) for name, show in shown.items() if name in after]
