"""The report of a study: one self-contained HTML file, with plotly's drawing code."""

import json
from collections.abc import Mapping, Sequence

from trial_lib.records.search_metrics import SEARCH_METRICS
from trial_lib.report.failures import failure_groups
from trial_lib.report.figures import Drawn
from trial_lib.report.foreseen.planned_rows import planned_rows
from trial_lib.report.page_parts import drawings, packed_plotly, page_template
from trial_lib.report.study_view import StudyView
from trial_lib.wire.traced_step import STEP_PARTS

REPORT, FIGURE = "report.html.j2", "figure.html.j2"


def render_report(view: StudyView, figures: Sequence[Drawn]) -> str:
    """Returns the report as HTML, with the study's figures."""
    return page_template(REPORT).render(
        view=view,
        figures=figures,
        drawings=drawings(figures),
        plotly=packed_plotly(),
        failures=failure_groups(view.trials),
        compared=_compared(view),
        trials=view.ranked,
        planned=[] if view.planned is None else planned_rows(view.planned),
        parts=[part for part in STEP_PARTS if any(account.shares.get(part) for account in view.why)],
        config=None if view.best_config is None else json.dumps(view.best_config, indent=2),
    )


def render_figures(view: StudyView, figures: Sequence[Drawn]) -> dict[str, str]:
    """Returns an HTML page for each figure with a drawing, by its key."""
    drawn = [figure for figure in figures if figure.figure is not None]
    return {
        figure.key: page_template(FIGURE).render(
            view=view, figures=[figure], drawings=drawings([figure]), plotly=packed_plotly()
        )
        for figure in drawn
    }


def _compared(view: StudyView) -> list[tuple[str, str, str]]:
    """Returns the metrics of the winner beside those of the user's configuration: name, own, winner.

    Its own is empty if it was not measured.
    """
    shown = {name: SEARCH_METRICS[name].shown for name in dict.fromkeys((view.metric, "throughput"))}
    after: Mapping[str, float] = view.after
    return [(name, show(view.before.get(name)), show(after[name])) for name, show in shown.items() if name in after]
