"""Makes the pictures of the documents.

`python docs/images/make.py` makes those of the README from the study that `record.py` has recorded. `terminal.svg` is
the live table two thirds through that study. `report.png` is its report in Chromium. `mlflow.png` is the page of MLflow
that the printed link opens.

`python docs/images/make.py PLAN` makes `plan.png` from the page of a plan in its folder, and leaves the others.
"""

import contextlib
import io
import json
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "tests"), str(HERE.parents[1])]

from browser_fixtures import open_browser  # noqa: E402
from report_fixtures import PICTURED, recorded_study, with_results  # noqa: E402
from server_fixtures import mlflow_server  # noqa: E402

from zerotune.flows.live_view import LiveView  # noqa: E402
from zerotune.trial_lib.records.folders import StudyPaths, StudyRecord  # noqa: E402
from zerotune.trial_lib.report.html_report import write_report  # noqa: E402
from zerotune.trial_lib.report.read_study import read_study  # noqa: E402
from zerotune.trial_lib.study.arguments import StudyArguments  # noqa: E402
from zerotune.trial_lib.tracking.sync import StudySync, Tracker  # noqa: E402

WIDTH, HEIGHT = 1100, 1680


def draw_terminal(paths: StudyPaths) -> None:
    """Draws what the live view showed two thirds through the study, while a trial ran."""
    record = StudyRecord.model_validate_json(paths.record.read_text())
    lines = paths.history.read_text().splitlines(keepends=True)
    asks = [place for place, line in enumerate(lines) if "ask" in json.loads(line)]
    until = asks[2 * len(asks) // 3] + 1
    paths.history.write_text("".join(lines[:until]))
    ended = max(trial.ended for trial in read_study(paths.root).trials)
    view = LiveView(paths, StudyArguments.model_validate(record.arguments))
    view._started = time.monotonic() - ended
    view._message = ""
    view._read()
    console = Console(record=True, width=108, file=io.StringIO())
    console.print(f"$ zerotune tune -- {shlex.join(record.arguments['command'])}", style="bold", highlight=False)
    console.print(view._picture())
    # The reader's own fonts: none is fetched.
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    console.save_svg(str(HERE / "terminal.svg"), title="zerotune", code_format=plain)
    paths.history.write_text("".join(lines))


def draw_report(paths: StudyPaths, browser: Browser) -> None:
    """Takes a picture of the report's upper part."""
    write_report(paths)
    with open_page(paths.report, browser) as page:
        page.screenshot(path=HERE / "report.png")


def draw_mlflow(paths: StudyPaths, browser: Browser, folder: Path) -> None:
    """Takes a picture of the trials in MLflow."""
    server = mlflow_server(folder, f"sqlite:///{folder}/mlflow.db").wait_until_ready()
    try:
        paths = with_results(paths)
        tracker = Tracker(lambda: StudySync(paths, server.url), server.url)
        tracker.start()
        assert tracker.close(timeout_s=120), tracker.last_error
        page = browser.new_page(viewport={"width": WIDTH, "height": WIDTH * 2 // 3})
        page.goto(tracker.ways[0])
        page.wait_for_selector("[role=row][row-index]", timeout=60_000)
        # The assistant's panel hides a third of the table.
        page.get_by_role("button", name="Close", exact=True).first.click()
        page.wait_for_timeout(2000)
        page.screenshot(path=HERE / "mlflow.png")
    finally:
        server.kill()


def draw_plan(page_of_a_plan: Path, browser: Browser) -> None:
    """Takes a picture of a plan's answer, and of the figures of its devices."""
    with open_page(page_of_a_plan, browser) as page:
        # The command has the paths of this host. The table is long, and a terminal shows it too.
        page.evaluate("document.querySelectorAll('[aria-labelledby=use], section.long').forEach(e => e.remove())")
        last = page.locator("section:has([id^=plot-time])").first.bounding_box()
        assert last is not None
        height = last["y"] + last["height"] + 8
        page.set_viewport_size({"width": WIDTH, "height": round(height)})
        page.screenshot(path=HERE / "plan.png")


@contextlib.contextmanager
def open_page(file: Path, browser: Browser) -> Iterator[Page]:
    """Opens a page."""
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.goto(file.resolve().as_uri())
    yield page
    page.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        if sys.argv[1:]:
            draw_plan(Path(sys.argv[1]) / "report.html", browser)
            sys.exit()
        study = recorded_study(Path(folder), PICTURED)
        draw_terminal(study)
        draw_report(study, browser)
        draw_mlflow(study, browser, Path(folder) / "mlflow")
