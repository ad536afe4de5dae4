"""Loads in a thread, while trials run, what a study imports later. No device then waits for an import of the search."""

import contextlib
import functools
import threading
from importlib import import_module


@functools.cache
def load_ahead(modules: tuple[str, ...]) -> None:
    """Loads modules, and then what a report needs, in a thread. A later call does nothing.

    Args:
        modules: their names, as `Method.loaded_ahead` has them.
    """
    threading.Thread(target=_load, args=(modules,), daemon=True, name="load-ahead").start()


def _load(modules: tuple[str, ...]) -> None:
    # What cannot be loaded fails again where it is needed.
    for module in modules:
        with contextlib.suppress(Exception):
            import_module(module)
    with contextlib.suppress(Exception):
        _load_report()


def _load_report() -> None:
    from trial_lib.report.html_report import FIGURE, REPORT
    from trial_lib.report.page_parts import packed_plotly, page_template
    from trial_lib.report.plot_parts import empty_figure
    from trial_lib.report.write_report import await_imports

    await_imports()
    packed_plotly()
    for name in (REPORT, FIGURE):
        page_template(name)
    # Plotly reads its own defaults for the first figure.
    empty_figure("", "").to_json()
