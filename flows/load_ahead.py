"""What a study needs later is loaded in a thread while trials run. No device then waits for an import."""

import contextlib
import threading
from collections.abc import Sequence
from importlib import import_module


def load_ahead(modules: Sequence[str]) -> None:
    """Loads modules, and then what a report needs, in a thread.

    Args:
        modules: the names of the modules that the search imports later, as `Method.imported_later` has them.
    """
    threading.Thread(target=_load, args=(modules,), daemon=True, name="load-ahead").start()


def _load(modules: Sequence[str]) -> None:
    # What cannot be loaded fails again where it is needed.
    for module in modules:
        with contextlib.suppress(Exception):
            import_module(module)
    with contextlib.suppress(Exception):
        _load_report()


def _load_report() -> None:
    from trial_lib.report import write_report  # noqa: F401 - kept by Python
    from trial_lib.report.html_report import FIGURE, REPORT
    from trial_lib.report.page_parts import packed_plotly, page_template
    from trial_lib.report.plot_parts import empty_figure

    packed_plotly()
    for name in (REPORT, FIGURE):
        page_template(name)
    # Plotly reads its own defaults for the first figure.
    empty_figure("", "").to_json()
