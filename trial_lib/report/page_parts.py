"""The parts that all pages share: templates, filters, and plotly's drawing code."""

import base64
import gzip
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from trial_lib.records.units import bytes_shown, duration, quantity
from trial_lib.report.figures import Drawn
from trial_lib.report.study_view import setting_text


def drawings(figures: Sequence[Drawn]) -> dict[str, Any]:
    """Returns plotly's data, by the figures' keys."""
    return {figure.key: json.loads(figure.figure.to_json()) for figure in figures if figure.figure is not None}


@cache
def packed_plotly() -> str:
    """Returns plotly's code, compressed to two fifths; the page unpacks it."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 6, mtime=0)).decode()


@cache
def page_template(name: str) -> jinja2.Template:
    """Returns a file of `templates`. It escapes its values, and a value that it lacks is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("trial_lib.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"duration": duration, "number": _number, "interval": _interval, "bytes": _bytes}
    environment.filters["setting"] = setting_text
    return environment.get_template(name)


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else quantity(value, unit).rstrip()


def _interval(ends: Sequence[float]) -> str:
    return f"{ends[0]:.2f} to {ends[1]:.2f}"


def _bytes(count: float | None) -> str:
    return "-" if count is None else bytes_shown(count)
