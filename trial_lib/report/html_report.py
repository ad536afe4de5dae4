"""The report of a study: one self-contained HTML file. Nothing in it is fetched, and its figures need no script."""

import json
from collections.abc import Mapping, Sequence
from functools import cache

import jinja2

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets
from zerotune.trial_lib.messages.files import OWNERS_FOLDER, write_whole
from zerotune.trial_lib.messages.measurement import STEP_PARTS
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import SEARCH_METRICS
from zerotune.trial_lib.records.units import bytes_shown, duration, quantity
from zerotune.trial_lib.report.chart import PHONE, Drawn
from zerotune.trial_lib.report.read_study import read_study
from zerotune.trial_lib.report.study_figures import draw_figures
from zerotune.trial_lib.report.study_view import (
    WORTH_COLUMNS,
    StudyView,
    failure_groups,
    setting_text,
    trial_columns,
    worth_rows,
)
from zerotune.trial_lib.report.tables import NOT_IN_TURN, PLANNED_COLUMNS, PLANNED_NUMBERS, planned_rows, summary
from zerotune.trial_lib.study.finding import OF_WORTHS


@cache
def page_template(name: str) -> jinja2.Template:
    """A file of `templates`. It escapes its values, and a value that it lacks is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("zerotune.trial_lib.report"),
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
    environment.globals["PHONE"] = PHONE
    return environment.get_template(name)


def render_report(view: StudyView, figures: Sequence[Drawn]) -> str:
    return page_template("report.html.j2").render(
        view=view,
        summary=summary(view),
        not_in_turn=NOT_IN_TURN,
        figures=figures,
        failures=failure_groups(view.trials),
        compared=_compared(view),
        trials=view.ranked,
        columns=trial_columns("report", view.metric),
        planned=[] if view.planned is None else planned_rows(view.planned),
        planned_columns=PLANNED_COLUMNS,
        planned_numbers=PLANNED_NUMBERS,
        worths=worth_rows(view),
        of_worths=OF_WORTHS,
        worth_columns=WORTH_COLUMNS,
        parts=[part for part in STEP_PARTS if any(account.shares.get(part) for account in view.why)],
        config=None if view.best_config is None else json.dumps(view.best_config, indent=2),
    )


def render_figures(view: StudyView, figures: Sequence[Drawn]) -> dict[str, str]:
    page = page_template("figure.html.j2")
    return {each.key: page.render(view=view, figures=[each]) for each in figures if each.figure is not None}


def _compared(view: StudyView) -> list[tuple[str, str, str]]:
    """The winner's metrics beside the user's: name, own (empty if not measured), winner."""
    shown = {name: SEARCH_METRICS[name].shown for name in dict.fromkeys((view.metric, "throughput"))}
    after: Mapping[str, float] = view.after
    return [(name, show(view.before.get(name)), show(after[name])) for name, show in shown.items() if name in after]


def write_report(paths: StudyPaths) -> None:
    """Writes the report of a study in any state.

    Raises InputError if the study's record or history is damaged, and OSError if the disk is full.
    """
    view = read_study(paths.root, KnownSecrets.of_study(paths))
    figures = draw_figures(view)
    write_whole(paths.report, render_report(view, figures))
    paths.figures.mkdir(mode=OWNERS_FOLDER, exist_ok=True)
    for key, page in render_figures(view, figures).items():
        write_whole(paths.figures / f"{key}.html", page)
